"""Helpers of the tests of turns: mutexes closed at the end, threads to wait in, joined segments.

Two segments of one process behave like those of two processes, since locks and bells belong to open
files. `TurnSegment.forget` is like a death.
"""

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotDoneError  # Python 3.10 has one of its own
from pathlib import Path
from typing import Any

import pytest

from crossover_ddp._turns import joining
from crossover_ddp._turns.joining import Membership
from crossover_ddp._turns.rules import Member
from crossover_ddp._turns.segment import TurnSegment
from crossover_ddp.gpu_mutex import GPUMutex
from tests.harness.groups import files_of, new_group

DEVICE = "dev0"
LEASE_S = 300.0  # longer than any test, so that no lease excuses turns that overlap
SOON_S = 60.0  # far less than the lease, and enough on a busy machine

Make = Callable[..., GPUMutex]
Join = Callable[..., TurnSegment]


class Nowhere(set[Any]):
    """Remembers no claim of this process, as if each mutex were in a process of its own."""

    def add(self, claim: object) -> None:
        pass


@pytest.fixture(autouse=True)
def several_jobs_in_this_process() -> Iterator[None]:
    # Not by the `monkeypatch` fixture, which would undo a test's own patches too late.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joining, "_claims", Nowhere())
        yield


@pytest.fixture
def group() -> str:
    return new_group()


@pytest.fixture
def make(group: str) -> Iterator[Make]:
    """Make mutexes, by default of one group on one device; all are closed at the end."""
    made: list[GPUMutex] = []

    def making(name: str | None = group, **arguments: Any) -> GPUMutex:
        made.append(GPUMutex(name, **{"device": DEVICE, "lease": LEASE_S, **arguments}))
        return made[-1]

    yield making
    for mutex in made:
        mutex.close()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(12) as pool:
        yield pool


def membership_of(mutex: GPUMutex) -> Membership:
    """Return the membership of a mutex that takes turns."""
    assert mutex._turns is not None
    return mutex._turns.membership


def segment_of(group: str) -> Path:
    return next(path for path in files_of(group) if path.suffix == ".turns")


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def acquire_in(threads: ThreadPoolExecutor, mutex: GPUMutex) -> "Future[float]":
    """Acquire in a thread. The result is the time at which that returned."""

    def acquiring() -> float:
        mutex.acquire()
        return time.monotonic()

    return threads.submit(acquiring)


def blocks(future: "Future[float]") -> bool:
    with contextlib.suppress(NotDoneError):
        future.result(0.1)
    return not future.done()


@contextlib.contextmanager
def held_up(threads: ThreadPoolExecutor, mutex: GPUMutex) -> "Iterator[Future[float]]":
    """Acquire in a thread. Check that it waits until the end of the block, and no longer."""
    waiting = acquire_in(threads, mutex)
    assert blocks(waiting)
    yield waiting
    waiting.result(SOON_S)


def join_at(
    base: object, *, job: int = 1, group: str = "jobs", device: str = DEVICE
) -> TurnSegment:
    segment = TurnSegment(group, device, base=str(base))
    segment.join(Member(job=job, lead=5, world_size=1, lease_s=1.0))
    return segment


@pytest.fixture
def join(tmp_path: Path) -> Iterator[Join]:
    """Join segments below the test's directory; all leave at the end."""
    joined: list[TurnSegment] = []

    def joining(**arguments: Any) -> TurnSegment:
        joined.append(join_at(tmp_path, **arguments))
        return joined[-1]

    yield joining
    for segment in joined:
        segment.leave()


def member(segment: TurnSegment, job: int) -> Member:
    return next(found for found in segment.members() if found.job == job)


def jobs(segment: TurnSegment) -> list[int]:
    return sorted(found.job for found in segment.members())


def files(base: Path) -> list[str]:
    return sorted(path.name for path in base.rglob("*") if not path.is_dir())


def state(base: Path) -> list[tuple[object, ...]]:
    """Return the status of all files, so that a change of any file is seen."""
    return [
        (
            path,
            found.st_ino,
            found.st_mode,
            found.st_uid,
            found.st_size,
            found.st_mtime_ns,
            found.st_ctime_ns,
        )
        for path in sorted([base, *base.rglob("*")])
        for found in [path.lstat()]
    ]


def home(base: Path) -> Path:
    return base / f"crossover_ddp-{os.geteuid()}"

"""What the tests of the mutex share: mutexes that are closed at the end, and threads to wait in."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotDoneError  # Python 3.10 has one of its own
from pathlib import Path
from typing import Any

import pytest

from crossover_ddp._turns import joining
from crossover_ddp._turns.joining import Membership
from crossover_ddp.gpu_mutex import GPUMutex
from tests.harness.groups import files_of, new_group

DEVICE = "dev0"
LEASE_S = 300.0  # longer than any test: a turn that overlaps another one was not forgiven
SOON_S = 60.0  # far less than the lease, and enough on a busy machine

Make = Callable[..., GPUMutex]


class Nowhere(set[Any]):
    """Remembers no place of this process, as if each mutex were in a process of its own."""

    def add(self, place: object) -> None:
        pass


@pytest.fixture(autouse=True)
def several_jobs_in_this_process() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:  # the fixture would undo a test's own patches too late
        patch.setattr(joining, "_places", Nowhere())
        yield


@pytest.fixture
def group() -> str:
    return new_group()


@pytest.fixture
def make(group: str) -> Iterator[Make]:
    """Make mutexes of one group on one device, unless told otherwise; all are closed at the end."""
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
    """Look behind a mutex that takes turns."""
    assert mutex._turns is not None
    return mutex._turns.membership


def segment_of(group: str) -> Path:
    return next(path for path in files_of(group) if path.suffix == ".turns")


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def acquire_in(threads: ThreadPoolExecutor, mutex: GPUMutex) -> "Future[float]":
    """Acquire in a thread; the result is when that was done."""

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
    """Acquire in a thread, which waits until the block's end and no longer."""
    waiting = acquire_in(threads, mutex)
    assert blocks(waiting)
    yield waiting
    waiting.result(SOON_S)

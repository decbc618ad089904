"""Find threads, child processes, environment variables and shared memory that a test has left behind."""

import contextlib
import gc
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import TypeVar

import pytest
import torch.distributed as dist

from .waiting import gone

# What has been told to end may need a moment, on a busy machine more than one.
GRACE_S = 20.0

SHARED_MEMORY = Path("/dev/shm")

# Set by pytest for itself, or by libraries when they are first imported (scikit-learn sets KMP_*).
_FOREIGN_VARIABLES = ("PYTEST_", "KMP_", "TORCHINDUCTOR_", "TRITON_")

_Found = TypeVar("_Found", bound=Hashable)


@dataclass(frozen=True)
class Snapshot:
    """What exists before a test, so that what exists after it can be compared."""

    threads: frozenset[threading.Thread]
    children: frozenset[int]
    environment: Mapping[str, str]
    segments: frozenset[Path]

    @classmethod
    def take(cls) -> "Snapshot":
        return cls(_threads(), _children(), dict(os.environ), _segments())

    def leaks(self) -> list[str]:
        """Say what is here now and was not then; environment variables are put back at once."""
        return [
            *_restore_environment(self.environment),
            *_persistent(lambda: _threads() - self.threads, lambda thread: f"thread {thread.name!r}"),
            *_persistent(lambda: _children() - self.children, _describe_process),
            *_persistent(lambda: _segments() - self.segments, lambda path: f"file {path}"),
        ]


@contextlib.contextmanager
def nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves something behind in the block; a process group is destroyed at once, too."""
    before = Snapshot.take()
    yield
    leaks = before.leaks()
    if dist.is_initialized():
        dist.destroy_process_group()
        leaks.append("default process group")
    if leaks:
        pytest.fail("the test left behind: " + "; ".join(leaks), pytrace=False)


def _restore_environment(before: Mapping[str, str]) -> list[str]:
    now = dict(os.environ)
    changed = [name for name in sorted(before.keys() | now.keys()) if before.get(name) != now.get(name)]
    findings = []
    for name in changed:
        if name.startswith(_FOREIGN_VARIABLES):
            continue
        findings.append(f"environment variable {name}: {before.get(name)!r} became {now.get(name)!r}")
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    return findings


def _persistent(find: Callable[[], frozenset[_Found]], describe: Callable[[_Found], str]) -> list[str]:
    """Describe what is still found after the grace."""
    deadline_s = time.monotonic() + GRACE_S
    while found := find():
        if time.monotonic() > deadline_s:
            return [describe(each) for each in found]
        gc.collect()  # finalizers of what is unreachable may end it
        time.sleep(0.02)
    return []


def _threads() -> frozenset[threading.Thread]:
    """List threads, without those that Python has only met, such as autograd's for a device: they are torch's."""
    found = threading.enumerate()
    return frozenset(each for each in found if not isinstance(each, threading._DummyThread))


def _children() -> frozenset[int]:
    """List the living children of this process, without the two servants of `multiprocessing`."""
    servants = {resource_tracker._resource_tracker._pid, forkserver._forkserver._forkserver_pid}  # type: ignore[attr-defined]
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread that has ended
            found.update(map(int, (task / "children").read_text().split()))
    return frozenset(pid for pid in found - servants if not gone(pid))


def _describe_process(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        command = "?"
    return f"child process {pid} ({command.strip()[:200]})"


def _segments() -> frozenset[Path]:
    """List files of this test run's own group: somebody else may train or test on this machine."""
    group = os.environ.get("CROSSOVER_GROUP", "default")
    while True:
        try:
            return frozenset(path for path in SHARED_MEMORY.glob("crossover*/**/*") if group in path.name)
        except FileNotFoundError:  # another run has just removed a directory
            continue

"""Find threads, child processes, variables and shared memory that tests leave behind."""

import contextlib
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any, Final

import pytest
import torch.distributed as dist

from .groups import files_of
from .waiting import gone

# Threads and processes may take a while to end, above all on a busy machine.
GRACE_S = 20.0
# Set by pytest for itself, or by libraries when they are first imported (scikit-learn sets KMP_*).
_FOREIGN_VARIABLES: Final = ("PYTEST_", "KMP_", "TORCHINDUCTOR_", "TRITON_")


class Snapshot:
    """The threads, processes, variables and files that exist before a test."""

    def __init__(self) -> None:
        self._environment = dict(os.environ)
        self._found = [find() for find, _ in _KINDS]

    def leaks(self) -> list[str]:
        """Describe all that exists now and did not exist then. Restores environment variables."""
        leaks = _restore_environment(self._environment)
        for before, (find, describe) in zip(self._found, _KINDS, strict=True):
            deadline_s = time.monotonic() + GRACE_S
            while found := find() - before:
                if time.monotonic() > deadline_s:
                    leaks += map(describe, found)
                    break
                gc.collect()  # the finalizer of an unreachable object may end it
                time.sleep(0.02)
        return leaks


@contextlib.contextmanager
def nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves something behind in the block. Destroys a process group."""
    before = Snapshot()
    yield
    leaks = before.leaks()
    if dist.is_initialized():
        dist.destroy_process_group()
        leaks.append("default process group")
    if leaks:
        pytest.fail("the test left behind: " + "; ".join(leaks), pytrace=False)


def _restore_environment(before: Mapping[str, str]) -> list[str]:
    now = dict(os.environ)
    changed = [
        name
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name) and not name.startswith(_FOREIGN_VARIABLES)
    ]
    for name in changed:
        os.environ.pop(name, None)
    os.environ.update({name: before[name] for name in changed if name in before})
    return [
        f"environment variable {name}: {before.get(name)!r} became {now.get(name)!r}"
        for name in changed
    ]


def _threads() -> set[Any]:
    """Return Python's threads, except torch's own.

    Those are dummy threads, such as autograd's for a device, and the compiler's progress bar.
    """
    return {
        each
        for each in threading.enumerate()
        if not isinstance(each, threading._DummyThread) and each.name != "tqdm_monitor"
    }


def _children() -> set[Any]:
    servers = {
        resource_tracker._resource_tracker._pid,  # type: ignore[attr-defined]
        forkserver._forkserver._forkserver_pid,  # type: ignore[attr-defined]
    }
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread that has just ended
            found.update(map(int, (task / "children").read_text().split()))
    return {pid for pid in found - servers if not gone(pid)}


def _describe_process(pid: int) -> str:
    command = "?"
    with contextlib.suppress(OSError):
        command = (
            Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        )
    return f"child process {pid} ({command.strip()[:200]})"


def _segments() -> set[Any]:
    """Return the files of this test run's own group. Other jobs may run on this machine."""
    return {*files_of(os.environ.get("CROSSOVER_GROUP", "default"))}


# For each kind of leak a function that finds all of them, and one that describes one of them.
_KINDS: Final[list[tuple[Callable[[], set[Any]], Callable[[Any], str]]]] = [
    (_threads, lambda thread: f"thread {thread.name!r}"),
    (_children, _describe_process),
    (_segments, lambda path: f"file {path}"),
]

"""A child that is forked at the worst moment holds no lock and no bell of its parent."""

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from crossover_ddp._turns.segment import GroupFiles, TurnSegment, no_fork
from tests.unit.turns.joined_segments import Join, files, jobs, join_at

# How long the gap is held open: far longer than a fork takes, also on a busy machine.
GAP_S = 1.0


def _held_by_fork(below: Path) -> list[str]:
    """Fork, and return which files of a directory the child has open."""
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        links = []
        try:
            for fd in os.listdir("/proc/self/fd"):
                with contextlib.suppress(OSError):  # of the listing itself
                    links.append(os.readlink(f"/proc/self/fd/{fd}"))
            os.write(writable, json.dumps([link for link in links if link.startswith(str(below))]).encode())
        finally:
            os._exit(0)
    os.close(writable)
    with open(readable) as pipe:
        found: list[str] = json.load(pipe)
    os.waitpid(child, 0)
    return found


class Gap:
    """The moment around a call of another thread, made long; whoever forks in it can be sure to be there."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self._thread: threading.Thread | None = None

    def hold(self) -> None:
        if threading.current_thread() is self._thread and not self.entered.is_set():
            self.entered.set()
            time.sleep(GAP_S)

    def held_by_fork_of(self, work: Callable[[], object], below: Path) -> list[str]:
        """Run ``work`` in a thread, fork in its gap, and return which files of a directory the child has open."""
        self._thread = threading.Thread(target=work)
        self._thread.start()
        assert self.entered.wait(60.0)
        try:
            return _held_by_fork(below)
        finally:
            self._thread.join()


@pytest.mark.parametrize("suffix", [".turns", ".bell"])
def test_a_fork_while_a_segment_is_joined_holds_nothing(
    suffix: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gap, original = Gap(), GroupFiles.open_file

    def slow(self: GroupFiles, name: str, flags: int) -> int:
        fd = original(self, name, flags)
        if name.endswith(suffix):
            gap.hold()
        return fd

    monkeypatch.setattr(GroupFiles, "open_file", slow)
    joined: list[TurnSegment] = []
    assert gap.held_by_fork_of(lambda: joined.append(join_at(tmp_path)), tmp_path) == []
    assert jobs(joined[0]) == [1]
    joined[0].leave()
    assert files(tmp_path) == []


@pytest.mark.parametrize("way", ["leave", "forget"])
def test_a_fork_while_a_segment_is_closed_holds_nothing(
    way: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    segment = join_at(tmp_path)
    gap, original = Gap(), os.close
    monkeypatch.setattr(os, "close", lambda fd: (gap.hold(), original(fd)))
    assert gap.held_by_fork_of(getattr(segment, way), tmp_path) == []


def test_a_thread_that_forks_in_its_own_gap_does_not_wait_for_itself(join: Join, tmp_path: Path) -> None:
    """As in a signal's handler, or in a finalizer."""
    segment = join(job=1)
    with no_fork:
        assert _held_by_fork(tmp_path) == []
    owned: Any = no_fork
    assert not owned._is_owned()
    assert jobs(segment) == [1]


def test_a_child_may_join_in_its_own_right_and_leaves_the_slot_of_its_parent_alone(
    join: Join, tmp_path: Path
) -> None:
    segment = join(job=1)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            segment.leave()
            code = int(jobs(join_at(tmp_path, job=2)) != [1, 2])
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert jobs(segment) == [1]

"""Bells: how a process wakes its siblings, and how they learn of its death. Our design.

[Note: bells]
A bell is a FIFO that its owner holds open for reading. It does two things that a futex cannot do together: a byte
written to it wakes the owner, and a process that holds it open for writing gets POLLERR from the kernel the moment its
last reader is gone. So one ``poll`` waits for "given back", "died" and the end of the lease at once. No thread watches,
nothing polls in a loop, no process id is interpreted: it works between containers that share /dev/shm.
"""

import contextlib
import os
import select
import stat
import threading
from collections.abc import Iterable

from .descriptors import Descriptors, no_fork
from .private_files import PrivateFiles

_LONGEST_WAIT_S = 3600.0
_BELL_BYTES = 1 << 16  # all that a pipe holds: one read silences it
_OWN = "own"

Sibling = tuple[int, int]
"""A process: its slot, and its incarnation in that slot."""


def _suffix(slot: int) -> str:
    return f".{slot}.bell"


class Bells:
    """The bell of this process, and the bells of its siblings.

    Thread-safe, except `make_own` and `wait`: a thread of its own may publish a turn, and rings then.

    Args:
        files: where the bells are.
    """

    def __init__(self, files: PrivateFiles) -> None:
        self._files = files
        self._own = Descriptors()
        self._others = Descriptors()
        self._held: dict[int, Sibling] = {}  # by slot: whose bell is open
        self._lock = threading.RLock()

    @property
    def own_fd(self) -> int:
        """The own bell; -1 before `make_own` and after `close`."""
        return self._own.get(_OWN)

    def make_own(self, slot: int) -> None:
        """Make the bell of this process, which has that slot."""
        self._files.make_fifo(_suffix(slot))
        # Open for writing too, or its poll would report a hang-up whenever no sibling holds it.
        self._own.open(_OWN, lambda: self._files.open(_suffix(slot), os.O_RDWR, is_kind=stat.S_ISFIFO))

    def own_is_removed(self) -> bool:
        """Return whether somebody has removed the own bell."""
        return not os.fstat(self.own_fd).st_nlink

    def remove_own(self, slot: int) -> None:
        """Remove the own bell; siblings that hold it open see no reader once it is closed too."""
        self._files.remove(_suffix(slot))

    def close(self) -> None:
        """Close all bells."""
        self._own.close_all()
        self._others.close_all()

    # --- siblings ------------------------------------------------------------------------------------------

    def is_alive(self, sibling: Sibling) -> bool:
        """Return whether the sibling's bell has a reader."""
        return self._reader(sibling) is not None

    def ring(self, sibling: Sibling) -> None:
        """Wake a sibling."""
        with self._lock:  # nobody may close the bell, and have its number taken, before it has rung
            fd = self._reader(sibling)
            if fd is not None:
                with contextlib.suppress(BlockingIOError, BrokenPipeError):  # full: it is awake; broken: dead
                    os.write(fd, b"\0")

    def _reader(self, sibling: Sibling) -> int | None:
        """Return the writing end of a sibling's bell, or None if nobody reads it: the sibling is dead."""
        slot, _ = sibling
        with self._lock:
            if self._held.get(slot) != sibling or self._others.get(slot) < 0:
                self._hold(sibling)
            fd = self._others.get(slot)
            if fd < 0:
                return None
            poll = select.poll()
            poll.register(fd, 0)
            if poll.poll(0):
                self._others.close(slot)
                return None
            return fd

    def _hold(self, sibling: Sibling) -> None:
        """Open a sibling's bell in place of the bell of its slot's earlier owner."""
        slot, _ = sibling
        with no_fork:
            self._others.close(slot)
            self._held[slot] = sibling
            with contextlib.suppress(OSError):  # no reader, or no bell: its owner has ended
                self._others.open(
                    slot, lambda: self._files.open(_suffix(slot), os.O_WRONLY, is_kind=stat.S_ISFIFO)
                )

    # --- waiting -------------------------------------------------------------------------------------------

    def ring_own(self) -> None:
        """End the own `wait` from another thread."""
        if self.own_fd >= 0:
            with contextlib.suppress(OSError):
                os.write(self.own_fd, b"\0")

    def wait(self, watched: Iterable[Sibling], timeout_s: float) -> None:
        """Block until somebody rings, one of ``watched`` dies, or the time is over."""
        poll = select.poll()
        poll.register(self.own_fd, select.POLLIN)
        for sibling in watched:
            fd = self._reader(sibling)
            if fd is None:
                return
            poll.register(fd, 0)
        # The kernel takes no more than 24 days; the caller looks again anyway.
        poll.poll(min(max(0.0, timeout_s), _LONGEST_WAIT_S) * 1000 + 1)
        with contextlib.suppress(BlockingIOError):
            os.read(self.own_fd, _BELL_BYTES)

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
import threading
from collections import defaultdict
from collections.abc import Iterable

from .files import GroupFiles, OpenFile, no_fork

_LONGEST_WAIT_S = 3600.0
_BELL_BYTES = 1 << 16  # all that a pipe holds: one read silences it

Sibling = tuple[int, int]
"""A process: its slot, and its incarnation in that slot."""


def _suffix(slot: int) -> str:
    return f".{slot}.bell"


class Bells:
    """The bell of this process, and the bells of its siblings.

    Thread-safe, except `make_own` and `wait`: a thread of its own may publish a turn, and rings then.
    """

    def __init__(self, files: GroupFiles) -> None:
        self._files = files
        self.own = OpenFile()
        """The own bell; closed before `make_own`."""
        self._others: defaultdict[int, OpenFile] = defaultdict(OpenFile)
        self._held: dict[int, Sibling] = {}  # by slot: whose bell is open
        self._lock = threading.RLock()

    def make_own(self, slot: int) -> None:
        """Make the bell of this process, which has that slot."""
        self._files.make_fifo(_suffix(slot))
        # Open for writing too, or its poll would report a hang-up whenever no sibling holds it.
        self.own.open(lambda: self._files.open(_suffix(slot), os.O_RDWR))

    def remove_own(self, slot: int) -> None:
        """Remove the own bell; siblings that hold it open see no reader once it is closed too."""
        self._files.remove(_suffix(slot))

    def close(self) -> None:
        """Close all bells."""
        with self._lock:
            for each in (self.own, *self._others.values()):
                each.close()

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
            bell = self._others[slot]
            if self._held.get(slot) != sibling or bell.fd < 0:
                self._hold(sibling, bell)
            if bell.fd < 0:
                return None
            poll = select.poll()
            poll.register(bell.fd, 0)
            if poll.poll(0):
                bell.close()
                return None
            return bell.fd

    def _hold(self, sibling: Sibling, bell: OpenFile) -> None:
        """Open a sibling's bell in place of the bell of its slot's earlier owner."""
        slot, _ = sibling
        with no_fork:
            bell.close()
            self._held[slot] = sibling
            with contextlib.suppress(OSError):  # no reader, or no bell: its owner has ended
                bell.open(lambda: self._files.open(_suffix(slot), os.O_WRONLY))

    # --- waiting -------------------------------------------------------------------------------------------

    def ring_own(self) -> None:
        """End the own `wait` from another thread."""
        with self._lock, contextlib.suppress(OSError):  # as in `ring`
            os.write(self.own.fd, b"\0")

    def wait(self, watched: Iterable[Sibling], timeout_s: float) -> None:
        """Block until somebody rings, one of ``watched`` dies, or the time is over."""
        poll = select.poll()
        poll.register(self.own.fd, select.POLLIN)
        for sibling in watched:
            fd = self._reader(sibling)
            if fd is None:
                return
            poll.register(fd, 0)
        # The kernel takes no more than 24 days; the caller looks again anyway.
        poll.poll(min(max(0.0, timeout_s), _LONGEST_WAIT_S) * 1000 + 1)
        with contextlib.suppress(BlockingIOError):
            os.read(self.own.fd, _BELL_BYTES)

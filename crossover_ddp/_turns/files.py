"""The files of one group in shared memory, which a forked child closes; the doorbells among them. Our design.

They lie in a directory that is this user's alone, which is checked once it is open: nobody else can put a file there.
It stays when the last file has gone.

[Note: forks]
A slot belongs to the process that holds the kernel's lock on it, and a process counts as alive while its bell has a
reader. A forked child inherits the open files, and with them the lock and the bell, so it would keep the slot of its
dead parent alive. Therefore every child closes them first. It must know all of them: no thread may fork between the
opening of a file and the moment when it is noted, so both happen under `no_fork`.

[Note: bells]
A bell is a FIFO that its owner holds open for reading. It does two things that a futex cannot do together: a byte
written to it wakes the owner, and a process that holds it open for writing gets POLLERR from the kernel the moment its
last reader is gone. So one ``poll`` waits for "given back", "died" and the end of the lease at once. No thread watches,
nothing polls in a loop, no process id is interpreted: it works between containers that share /dev/shm.
"""

import contextlib
import errno
import os
import select
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Final

from crossover_ddp._system.shared_memory import open_directory, segment_directory
from crossover_ddp.errors import SegmentError

no_fork: Final = threading.RLock()
"""A fork waits for this lock. It is held only while files are opened, closed or rung, never over a wait."""
_all: "weakref.WeakSet[OpenFile]" = weakref.WeakSet()
_guarded = False
_CLOSED: Final = -1  # a number that every system call refuses
_LONGEST_WAIT_S = 3600.0
_BELL_BYTES = 1 << 16  # all that a pipe holds: one read silences it

Sibling = tuple[int, int]
"""A process: its slot, and its incarnation in that slot."""


class OpenFile:
    """An open file that a forked child closes before it does anything else. Thread-safe."""

    def __init__(self) -> None:
        self.fd = _CLOSED
        """Its descriptor; -1, which every system call refuses, while it is closed."""
        with no_fork:
            _guard_forks()
            _all.add(self)

    def open(self, opening: Callable[[], int]) -> None:
        """Hold the descriptor that ``opening`` returns, instead of the one before."""
        with no_fork:
            self.close()
            self.fd = opening()

    def close(self) -> None:
        """Close the file, if it is open."""
        with no_fork:
            fd, self.fd = self.fd, _CLOSED
            if fd != _CLOSED:
                os.close(fd)

    def is_removed(self) -> bool:
        """Return whether the file is open and has no name any more."""
        return self.fd != _CLOSED and not os.fstat(self.fd).st_nlink


def _guard_forks() -> None:
    global _guarded
    if not _guarded:
        os.register_at_fork(
            before=no_fork.acquire, after_in_parent=no_fork.release, after_in_child=_close_in_child
        )
        _guarded = True


def _close_in_child() -> None:
    for each in list(_all):
        each.close()
    no_fork.release()


class GroupFiles:
    """Open, make and remove the files of a group; ``suffix`` is what follows the group in a file's name.

    On failure: `SegmentError` names the file and what to do; ``FileNotFoundError`` where a file is not there.
    """

    def __init__(self, group: str, base: str) -> None:
        self.stem = f"{group}@"  # no group's name holds the sign
        self._base = base
        self._path = segment_directory(base)
        self._directory = OpenFile()
        self._directory.open(lambda: open_directory(base, make=True))

    @property
    def directory_fd(self) -> int:
        """The open directory."""
        return self._directory.fd

    def path(self, suffix: str) -> str:
        """Return the path of a file, for messages and for people."""
        return os.path.join(self._path, f"{self.stem}{suffix}")

    def open(self, suffix: str, flags: int) -> int:
        """Return the descriptor of a file; a symbolic link is no file."""
        try:
            flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
            return os.open(f"{self.stem}{suffix}", flags, 0o600, dir_fd=self.directory_fd)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENXIO):  # no file; a bell without a reader
                raise
            found = "a symbolic link" if error.errno == errno.ELOOP else error.strerror
            words = (
                f"expected a file of turns at {self.path(suffix)}, got {found}; remove it while no job runs"
            )
            raise SegmentError(words) from error

    def make_fifo(self, suffix: str) -> None:
        """Make a FIFO in place of whatever has that name."""
        try:
            self.remove(suffix)
            os.mkfifo(f"{self.stem}{suffix}", 0o600, dir_fd=self.directory_fd)
        except OSError as error:
            words = f"cannot make {self.path(suffix)}: {error.strerror}; free some of {self._base}"
            raise SegmentError(words) from error

    def remove(self, suffix: str) -> None:
        """Remove a file, if it is still there."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{self.stem}{suffix}", dir_fd=self.directory_fd)

    def size_bytes(self, suffix: str) -> int:
        """Return the size of a file; 0 if there is none."""
        try:
            return os.stat(f"{self.stem}{suffix}", dir_fd=self.directory_fd, follow_symlinks=False).st_size
        except FileNotFoundError:
            return 0

    def close(self) -> None:
        """Close the directory."""
        self._directory.close()


class Bells:
    """The bell of this process, and the bells of its siblings; see [Note: bells].

    Thread-safe, except `make_own` and `wait`: a thread of its own may publish a turn, and rings then.
    """

    def __init__(self, files: GroupFiles) -> None:
        self._files = files
        self.own = OpenFile()
        """The own bell; closed before `make_own`."""
        self._others: defaultdict[int, OpenFile] = defaultdict(OpenFile)  # by slot
        self._held: dict[int, Sibling] = {}  # by slot: whose bell is open

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
        with no_fork:
            for each in (self.own, *self._others.values()):
                each.close()

    def is_alive(self, sibling: Sibling) -> bool:
        """Return whether the sibling's bell has a reader."""
        return self._reader(sibling) is not None

    def ring(self, sibling: Sibling) -> None:
        """Wake a sibling."""
        with no_fork:  # nor may anybody close the bell, and have its number taken, before it has rung
            fd = self._reader(sibling)
            if fd is not None:
                with contextlib.suppress(BlockingIOError, BrokenPipeError):  # full: it is awake; broken: dead
                    os.write(fd, b"\0")

    def _reader(self, sibling: Sibling) -> int | None:
        """Return the writing end of a sibling's bell, or None if nobody reads it: the sibling is dead."""
        slot, _ = sibling
        with no_fork:
            bell = self._others[slot]
            if self._held.get(slot) != sibling or bell.fd < 0:  # perhaps of the slot's earlier owner
                self._held[slot] = sibling
                with contextlib.suppress(OSError):  # no reader, or no bell: its owner has ended
                    bell.open(lambda: self._files.open(_suffix(slot), os.O_WRONLY))
            if bell.fd < 0:
                return None
            poll = select.poll()
            poll.register(bell.fd, 0)
            if poll.poll(0):
                bell.close()
                return None
            return bell.fd

    def ring_own(self) -> None:
        """End the own `wait` from another thread."""
        with no_fork, contextlib.suppress(OSError):  # as in `ring`
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


def _suffix(slot: int) -> str:
    return f".{slot}.bell"

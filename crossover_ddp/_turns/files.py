"""The files of one group, in this user's private directory of shared memory. Our design.

The directory is this user's alone, which is checked once it is open: nobody else can put a file there. It stays when
the last file has gone.

[Note: forks]
A slot belongs to the process that holds the kernel's lock on it, and a process counts as alive while its bell has a
reader. A forked child inherits the open files, and with them the lock and the bell, so it would keep the slot of its
dead parent alive. Therefore every child closes them first. It must know all of them: no thread may fork between the
opening of a file and the moment when it is noted, so both happen under `no_fork`.
"""

import contextlib
import errno
import os
import threading
import weakref
from collections.abc import Callable
from typing import Final

from crossover_ddp._system.shared_memory import open_directory, segment_directory
from crossover_ddp.errors import SegmentError

no_fork: Final = threading.RLock()
"""A fork waits for this lock. It is held only while files are opened or closed, never over a wait."""
_all: "weakref.WeakSet[OpenFile]" = weakref.WeakSet()
_guarded = False
_CLOSED: Final = -1  # a number that every system call refuses


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
        self._directory.open(self._open_directory)

    def _open_directory(self) -> int:
        if os.path.isdir(self._base):
            try:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(self._path, 0o700)
            except OSError as error:
                words = f"cannot make {self._path}: {error.strerror}; make {self._base} writable"
                raise SegmentError(words) from error
        return open_directory(self._base)

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

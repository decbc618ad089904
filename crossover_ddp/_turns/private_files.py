"""The files of one group on one device, in this user's private directory of shared memory. Our design.

Nothing of another user's, no symbolic link and no other kind of file is ever opened or changed.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Callable

from crossover_ddp._system.shared_memory import check_owned, open_directory, segment_directory
from crossover_ddp.errors import SegmentError

from .descriptors import Descriptors, no_fork

_DIRECTORY = "directory"
KEEP_FILES = (
    "where logind removes shared memory at logout, loginctl enable-linger keeps it; start the job again"
)


def open_or_make_directory(base: str) -> tuple[int, str]:
    """Open this user's directory below ``base``, made if it is missing; return its descriptor and its path."""
    path = segment_directory(base)
    if os.path.isdir(base):
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise SegmentError(f"cannot make {path}: {error.strerror}; make {base} writable") from error
    return open_directory(base), path


class PrivateFiles:
    """Open, make and remove files by their suffixes; all names begin with the same stem.

    Args:
        stem: of the files' names, the same for all jobs of a group on a device.
        base: where shared memory is mounted.

    On failure: `SegmentError` names the file and what to do. ``FileNotFoundError`` where a file is not there, or
    where the last process to leave has just removed the directory.
    """

    def __init__(self, stem: str, base: str) -> None:
        self.stem = stem
        self.base = base
        self.directory = ""
        """Its path; empty before `enter`."""
        self._descriptors = Descriptors()

    @property
    def directory_fd(self) -> int:
        """The open directory; -1 before `enter` and after `close`."""
        return self._descriptors.get(_DIRECTORY)

    def path(self, suffix: str) -> str:
        """Return the path of a file, for messages and for people."""
        return os.path.join(self.directory, f"{self.stem}{suffix}")

    def enter(self) -> None:
        """Open the directory, or open it again if the one that is open was removed."""
        if self.directory_fd >= 0 and os.fstat(self.directory_fd).st_nlink:
            return
        with no_fork:
            self._descriptors.close(_DIRECTORY)
            self._descriptors.open(_DIRECTORY, self._opened_directory)

    def _opened_directory(self) -> int:
        fd, self.directory = open_or_make_directory(self.base)
        return fd

    def open(self, suffix: str, flags: int, *, is_kind: Callable[[int], bool] = stat.S_ISREG) -> int:
        """Open a file that belongs to this user alone and is of the right kind; return its descriptor.

        Callers that keep it open note it with `Descriptors`.
        """
        path = self.path(suffix)
        flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            fd = os.open(f"{self.stem}{suffix}", flags, 0o600, dir_fd=self.directory_fd)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENXIO):  # no file; a bell without a reader
                raise
            found = "a symbolic link" if error.errno == errno.ELOOP else error.strerror
            raise SegmentError(
                f"expected a file of user {os.geteuid()}, got {found} at {path}; remove it while no job runs"
            ) from error
        try:
            check_owned(fd, path)
            if not is_kind(os.fstat(fd).st_mode):
                raise SegmentError(
                    f"expected another kind of file at {path}, got mode {os.fstat(fd).st_mode:o}; "
                    "remove it while no job runs"
                )
        except SegmentError:
            os.close(fd)
            raise
        return fd

    def make_fifo(self, suffix: str) -> None:
        """Make a FIFO in place of whatever has that name."""
        try:
            self.remove(suffix)
            os.mkfifo(f"{self.stem}{suffix}", 0o600, dir_fd=self.directory_fd)
        except OSError as error:
            raise SegmentError(
                f"cannot make {self.path(suffix)}: {error.strerror}; remove it or free some of {self.base}"
            ) from error

    def link(self, suffix: str, new_suffix: str) -> None:
        """Give a file a second name. Raises ``FileExistsError`` if that name is taken."""
        names = (f"{self.stem}{suffix}", f"{self.stem}{new_suffix}")
        os.link(*names, src_dir_fd=self.directory_fd, dst_dir_fd=self.directory_fd)

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
        self._descriptors.close_all()

"""The private directory of this user in shared memory.

Our design; see the notes in `crossover_ddp._turns.segment`.
"""

import contextlib
import os
import stat
import sys

from crossover_ddp.errors import SegmentError

try:
    import fcntl as fcntl
except ImportError as error:
    raise ImportError(
        f"expected Linux, got sys.platform={sys.platform}; "
        "crossover_ddp needs its file locks and shared memory"
    ) from error

SHARED_MEMORY = "/dev/shm"


def segment_directory(base: str) -> str:
    """Return the path of the directory below ``base`` that holds all segments of this user."""
    return os.path.join(base, f"crossover_ddp-{outer_user(os.geteuid(), _uid_map())}")


def outer_user(user: int, uid_map: str) -> int:
    """Return the user id outside of the container, which is unique on the machine.

    In rootless containers every user has id 0. ``uid_map`` is the text of ``/proc/self/uid_map``.
    Each line has three numbers: the first id inside, the first id outside, and how many ids there
    are. An id that it does not map is returned as it is.
    """
    for line in uid_map.splitlines():
        inside, outside, count = map(int, line.split())
        if inside <= user < inside + count:
            return outside + user - inside
    return user


def _uid_map() -> str:
    try:
        with open("/proc/self/uid_map") as file:
            return file.read()
    except OSError:  # no /proc, or a kernel without user name spaces
        return ""


def open_directory(base: str, *, make: bool = False) -> int:
    """Open the directory of this user's segments, and return its file descriptor.

    Args:
        base: the mount of shared memory.
        make: make the directory if it is missing.

    Raises ``FileNotFoundError`` if the directory is missing, ``SegmentError`` if it is not private.
    """
    path = segment_directory(base)
    if not sys.platform.startswith("linux") or not os.path.isdir(base):
        raise SegmentError(
            f"expected Linux with {base}, got {sys.platform}; "
            "turns need its shared memory and locks"
        )
    if make:
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700)
        except OSError as error:
            raise SegmentError(
                f"cannot make {path}: {error.strerror}; make {base} writable"
            ) from error
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise  # no job has joined a group yet
    except OSError as error:
        raise SegmentError(
            f"expected {path} to be a directory of this user, got {error.strerror}; "
            "if it is a symbolic link or a file, remove it"
        ) from error
    found = os.fstat(fd)
    mode = stat.S_IMODE(found.st_mode)
    problem = ""
    if found.st_uid != os.geteuid():
        problem = (
            f"expected {path} to belong to user {os.geteuid()}, got owner {found.st_uid}; "
            "another user made it, so it is left alone: ask its owner or an administrator to "
            "remove it"
        )
    elif mode & 0o077:
        problem = (
            f"expected {path} to be private, got mode {mode:04o}; "
            "chmod 0700 it or remove it while no job runs"
        )
    if problem:
        os.close(fd)
        raise SegmentError(problem)
    return fd

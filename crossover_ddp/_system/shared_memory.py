"""Finds and opens this user's private directory in shared memory.

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
    """Return the path of the directory that holds all of this user's segments.

    Args:
        base: the shared-memory mount point.
    """
    return os.path.join(base, f"crossover_ddp-{outer_user(os.geteuid(), _uid_map())}")


def outer_user(user: int, uid_map: str) -> int:
    """Return a user's id outside the container, which is unique on the machine.

    Inside a rootless container, every user has id 0.

    Args:
        user: the id inside the container. If it is not mapped, it is returned unchanged.
        uid_map: the text of ``/proc/self/uid_map``. Each line has three numbers: the first id
            inside, the first id outside, and the number of ids.
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
        base: the shared-memory mount point.
        make: create the directory if it is missing; default False.

    Raises ``FileNotFoundError`` if the directory is missing, and ``SegmentError`` if it is not
    private, cannot be created or opened, or if the system is not Linux with ``base``.
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

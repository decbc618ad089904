"""The layout of a segment: its fields, each declared once, its names, and the kernel's locks on slots.

`segment` joins and leaves with these; `view` only looks. Nothing here makes a file. Our design.
"""

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import os
import re
import struct

from crossover_ddp.errors import SegmentError

SLOT_COUNT = 256
EVENT_COUNT = 1
EVENT_HANDLE_BYTES = 64
MAGIC = b"XDDPTURN"
LAYOUT = 8
FREE, JOINED = 0, 1
GROUP_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


class SegmentHeader(ctypes.Structure):
    """The first fields of every file of slots."""

    _fields_ = [
        ("magic", ctypes.c_char * 8),
        ("layout", ctypes.c_uint64),
        ("slot_count", ctypes.c_uint64),
        ("unused", ctypes.c_uint64),
    ]


class Slot(ctypes.Structure):
    """One local process of one job, as its siblings see it."""

    _fields_ = [
        ("state", ctypes.c_uint64),
        ("incarnation", ctypes.c_uint64),
        ("job", ctypes.c_uint64),
        ("device", ctypes.c_uint64),  # digest of the device's name
        ("lead", ctypes.c_uint64),  # the job's lead machine: the one whose log has its turns
        ("joined_at", ctypes.c_uint64),  # length of the log when the job joined
        ("started", ctypes.c_uint64),  # last turn started
        ("returned", ctypes.c_uint64),  # last turn given back
        ("returned_at_ns", ctypes.c_uint64),  # CLOCK_MONOTONIC of this machine
        ("lease_s", ctypes.c_double),
        ("lease_mirror_s", ctypes.c_double),  # -lease_s, or somebody has overwritten the lease
        ("rank", ctypes.c_uint32),
        ("world_size", ctypes.c_uint32),
        ("pid", ctypes.c_uint32),  # for people to read; no decision rests on it
        ("event_count", ctypes.c_uint32),
        ("events", ctypes.c_ubyte * (EVENT_COUNT * EVENT_HANDLE_BYTES)),
        ("device_name", ctypes.c_char * 64),  # for people to read, perhaps cut
    ]

    def lease(self) -> float | None:
        """Return the lease that the slot's owner has published; None if somebody else has overwritten it."""
        return self.lease_s if self.lease_s > 0 and self.lease_mirror_s == -self.lease_s else None


HEADER_BYTES = ctypes.sizeof(SegmentHeader)
SLOT_BYTES = ctypes.sizeof(Slot)
FILE_BYTES = HEADER_BYTES + SLOT_COUNT * SLOT_BYTES
_LOCK_BASE = 1 << 32  # locked bytes lie beyond the end of the file: nobody locks contents


def digest(text: str) -> int:
    """Return a positive 63-bit hash of ``text``."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def stem_of(group: str) -> str:
    """Return what the names of a group's files begin with; no group's name holds the sign."""
    return f"{group}@"


def read_header(fd: int, path: str) -> SegmentHeader:
    """Return the header of a segment of this layout; anything else raises `SegmentError`."""
    size = os.fstat(fd).st_size
    raw = os.pread(fd, HEADER_BYTES, 0)
    if size != FILE_BYTES or len(raw) != HEADER_BYTES:
        raise SegmentError(
            f"expected a segment of {FILE_BYTES} bytes, got {size} at {path}; remove it while "
            "no job runs (another version of crossover_ddp may have made it)"
        )
    header = SegmentHeader.from_buffer_copy(raw)
    if (header.magic, header.layout, header.slot_count) != (MAGIC, LAYOUT, SLOT_COUNT):
        raise SegmentError(
            f"expected layout {LAYOUT} of turns, got something else at {path}; remove it while no job runs"
        )
    return header


# --- locks of slots, which belong to the open file and end with it ------------------------------------------------


def _lock_request(kind: int, start: int, length: int) -> bytes:
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, _LOCK_BASE + start, length, 0)


def lock_slots(fd: int, start: int, length: int, kind: int = fcntl.F_WRLCK) -> bool:
    """Try to lock slots, or unlock them; return whether that was done."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _lock_request(kind, start, length))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def slots_are_locked(fd: int, start: int, length: int) -> bool:
    """Return whether another open file holds a lock on any of the slots. Takes no lock; ``fd`` may be read-only."""
    found = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _lock_request(fcntl.F_WRLCK, start, length))
    return bool(struct.unpack_from("h", found)[0] != fcntl.F_UNLCK)


def is_named(fd: int, stem: str, directory_fd: int) -> bool:
    """Return whether the open segment is still the one that joining processes find."""
    try:
        named = os.stat(f"{stem}.turns", dir_fd=directory_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return named.st_ino == os.fstat(fd).st_ino


def remove_unused(fd: int, stem: str, directory_fd: int, directory: str) -> bool:
    """Remove a segment's files if no living process has a slot; return whether that was done.

    This takes the locks of all slots, until ``fd`` is closed; until then no process can join.
    """
    if not (lock_slots(fd, 0, SLOT_COUNT) and is_named(fd, stem, directory_fd)):
        return False
    ours = re.compile(rf"{re.escape(stem)}\.(log|[0-9]+\.bell|[0-9a-f]+\.new)")
    names = [name for name in os.listdir(directory_fd) if ours.fullmatch(name)]
    # The slots last: while that file is there, all its slots locked, no process can join and make the others anew.
    for name in (*names, f"{stem}.turns"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=directory_fd)
    with contextlib.suppress(OSError):  # other groups or devices live in it
        os.rmdir(directory)
    return True

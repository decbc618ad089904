"""The file of slots: its fields, each declared once, and the kernel's locks on slots. Our design.

`segment` joins and leaves with these; `view` only looks.

[Note: plain reads and writes]
Slots are read with ``pread`` and written with ``pwrite``, not mapped: somebody who truncates the file under way costs
an error that is caught (the job goes on without turns), where a mapping would cost a SIGBUS. Aligned eight-byte fields
are copied by the kernel in one piece on the machines that run torch.
"""

import ctypes
import errno
import hashlib
import os
import re
import struct

from crossover_ddp._system.shared_memory import fcntl
from crossover_ddp.errors import SegmentError

SLOT_COUNT = 253  # larger numbers in the log are words, see `trial`
EVENT_HANDLE_BYTES = 64
FREE, JOINED = 0, int.from_bytes(b"XDDPTU10", "little")
"""States of a slot; JOINED is another number in another layout."""
GROUP_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
SLOTS_SUFFIX = ".turns"


class Slot(ctypes.Structure):
    """One local process of one job, as its siblings see it. Its owner alone writes there."""

    _fields_ = [
        ("state", ctypes.c_uint64),
        ("incarnation", ctypes.c_uint64),
        ("job", ctypes.c_uint64),
        ("device", ctypes.c_uint64),  # digest of the device's name
        ("lead", ctypes.c_uint64),  # the job's lead machine: the one whose log has its turns
        ("joined_at", ctypes.c_uint64),  # length of the log when the job joined
        ("queued", ctypes.c_uint64),  # last turn waited for, for people to see
        ("started", ctypes.c_uint64),  # last turn started
        ("returned", ctypes.c_uint64),  # last turn given back
        ("returned_at_ns", ctypes.c_uint64),  # CLOCK_MONOTONIC of this machine
        ("turns", ctypes.c_uint64),  # how many were given back, for people to see
        ("lease_s", ctypes.c_double),
        ("mode", ctypes.c_uint64),  # of the job's lead rank, see `trial`; for people to see
        ("trial", ctypes.c_uint64),  # whether the job takes part in trials; what follows is its vote
        ("tried", ctypes.c_uint64),
        ("pairs", ctypes.c_uint64),  # 0 while the vote is being written
        ("turns_s", ctypes.c_double),
        ("side_s", ctypes.c_double),
        ("rank", ctypes.c_uint32),
        ("world_size", ctypes.c_uint32),
        ("pid", ctypes.c_uint32),  # for people to see; no decision rests on it
        ("event_count", ctypes.c_uint32),
        ("event", ctypes.c_ubyte * EVENT_HANDLE_BYTES),
        ("device_name", ctypes.c_char * 64),  # for people to see, perhaps cut
    ]


SLOT_BYTES = ctypes.sizeof(Slot)
FILE_BYTES = SLOT_COUNT * SLOT_BYTES
_LOCK_BASE = 1 << 32  # locked bytes lie beyond the end of the file: nobody locks contents


def digest(text: str) -> int:
    """Return a positive 63-bit hash of ``text``."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def read_slots(fd: int, path: str) -> dict[int, Slot]:
    """Return the slots that say they are in use, whether or not their owners live."""
    raw = os.pread(fd, FILE_BYTES + 1, 0)
    if len(raw) != FILE_BYTES:
        raise SegmentError(
            f"expected slots of {FILE_BYTES} bytes, got another size at {path}: it was cut short, or is of another "
            "version of crossover_ddp; remove it while no job runs"
        )
    states = memoryview(raw).cast("Q")[:: SLOT_BYTES // 8].tolist()  # `state` is a slot's first field
    used = [index for index, state in enumerate(states) if state]
    if any(states[index] != JOINED for index in used):
        words = "it is of another version of crossover_ddp, or no file of turns; remove it while no job runs"
        raise SegmentError(f"expected slots of this version, got others at {path}: {words}")
    return {index: Slot.from_buffer_copy(raw, index * SLOT_BYTES) for index in used}


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

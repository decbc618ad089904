"""Shows the turns of this user's jobs from outside, without joining, writing, locking or ringing.

F_OFD_GETLK reports whether a slot's byte is locked, that is, whether its owner is alive. It takes
no lock itself, so it never makes a slot look taken to a joining process. Apart from that, this
module only opens, lists and reads files. No content is trusted, and no file makes `look` raise or
wait. Our design.
"""

import contextlib
import os
import re
import time
from typing import NamedTuple

from crossover_ddp._system.shared_memory import SHARED_MEMORY, open_directory, segment_directory
from crossover_ddp.errors import SegmentError

from .rules import Member as Member
from .rules import Mode as Mode
from .segment import GROUP_NAME as GROUP_NAME
from .segment import SLOT_COUNT, read_slots, slots_are_locked

_NAME = re.compile(rf"({GROUP_NAME.pattern})@\.(turns|log|[0-9]+\.bell)")


class JoinedProcess(NamedTuple):
    """A process that has joined a group, with the unchecked contents of its slot."""

    group: str
    device: str
    slot: Member
    # Whether the process is alive. If not, it ended without leaving.
    alive: bool


class Look(NamedTuple):
    """A snapshot of the turns of all jobs."""

    # When it was taken, by CLOCK_MONOTONIC, like the times in the slots.
    at_ns: int
    directory: str
    processes: tuple[JoinedProcess, ...]
    # Slot files that no living process uses. A process may use one without having joined.
    abandoned: tuple[str, ...]
    # Pairs (path, problem) for files that are not valid.
    problems: tuple[tuple[str, str], ...]


def printable(text: str) -> str:
    """Return ``text`` with unprintable characters replaced.

    The names of files and devices may contain any bytes.
    """
    return "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text
    )


def look(base: str = SHARED_MEMORY) -> Look:
    """Return the current state of this user's jobs, as they publish it in shared memory.

    Args:
        base: the shared-memory mount point; default ``/dev/shm``.
    """
    directory = segment_directory(base)
    processes = list[JoinedProcess]()
    abandoned = list[str]()
    problems = list[tuple[str, str]]()
    for name in _list_files(base, problems):
        path = os.path.join(directory, name)
        try:
            known = _NAME.fullmatch(name)
            if known is None:
                raise SegmentError("not a file of turns; remove it if you do not need it")
            if known[2] == "turns":
                with contextlib.suppress(FileNotFoundError):  # its last process has just left
                    found, is_used = _read(known[1], path)
                    processes += found
                    if not is_used:
                        abandoned.append(printable(path))
        except (SegmentError, OSError) as error:
            problems.append((printable(path), printable(str(error))))
    return Look(time.monotonic_ns(), directory, tuple(processes), tuple(abandoned), tuple(problems))


def _list_files(base: str, problems: list[tuple[str, str]]) -> list[str]:
    try:
        fd = open_directory(base)
        try:
            return sorted(os.listdir(fd))
        finally:
            os.close(fd)
    except FileNotFoundError:  # no job has joined yet
        pass
    except (SegmentError, OSError) as error:
        problems.append((printable(segment_directory(base)), printable(str(error))))
    return []


def _read(group: str, path: str) -> tuple[list[JoinedProcess], bool]:
    """Return the processes in a slot file, and whether any living process uses the file."""
    # Open without blocking: if the file is a FIFO, opening it would wait for a writer.
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not os.pread(fd, 1, 0):  # the file's first process is just joining
            return [], True
        found = [(slot, slots_are_locked(fd, slot.slot, 1)) for slot in read_slots(fd, path)]
        # If a process has left after its slot was read, its lock is gone, but it has not died.
        still_joined = {slot.slot for slot in read_slots(fd, path)}
        processes = []
        for slot, is_alive in found:
            if is_alive or slot.slot in still_joined:
                device = printable(slot.device_name.rstrip(b"\0").decode(errors="replace"))
                processes.append(JoinedProcess(group, device, slot, is_alive))
        return processes, slots_are_locked(fd, 0, SLOT_COUNT)
    finally:
        os.close(fd)

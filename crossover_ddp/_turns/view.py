"""Shows the turns of this user's jobs from outside: it joins, writes, locks and rings nothing.

F_OFD_GETLK asks whether a slot's byte is locked, that is, whether its owner is alive. It takes no
lock, so a joining process never finds a slot taken because of it. Everything else is ``stat`` and
``pread``. No content is trusted, and no file makes `look` raise or wait. Our design.
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
    """A process that has joined a group, with the numbers of its slot, unchecked."""

    group: str
    device: str
    slot: Member
    # Whether the process is alive; otherwise it ended without leaving.
    alive: bool


class Look(NamedTuple):
    """The turns of all jobs at one moment."""

    # CLOCK_MONOTONIC, as in the slots.
    at_ns: int
    directory: str
    processes: tuple[JoinedProcess, ...]
    # Files of slots that no living process uses, whether or not it has joined.
    abandoned: tuple[str, ...]
    # (path, problem) of files that are not valid.
    problems: tuple[tuple[str, str], ...]


def printable(text: str) -> str:
    """Return ``text`` with unprintable characters replaced.

    Names of files and devices may contain any bytes.
    """
    return "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text
    )


def look(base: str = SHARED_MEMORY) -> Look:
    """Return the present state of this user's jobs, as they publish it in shared memory.

    Args:
        base: where shared memory is mounted; default ``/dev/shm``.
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
    """Return the processes in a file of slots, and whether any living process uses the file."""
    # Non-blocking, since opening a FIFO of this name would wait for its writer.
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not os.pread(fd, 1, 0):  # its first process is just joining
            return [], True
        found = [(slot, slots_are_locked(fd, slot.slot, 1)) for slot in read_slots(fd, path)]
        # A process that has left between reading its slot and looking at its lock is not dead.
        still_joined = {slot.slot for slot in read_slots(fd, path)}
        processes = []
        for slot, is_alive in found:
            if is_alive or slot.slot in still_joined:
                device = printable(slot.device_name.rstrip(b"\0").decode(errors="replace"))
                processes.append(JoinedProcess(group, device, slot, is_alive))
        return processes, slots_are_locked(fd, 0, SLOT_COUNT)
    finally:
        os.close(fd)

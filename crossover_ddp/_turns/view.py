"""Look at the turns of this user's jobs from outside: join nothing, write nothing, lock nothing, ring nobody.

F_OFD_GETLK asks whether a slot's byte is locked, which is whether its owner lives; it takes no lock, so a joining
process never believes that a slot is taken. All else is ``stat`` and ``pread``. No content is trusted, and no file
makes `look` raise or wait. Our design.
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


class Place(NamedTuple):
    """One slot in use, with the numbers that the file holds, unchecked."""

    group: str
    device: str
    slot: Member
    alive: bool
    """Whether its owner lives; otherwise that has ended without leaving."""


class Look(NamedTuple):
    """All that was found at one moment; a problem is a file that is no valid one, and what is wrong with it."""

    at_ns: int
    """CLOCK_MONOTONIC, as in the slots."""
    directory: str
    places: tuple[Place, ...]
    abandoned: tuple[str, ...]
    """Files in which no living process has a slot, joined or not."""
    problems: tuple[tuple[str, str], ...]


def printable(text: str) -> str:
    """Return ``text`` with unprintable characters replaced: file names and devices may hold any bytes."""
    return "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text
    )


def look(base: str = SHARED_MEMORY) -> Look:
    """Return what this user's jobs have published at this moment in shared memory, which is mounted at ``base``."""
    directory = segment_directory(base)
    places, abandoned, problems = list[Place](), list[str](), list[tuple[str, object]]()
    names: list[str] = []
    try:
        fd = open_directory(base)
        try:
            names = sorted(os.listdir(fd))
        finally:
            os.close(fd)
    except FileNotFoundError:  # nobody has joined
        pass
    except (SegmentError, OSError) as error:
        problems.append((directory, error))
    for name in names:
        path = os.path.join(directory, name)
        try:
            if (known := _NAME.fullmatch(name)) is None:
                raise SegmentError("not a file of turns; remove it if it is nobody's")
            if known[2] == "turns":
                with contextlib.suppress(FileNotFoundError):  # its last process has just left
                    found, is_held = _read(known[1], path)
                    places += found
                    abandoned += [] if is_held else [path]
        except (SegmentError, OSError) as error:
            problems.append((path, error))
    said = tuple((printable(path), printable(str(what))) for path, what in problems)
    return Look(
        time.monotonic_ns(), directory, tuple(places), tuple(map(printable, abandoned)), said
    )


def _read(group: str, path: str) -> tuple[list[Place], bool]:
    """Return the slots in a file, and whether any living process has one."""
    # A FIFO that somebody has put there must not stop us.
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not os.pread(fd, 1, 0):  # it is being made
            return [], True
        found = [(slot, slots_are_locked(fd, slot.slot, 1)) for slot in read_slots(fd, path)]
        again = {
            slot.slot for slot in read_slots(fd, path)
        }  # who has left meanwhile is no dead one
        places = [
            Place(
                group,
                printable(slot.device_name.rstrip(b"\0").decode(errors="replace")),
                slot,
                is_alive,
            )
            for slot, is_alive in found
            if is_alive or slot.slot in again
        ]
        return places, slots_are_locked(fd, 0, SLOT_COUNT)
    finally:
        os.close(fd)

"""Look at the turns of this user's jobs from outside: join nothing, write nothing, lock nothing, ring nobody.

F_OFD_GETLK asks whether a slot's byte is locked, which is whether its owner lives; it takes no lock, so a joining
process never believes that a slot is taken. All else is ``stat`` and ``pread``. No content is trusted, and no file
makes `look` raise or wait. Our design.
"""

import contextlib
import os
import re
import time
from collections.abc import Iterator
from typing import NamedTuple

from crossover_ddp._system.shared_memory import SHARED_MEMORY, open_directory, segment_directory
from crossover_ddp.errors import SegmentError

from .rules import Mode as Mode
from .segment import GROUP_NAME, SLOT_COUNT, read_slots, slots_are_locked
from .segment import Slot as Slot

_NAME = re.compile(rf"({GROUP_NAME.pattern})@\.(turns|log|[0-9]+\.bell)")
_PROBLEMS_KEPT = 100


class Place(NamedTuple):
    """One slot in use, with the numbers that the file holds, unchecked."""

    device: str
    slot: Slot
    alive: bool
    """Whether its owner lives; otherwise that has ended without leaving."""


class Segment(NamedTuple):
    """One group."""

    group: str
    path: str
    places: tuple[Place, ...]
    held: bool
    """Whether any living process has a slot, joined or not."""


class SegmentProblem(NamedTuple):
    """A file in the directory of segments that is not a valid one, and what is wrong with it."""

    path: str
    what: str


class Look(NamedTuple):
    """All that was found at one moment."""

    at_ns: int
    """CLOCK_MONOTONIC, as in the slots."""
    directory: str
    segments: tuple[Segment, ...]
    problems: tuple[SegmentProblem, ...]


def printable(text: str) -> str:
    """Return ``text`` with unprintable characters replaced: file names and devices may hold any bytes."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


def look(base: str = SHARED_MEMORY) -> Look:
    """Return what this user's jobs have published at this moment.

    Args:
        base: where shared memory is mounted.

    On failure: never raises because of a file; see `Look.problems`. Not collective.
    """
    directory = segment_directory(base)
    segments, problems = list[Segment](), list[SegmentProblem]()

    def note(path: str, what: object) -> None:
        problems.append(SegmentProblem(printable(path), printable(str(what))))

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
        note(directory, error)
    for name in names:
        path = os.path.join(directory, name)
        try:
            segments.extend(_segments(_NAME.fullmatch(name), path))
        except (SegmentError, OSError) as error:
            note(path, error)
    if (more := len(problems) - _PROBLEMS_KEPT) > 0:
        del problems[_PROBLEMS_KEPT:]
        note(directory, f"{more} more files that are no segments")
    return Look(time.monotonic_ns(), printable(directory), tuple(segments), tuple(problems))


def _segments(name: "re.Match[str] | None", path: str) -> Iterator[Segment]:
    """Yield the segment at a path if it is one of slots; nothing if its last process has just left."""
    if name is None:
        raise SegmentError("not a file of turns; remove it if it is nobody's")
    group, kind = name.groups()
    if kind != "turns":
        return
    with contextlib.suppress(FileNotFoundError):
        # A FIFO that somebody has put there must not stop us.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if os.pread(fd, 1, 0):  # or it is being made
                yield Segment(
                    group, printable(path), (*_places(fd, path),), slots_are_locked(fd, 0, SLOT_COUNT)
                )
        finally:
            os.close(fd)


def _places(fd: int, path: str) -> Iterator[Place]:
    slots = read_slots(fd, path)
    alive = {index for index in slots if slots_are_locked(fd, index, 1)}
    again = read_slots(fd, path)  # who has left meanwhile is no dead one
    for index, slot in slots.items():
        if index in alive or index in again:
            name = printable(bytes(slot.device_name).decode(errors="replace"))
            yield Place(name, slot, index in alive)

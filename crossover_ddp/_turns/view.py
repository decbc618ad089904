"""Look at the turns of this user's jobs from outside: join nothing, write nothing, lock nothing, ring nobody.

[Note: looking]
A sibling is alive here if it is alive for the jobs: its slot says that it has joined, and its bell has a reader. The
bell is opened for writing and closed again, which no reader notices: an owner has its own bell open for writing as
well, so the count of writers never reaches zero and nobody wakes up. F_OFD_GETLK asks whether a slot's byte is locked;
it takes no lock, so a joining process never believes that a slot is taken. All else is ``stat`` and ``pread``.

A file that is not a valid segment becomes a `SegmentProblem`. No content is trusted, no file is read without a limit,
and no file makes `look` raise or wait. Our design.
"""

import contextlib
import enum
import math
import os
import re
import stat
import time
from collections.abc import Iterator
from typing import NamedTuple

from crossover_ddp._system.shared_memory import (
    SHARED_MEMORY,
    check_owned,
    open_directory,
    segment_directory,
)
from crossover_ddp.errors import SegmentError

from .slots import (
    FILE_BYTES,
    GROUP_NAME,
    HEADER_BYTES,
    JOINED,
    SLOT_BYTES,
    SLOT_COUNT,
    Slot,
    read_header,
    remove_unused,
    slots_are_locked,
)

LOG_WINDOW_BYTES = 1 << 16  # how much of a log's end is read: an hour of very short turns
_NAMES = re.compile(
    rf"(?P<stem>(?P<group>{GROUP_NAME.pattern})@)"
    r"\.(?P<kind>turns|log|[0-9]+\.bell|[0-9a-f]+\.new)"
)
_PROBLEMS_KEPT = 100


class Liveness(enum.Enum):
    """Whether the owner of a slot that says it is in use lives, as siblings see it."""

    ALIVE = "alive"
    GONE = "gone"
    """Its process has ended without leaving."""
    DEAF = "deaf"
    """Its process lives, but its bell was removed: siblings pass it over."""


class Place(NamedTuple):
    """One slot in use, with the numbers that the file holds, unchecked."""

    slot: int
    job: int
    incarnation: int
    joined_at: int
    started: int
    returned: int
    returned_at_ns: int
    lease_s: float | None
    rank: int
    world_size: int
    pid: int
    liveness: Liveness


class LogEnd(NamedTuple):
    """The end of a lead machine's log."""

    numel: int
    records: bytes
    """The last of the ``numel`` records, at most `LOG_WINDOW_BYTES`."""

    def last_turn(self, slot: int) -> int:
        """Return the number of the last turn that ``slot`` drew; 0 where it is not in the window."""
        place = self.records.rfind(bytes([slot]))
        return self.numel - len(self.records) + place + 1 if place >= 0 else 0

    def drawn_since(self, numel: int) -> bytes | None:
        """Return the records after the first ``numel``; None if the window does not hold all of them."""
        first = numel - (self.numel - len(self.records))
        return self.records[first:] if 0 <= first <= len(self.records) else None


class Segment(NamedTuple):
    """One group on one device."""

    group: str
    device: str
    """Empty where no slot of the group is in use."""
    path: str
    places: tuple[Place, ...]
    log: LogEnd | None
    """Of all devices; None if no turn has been drawn on this machine, or if `look` was called without the log."""
    held: bool
    """Whether any living process has a slot."""


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


def look(base: str = SHARED_MEMORY, *, group: str | None = None, with_log: bool = True) -> Look:
    """Return what this user's jobs have published at this moment.

    Args:
        base: where shared memory is mounted.
        group: only this group; default all.
        with_log: read the ends of the logs too; the holder of a turn is known without them.

    On failure: never raises because of a file; see `Look.problems`. Not collective.
    """
    reader = _Reader(base, group, with_log)
    segments = tuple([*reader.segments()])
    at_ns = time.monotonic_ns()  # after reading: nothing that was read is of a later moment
    directory = printable(segment_directory(base))
    problems = reader.problems
    if len(problems) > _PROBLEMS_KEPT:
        more = SegmentProblem(directory, f"{len(problems) - _PROBLEMS_KEPT} more files that are no segments")
        problems = [*problems[:_PROBLEMS_KEPT], more]
    return Look(at_ns, directory, segments, tuple(problems))


class _Reader:
    """One look at one directory."""

    def __init__(self, base: str, group: str | None, with_log: bool) -> None:
        self.problems: list[SegmentProblem] = []
        self._base = base
        self._group = group
        self._with_log = with_log
        self._directory = segment_directory(base)
        self._directory_fd = -1

    def segments(self) -> Iterator[Segment]:
        try:
            self._directory_fd = open_directory(self._base)
        except FileNotFoundError:
            return  # nobody has joined
        except (SegmentError, OSError) as error:
            self._note(self._directory, error)
            return
        try:
            for found in self._matches():
                yield from self._segments(found)
        finally:
            os.close(self._directory_fd)

    def _note(self, path: str, what: object) -> None:
        self.problems.append(SegmentProblem(printable(path), printable(str(what))))

    def _path(self, name: str) -> str:
        return os.path.join(self._directory, name)

    def _matches(self) -> list["re.Match[str]"]:
        """Return the names of slot files; note every file that belongs to none."""
        try:
            names = sorted(os.listdir(self._directory_fd))
        except OSError as error:
            self._note(self._directory, error.strerror)
            return []
        matches = [(name, _NAMES.fullmatch(name)) for name in names]
        stems = {found["stem"] for _, found in matches if found and found["kind"] == "turns"}
        for name, found in matches:
            if found is None:
                if self._group is None:
                    self._note(self._path(name), "not a file of turns; remove it if it is nobody's")
            elif found["stem"] not in stems and self._wanted(found) and self._exists(name):
                self._note(
                    self._path(name), "left over without its slots; the next job of the group removes it"
                )
        return [found for _, found in matches if found and found["kind"] == "turns" and self._wanted(found)]

    def _wanted(self, found: "re.Match[str]") -> bool:
        return self._group is None or found["group"] == self._group

    def _exists(self, name: str) -> bool:
        try:
            os.stat(name, dir_fd=self._directory_fd, follow_symlinks=False)
        except OSError:
            return False
        return True

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        """Open a regular file of this user for reading."""
        # O_NONBLOCK: a FIFO that somebody has put there must not stop us.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        if not stat.S_ISREG(os.stat(name, dir_fd=self._directory_fd, follow_symlinks=False).st_mode):
            raise SegmentError("expected a file, got another kind; remove it while no job runs")
        fd = os.open(name, flags, dir_fd=self._directory_fd)
        try:
            check_owned(fd, self._path(name))
            yield fd
        finally:
            os.close(fd)

    def _segments(self, found: "re.Match[str]") -> list[Segment]:
        name = found[0]
        try:
            with self._opened(name) as fd:
                return self._read(fd, found)
        except FileNotFoundError:
            return []  # the last process has just left
        except (SegmentError, OSError) as error:
            self._note(self._path(name), error)
            return []

    def _read(self, fd: int, found: "re.Match[str]") -> list[Segment]:
        path = self._path(found[0])
        read_header(fd, path)
        by_device: dict[str, list[Place]] = {}
        for device, place in self._places(fd, found["stem"]):
            by_device.setdefault(device, []).append(place)
        log = self._log(found["stem"]) if self._with_log else None
        held = slots_are_locked(fd, 0, SLOT_COUNT)
        return [
            Segment(found["group"], device, printable(path), tuple(places), log, held)
            for device, places in sorted((by_device or {"": []}).items())
        ]

    def _places(self, fd: int, stem: str) -> Iterator[tuple[str, Place]]:
        raw = os.pread(fd, FILE_BYTES - HEADER_BYTES, HEADER_BYTES)
        if len(raw) != FILE_BYTES - HEADER_BYTES:
            raise SegmentError("cut short while it was read; remove it while no job runs")
        for index in range(SLOT_COUNT):
            slot = Slot.from_buffer_copy(raw, index * SLOT_BYTES)
            if slot.state == JOINED:
                liveness = self._liveness(fd, stem, index, slot.incarnation)
                if liveness is not None:
                    name = bytes(slot.device_name).decode(errors="replace")
                    yield printable(name), _place(index, slot, liveness)

    def _liveness(self, fd: int, stem: str, index: int, incarnation: int) -> Liveness | None:
        """Return whether the slot's owner lives; None if it has left meanwhile."""
        if self._has_reader(f"{stem}.{index}.bell"):
            return Liveness.ALIVE
        raw = os.pread(fd, SLOT_BYTES, HEADER_BYTES + index * SLOT_BYTES)
        now = Slot.from_buffer_copy(raw) if len(raw) == SLOT_BYTES else Slot()
        if (now.state, now.incarnation) != (JOINED, incarnation):
            return None
        return Liveness.DEAF if slots_are_locked(fd, index, 1) else Liveness.GONE

    def _has_reader(self, bell: str) -> bool:
        """See [Note: looking]."""
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            if not stat.S_ISFIFO(os.stat(bell, dir_fd=self._directory_fd, follow_symlinks=False).st_mode):
                return False
            os.close(os.open(bell, flags, dir_fd=self._directory_fd))
        except OSError:  # no bell, or nobody reads it
            return False
        return True

    def _log(self, stem: str) -> LogEnd | None:
        name = f"{stem}.log"
        try:
            with self._opened(name) as fd:
                numel = os.fstat(fd).st_size
                start = max(0, numel - LOG_WINDOW_BYTES)
                records = os.pread(fd, numel - start, start)
                return LogEnd(start + len(records), records)
        except FileNotFoundError:
            return None
        except (SegmentError, OSError) as error:
            self._note(self._path(name), error)
            return None


def _place(index: int, slot: Slot, liveness: Liveness) -> Place:
    lease_s = slot.lease()
    return Place(
        slot=index,
        job=slot.job,
        incarnation=slot.incarnation,
        joined_at=slot.joined_at,
        started=slot.started,
        returned=slot.returned,
        returned_at_ns=slot.returned_at_ns,
        lease_s=lease_s if lease_s is not None and math.isfinite(lease_s) else None,
        rank=slot.rank,
        world_size=slot.world_size,
        pid=slot.pid,
        liveness=liveness,
    )


def sweep(base: str = SHARED_MEMORY, *, group: str | None = None) -> list[str]:
    """Remove the segments (of one group, or of all) that no living process has joined; return the paths of their slots.

    Takes the locks that a leaving process takes, so a job that joins at this moment makes the files anew. A file that
    is not a segment of this layout and this user stays as it is.
    """
    directory = segment_directory(base)
    unused = [
        os.path.basename(segment.path)
        for segment in look(base, group=group, with_log=False).segments
        if not segment.held
    ]
    return [os.path.join(directory, name) for name in unused if _remove(base, directory, name)]


def _remove(base: str, directory: str, name: str) -> bool:
    try:
        directory_fd = open_directory(base)
    except (SegmentError, OSError):  # the last process to leave has removed it
        return False
    try:
        fd = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory_fd)
        try:
            check_owned(fd, name)
            read_header(fd, name)
            return remove_unused(fd, name.removesuffix(".turns"), directory_fd, directory)
        finally:
            os.close(fd)
    except (SegmentError, OSError):
        return False
    finally:
        os.close(directory_fd)

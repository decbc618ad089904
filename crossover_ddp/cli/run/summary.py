"""The speed-up of a run, from turns counted repeatedly; and how many jobs fit into memory. Pure.

[Note: speed-up of a run]
A job's time per turn *alone* is measured in those parts of the run in which no other job ran. The time in which several
jobs ran, and all of them took turns, is *shared*. One job after the other would have needed, for the turns of the
shared time, the sum of turns × time per turn alone. The speed-up is that sum divided by the shared time. It assumes
that each turn of a job is the same work. For a job that was never alone the median of the other jobs' times is taken,
and the summary says so. Start-up, and time in which a job ran without taking turns, count on neither side. Our design.
"""

import math
import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

WARM_UP_TURNS = 3  # buckets are rebuilt, caches fill
FEWEST_TURNS = 10
SHORTEST_S = 2.0
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)


@dataclass
class Window:
    """Time and turns, summed up over several intervals."""

    seconds: float = 0.0
    turns: Counter[str] = field(default_factory=Counter)

    def add(self, seconds: float, turns: Mapping[str, int]) -> None:
        """Add an interval."""
        self.seconds += seconds
        self.turns.update(turns)

    @property
    def enough(self) -> bool:
        """Whether it is long enough to work out a rate."""
        return self.seconds >= SHORTEST_S and self.turns.total() >= FEWEST_TURNS


@dataclass(frozen=True)
class Sharing:
    """The speed-up of a run, and what it was worked out from; see [Note: speed-up of a run]."""

    shared_s: float
    shared_turns: Mapping[str, int]
    alone_turn_s: Mapping[str, float]
    """Seconds per turn alone, measured."""
    assumed_turn_s: Mapping[str, float]
    """Seconds per turn of jobs that were never alone: the median of those that were."""
    after_s: float | None
    """What the shared turns would have taken one job after the other."""
    speedup: float | None
    why_not: str
    """Why there is no speed-up; empty if there is one."""

    def in_words(self) -> str:
        """Return a sentence for people."""
        if self.speedup is None or self.after_s is None:
            return f"speed-up not known: {self.why_not}"
        text = (
            f"while they took turns together ({self.shared_s:.1f} s) the jobs took {sum(self.shared_turns.values())} "
            f"turns; one job after the other these take about {self.after_s:.1f} s: speed-up {self.speedup:.2f}"
        )
        if self.assumed_turn_s:
            jobs = ", ".join(self.assumed_turn_s)
            text += f" (never alone, so taken to be as fast as the others: {jobs})"
        return text


class Tally:
    """Turns of the run's jobs, interval by interval."""

    def __init__(self) -> None:
        self.turns: Counter[str] = Counter()
        self.shared = Window()
        self.alone: dict[str, Window] = {}
        self._ever_joined: set[str] = set()

    def note(self, seconds: float, turns: Mapping[str, int], *, joined: Set[str], running: Set[str]) -> None:
        """Add what happened in an interval.

        Args:
            seconds: its length.
            turns: drawn in it, by job.
            joined: the jobs that take turns, other runs' jobs included, at both ends of the interval.
            running: the run's jobs whose processes lived at any moment of it.
        """
        settled = joined == running and all(self.turns[job] >= WARM_UP_TURNS for job in joined)
        self._ever_joined |= joined
        self.turns.update(turns)
        if not settled:
            return
        if len(joined) > 1:
            self.shared.add(seconds, turns)
        for job in joined if len(joined) == 1 else ():
            self.alone.setdefault(job, Window()).add(seconds, turns)

    def sharing(self) -> Sharing:
        """Return the speed-up, or why there is none."""
        measured = {
            job: window.seconds / window.turns[job] for job, window in self.alone.items() if window.enough
        }
        shared = {job: count for job, count in self.shared.turns.items() if count}
        why_not = self._why_not(measured)
        usual_s = statistics.median(measured.values()) if measured else math.nan
        assumed = {} if why_not else {job: usual_s for job in sorted(shared.keys() - measured.keys())}
        after_s = (
            None
            if why_not
            else sum(count * (measured.get(job) or assumed[job]) for job, count in shared.items())
        )
        return Sharing(
            shared_s=self.shared.seconds,
            shared_turns=shared,
            alone_turn_s=measured,
            assumed_turn_s=assumed,
            after_s=after_s,
            speedup=after_s / self.shared.seconds if after_s is not None else None,
            why_not=why_not,
        )

    def _why_not(self, measured: Mapping[str, float]) -> str:
        if not self.turns.total():
            if self._ever_joined:
                return "turns are counted on the machine of the jobs' lead device, and that is another one"
            return "no turns were seen; do the scripts register crossover_hook?"
        if not self.shared.enough:
            return "the jobs took turns together for too short a time"
        if not measured:
            return "no job was alone long enough to compare with; --try-first 30 lets the first one be"
        return ""


class FreeMemory(NamedTuple):
    """Free memory that jobs share: of one GPU, or of the machine."""

    name: str
    free_bytes: int
    jobs: int
    """How many of the jobs that run at once use it."""


def parse_size(text: str) -> int:
    """Return bytes of ``12G``, ``800M`` or ``1.5GiB``, in powers of 1024; else raise `ValueError`."""
    found = _SIZE.fullmatch(text.strip())
    size = int(float(found[1]) * 2 ** _UNITS[found[2].upper()]) if found else 0
    if size <= 0:
        raise ValueError(f"expected a size as 12G or 800M, got {text!r}")
    return size


def format_size(size_bytes: float) -> str:
    """Return a size for people."""
    unit = next((unit for unit in "TGM" if size_bytes >= 2 ** _UNITS[unit]), "K")
    return f"{size_bytes / 2 ** _UNITS[unit]:.4g} {unit}iB"


def too_small(memories: Sequence[FreeMemory], per_job_bytes: int) -> list[str]:
    """Return for each memory that is too small for its jobs how much they need and how much is free."""
    return [
        f"{memory.name}: {memory.jobs} at once × {format_size(per_job_bytes)} is more than the "
        f"{format_size(memory.free_bytes)} that are free"
        for memory in memories
        if memory.jobs * per_job_bytes > memory.free_bytes
    ]


def fitting(memories: Sequence[FreeMemory], needs_bytes: Mapping[str, int]) -> int | None:
    """Return how many jobs like the one measured fit at once; None where nothing was measured.

    Args:
        memories: what was free before it.
        needs_bytes: what it needed at most, by the memory's name.
    """
    counts = [
        memory.free_bytes // need for memory in memories if (need := needs_bytes.get(memory.name, 0)) > 0
    ]
    return min(counts) if counts else None

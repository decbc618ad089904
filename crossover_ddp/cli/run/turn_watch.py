"""Count the turns of a run's jobs from outside, as ``crossover-ddp status`` does."""

from collections import Counter
from collections.abc import Mapping, Set

from crossover_ddp._system.marked_processes import value_of
from crossover_ddp._system.shared_memory import SHARED_MEMORY
from crossover_ddp._turns.view import Liveness, Look, look
from crossover_ddp.cli.turn_report import draws

from .summary import Tally


class TurnWatch:
    """Look at a group repeatedly, and count its turns.

    Args:
        group: the jobs' group; others may be in it.
        variable: marks the run's processes.
        names: the jobs' names by the variable's value; may grow.
        base: where shared memory is mounted.
    """

    def __init__(
        self, group: str, variable: str, names: Mapping[str, str], *, base: str = SHARED_MEMORY
    ) -> None:
        self.tally = Tally()
        self._group = group
        self._variable = variable
        self._names = names
        self._base = base
        self._known: dict[int, str] = {}
        self._last = self._look()
        self._joined = self._joined_in(self._last)
        self._running: Set[str] = set()

    def look(self, running: Set[str]) -> None:
        """Count the turns since the last look.

        Args:
            running: the jobs whose processes live now.
        """
        now = self._look()
        joined = self._joined_in(now)
        counts = draws(self._last.segments, now.segments)
        turns: Counter[str] = Counter()
        for job, count in (counts or {}).items():
            turns[self._known[job]] += count
        steady = counts is not None and joined == self._joined and running == self._running
        self.tally.note(
            (now.at_ns - self._last.at_ns) / 1e9,
            turns,
            joined=joined if steady else set(),
            running=running | self._running,
        )
        self._last, self._joined, self._running = now, joined, set(running)

    def has_joined(self, name: str) -> bool:
        """Return whether a job took turns at the last look."""
        return name in self._joined

    def _look(self) -> Look:
        return look(self._base, group=self._group)

    def _joined_in(self, seen: Look) -> set[str]:
        """Return the jobs that take turns, by name; a job that is not of this run is called by its number."""
        joined = set()
        for place in (place for segment in seen.segments for place in segment.places):
            if self._known.get(place.job, "").startswith("/") or place.job not in self._known:
                mark = value_of(place.pid, self._variable)
                # A slash is in no job's name.
                self._known[place.job] = self._names.get(mark or "", f"/{place.job:x}")
            if place.liveness is not Liveness.GONE:
                joined.add(self._known[place.job])
        return joined

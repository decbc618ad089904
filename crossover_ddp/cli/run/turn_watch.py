"""Count the turns of a run's jobs from outside, as ``crossover-ddp status`` does."""

from collections import Counter
from collections.abc import Mapping

from crossover_ddp._system.children import mark_of
from crossover_ddp._system.shared_memory import SHARED_MEMORY
from crossover_ddp._turns.view import Liveness, Look, look
from crossover_ddp.cli.turn_report import draws


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
        self.turns: Counter[str] = Counter()
        self._group = group
        self._variable = variable
        self._names = names
        self._base = base
        self._known: dict[int, str] = {}
        self._last = self._look()

    def look(self) -> None:
        """Count the turns since the last look."""
        now = self._look()
        for job, count in (draws(self._last.segments, now.segments) or {}).items():
            if job in self._known:
                self.turns[self._known[job]] += count
        self._last = now

    def has_joined(self, name: str) -> bool:
        """Return whether a job took turns at the last look."""
        return any(
            self._known.get(place.job) == name and place.liveness is not Liveness.GONE
            for segment in self._last.segments
            for place in segment.places
        )

    def _look(self) -> Look:
        seen = look(self._base, group=self._group)
        for place in (place for segment in seen.segments for place in segment.places):
            if place.job not in self._known:
                name = self._names.get(mark_of(place.pid, self._variable) or "")
                if name is not None:
                    self._known[place.job] = name
        return seen

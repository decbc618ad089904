"""When each bucket of a step is ready, and when it is needed, as far as the host's clock can tell."""

import statistics
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from crossover_ddp._planning import BucketTimes, Workload

_STEPS_KEPT: Final = 16


@dataclass
class _Step:
    begin_s: float
    forward_end_s: float = 0.0
    lost_s: float = 0.0
    needed_s: dict[int, float] = field(default_factory=dict)
    update_s: dict[int, float] = field(default_factory=dict)
    ready_s: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    cpu_s: float = 0.0

    @property
    def is_whole(self) -> bool:
        """Whether every bucket was needed in this forward and ready in this backward."""
        return len(self.needed_s) == len(self.sizes) > 0


class StepTimes:
    """Record the last steps; not thread-safe, all calls come from the training thread."""

    def __init__(self) -> None:
        self._steps: deque[_Step] = deque(maxlen=_STEPS_KEPT)
        self._current: _Step | None = None

    def forward_begins(self) -> None:
        """Forward begins to compute."""
        self._current = _Step(time.monotonic(), cpu_s=-_other_threads_s())

    def updated(self, place: int, begin_s: float, waited_s: float) -> None:
        """Bucket ``place`` was asked for at ``begin_s``, had come at ``waited_s``, and has been updated now."""
        step = self._current
        if step is not None and not step.forward_end_s:
            now_s = time.monotonic()
            step.needed_s[place] = begin_s - step.begin_s - step.lost_s
            step.update_s[place] = now_s - waited_s
            step.lost_s += now_s - begin_s

    def forward_ends(self) -> None:
        """Forward has computed."""
        if self._current is not None:
            self._current.forward_end_s = time.monotonic()

    def ready(self, size_bytes: int) -> None:
        """The next bucket of backward is complete."""
        if self._current is not None:
            self._current.ready_s.append(time.monotonic() - self._current.forward_end_s)
            self._current.sizes.append(size_bytes)

    def backward_ends(self) -> None:
        """Backward has computed its last bucket."""
        if self._current is not None and self._current.is_whole:
            self._current.cpu_s += _other_threads_s()
            self._steps.append(self._current)
        self._current = None

    def forget(self) -> None:
        """Drop everything: the buckets have changed."""
        self._steps.clear()
        self._current = None

    def cpu_s(self) -> float:
        """Return the processor time of other threads per half of a bucket's exchange; 0 if nothing is recorded."""
        if not self._steps:
            return 0.0
        return statistics.median(step.cpu_s / (2 * len(step.sizes)) for step in self._steps)

    def workload(self) -> Workload | None:
        """Return the medians over the recorded steps, or None if there is no whole one."""
        if not self._steps:
            return None
        steps = list(self._steps)
        forward_s = statistics.median(step.forward_end_s - step.begin_s - step.lost_s for step in steps)
        buckets = tuple([*_medians(steps)])
        return Workload(forward_s, max(bucket.ready_s for bucket in buckets), buckets)


def _other_threads_s() -> float:
    return time.process_time() - time.thread_time()


def _medians(steps: list[_Step]) -> Iterator[BucketTimes]:
    for place, size_bytes in enumerate(steps[-1].sizes):
        yield BucketTimes(
            size_bytes,
            statistics.median(step.ready_s[place] for step in steps),
            statistics.median(step.needed_s[place] for step in steps),
            statistics.median(step.update_s[place] for step in steps),
        )

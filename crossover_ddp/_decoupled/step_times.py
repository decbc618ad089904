"""When parts of a step are ready, by the host's clock: a recorder for decoupled training."""

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Final

_STEPS_KEPT: Final = 16


@dataclass
class RecordedStep:
    """One recorded step; seconds since its forward began, of which ``lost_s`` were no compute."""

    begin_s: float
    forward_end_s: float = 0.0
    lost_s: float = 0.0
    reached_s: dict[int, float] = field(default_factory=dict)  # by bucket: when forward needs it
    update_s: dict[int, float] = field(default_factory=dict)
    ready_s: list[float] = field(default_factory=list)  # by bucket: when backward completed it
    buckets: list[int] = field(default_factory=list)  # their bytes
    cpu_s: float = 0.0
    """Processor time of other threads."""


class StepTimes:
    """Record the last steps; not thread-safe, all calls come from the training threads, one after the other.

    Attributes:
        steps: the recorded ones, which all had the same buckets.
    """

    def __init__(self) -> None:
        self.steps: deque[RecordedStep] = deque(maxlen=_STEPS_KEPT)
        self._current: RecordedStep | None = None

    def begin(self) -> None:
        """A forward of the model begins to compute; of several per step the last one counts."""
        self._current = RecordedStep(time.monotonic(), cpu_s=-_other_threads_s())

    def updated(self, number: int, begin_s: float, waited_s: float) -> None:
        """A bucket was asked for at ``begin_s``, had come at ``waited_s``, and has been updated now."""
        step = self._current
        if step is not None and not step.forward_end_s:
            now_s = time.monotonic()
            step.reached_s[number] = begin_s - step.begin_s - step.lost_s
            step.update_s[number] = now_s - waited_s
            step.lost_s += now_s - begin_s

    def forward_ends(self) -> None:
        """Forward has computed."""
        if self._current is not None:
            self._current.forward_end_s = time.monotonic() - self._current.begin_s

    def bucket_ready(self, size_bytes: int) -> None:
        """The next bucket of backward is complete."""
        step = self._current
        if step is not None:
            step.ready_s.append(time.monotonic() - step.begin_s)
            step.buckets.append(size_bytes)

    def end(self) -> None:
        """Backward has computed its last bucket; keep the step only if forward reached every bucket."""
        step, self._current = self._current, None
        if step is None or not len(step.reached_s) == len(step.buckets) > 0:
            return
        step.cpu_s += _other_threads_s()
        # Other buckets: what was recorded before says nothing of them.
        if self.steps and self.steps[-1].buckets != step.buckets:
            self.steps.clear()
        self.steps.append(step)

    def forget(self) -> None:
        """Drop everything: the buckets have changed."""
        self.steps.clear()
        self._current = None


def _other_threads_s() -> float:
    return time.process_time() - time.thread_time()

"""When the factors and buckets of a factor step are ready, as far as the host's clock can tell."""

import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from .placement import EarlyFactor, FactorBucket, FactorStep

_STEPS_KEPT: Final = 8


@dataclass
class _Step:
    begin_s: float
    inputs_s: dict[int, float] = field(default_factory=dict)
    calls: Counter[int] = field(default_factory=Counter)
    buckets_s: list[float] = field(default_factory=list)
    # By bucket: bytes that pass through or are gradients, and the layers that it completes.
    contents: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)

    @property
    def forward_s(self) -> float:
        return max(self.inputs_s.values(), default=0.0)


class FactorTimes:
    """Record the last factor steps; not thread-safe, all calls come from the training threads, one after the other."""

    def __init__(self) -> None:
        self._steps: deque[_Step] = deque(maxlen=_STEPS_KEPT)
        self._current: _Step | None = None

    def begin(self) -> None:
        """A forward of the model begins; of several per step the last one counts."""
        self._current = _Step(time.monotonic())

    def input_came(self, index: int) -> None:
        """A layer's input factor is computed."""
        step = self._current
        if step is not None:
            step.inputs_s[index] = time.monotonic() - step.begin_s
            step.calls[index] += 1

    def bucket_ready(self, size_bytes: int, layers: tuple[int, ...], *, last: bool) -> None:
        """The next bucket of backward is complete, with all of ``layers``."""
        step = self._current
        if step is None:
            return
        step.buckets_s.append(time.monotonic() - step.begin_s)
        step.contents.append((size_bytes, layers))
        if last:
            # Other buckets: what was recorded before says nothing of them.
            if self._steps and self._steps[-1].contents != step.contents:
                self._steps.clear()
            self._steps.append(step)
            self._current = None

    @property
    def count(self) -> int:
        """Number of recorded steps that had the present buckets."""
        return len(self._steps)

    def step(
        self,
        a_bytes: Sequence[int],
        g_bytes: Sequence[int],
        inverse_s: Callable[[Sequence[int]], float],
    ) -> tuple[list[int], FactorStep]:
        """Return which layers could send A early, in the order of forward, and the medians of the recorded steps.

        A layer that was called several times in a forward is not among them: nobody knows which call is the last.

        Args:
            a_bytes: of each layer's A-triangles.
            g_bytes: of its G-triangles.
            inverse_s: seconds of the busiest owner for the layers of one bucket.
        """
        last = self._steps[-1]
        order = sorted(last.inputs_s, key=lambda index: last.inputs_s[index])
        early = [index for index in order if all(step.calls[index] == 1 for step in self._steps)]
        forward_s = statistics.median(step.forward_s for step in self._steps)
        home = {index: number for number, (_, layers) in enumerate(last.contents) for index in layers}
        factors = tuple(
            [
                EarlyFactor(
                    statistics.median(step.inputs_s[index] for step in self._steps),
                    a_bytes[index],
                    home[index],
                )
                for index in early
            ]
        )
        buckets = []
        for number, (size_bytes, layers) in enumerate(last.contents):
            ready_s = statistics.median(step.buckets_s[number] - step.forward_s for step in self._steps)
            others = sum(a_bytes[index] for index in layers if index not in early)
            stay = sum(g_bytes[index] for index in layers) + others
            buckets.append(FactorBucket(ready_s, size_bytes, stay, inverse_s(layers)))
        backward_s = max(bucket.ready_s for bucket in buckets)
        return early, FactorStep(forward_s, backward_s, factors, tuple(buckets))

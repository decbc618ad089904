"""What recorded steps of K-FAC say to the cost model: when factors and buckets of a factor step are ready."""

import statistics
from collections.abc import Callable, Sequence

from crossover_ddp._exchange.step_times import RecordedStep, StepTimes

from .placement import EarlyFactor, FactorBucket, FactorStep


def factor_step_of(
    times: StepTimes,
    a_bytes: Sequence[int],
    g_bytes: Sequence[int],
    inverse_s: Callable[[Sequence[int]], float],
) -> tuple[list[int], FactorStep]:
    """Return which layers could send A early, in the order of forward, and the medians of the recorded steps.

    A layer that was called several times in a forward is not among them, since its last call cannot be recognised.

    Args:
        times: of at least one step.
        a_bytes: of each layer's A-triangles.
        g_bytes: of its G-triangles.
        inverse_s: seconds of the busiest owner for the layers of one bucket.
    """
    last = times.steps[-1]
    order = sorted(last.reached_s, key=lambda index: last.reached_s[index])
    early = [index for index in order if all(step.reached[index] == 1 for step in times.steps)]
    forward_s = statistics.median(_forward_s(step) for step in times.steps)
    home = {index: number for number, (_, layers) in enumerate(last.buckets) for index in layers}
    factors = tuple(
        [
            EarlyFactor(
                statistics.median(step.reached_s[index] for step in times.steps),
                a_bytes[index],
                home[index],
            )
            for index in early
        ]
    )
    buckets = []
    for number, (size_bytes, layers) in enumerate(last.buckets):
        ready_s = statistics.median(step.ready_s[number] - _forward_s(step) for step in times.steps)
        others = sum(a_bytes[index] for index in layers if index not in early)
        stay = sum(g_bytes[index] for index in layers) + others
        buckets.append(FactorBucket(ready_s, size_bytes, stay, inverse_s(layers)))
    backward_s = max(bucket.ready_s for bucket in buckets)
    return early, FactorStep(forward_s, backward_s, factors, tuple(buckets))


def _forward_s(step: RecordedStep) -> float:
    """Return when the last input came."""
    return max(step.reached_s.values(), default=0.0)

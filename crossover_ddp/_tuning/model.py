"""What a step of plain DDP will take, which codec suits it, and how often to average parameters instead.

Pure: no tensors, no processes, no clock. The cost of one half of an exchange (reduce-scatter or all-gather) of m bytes
is α + β·m, the common model.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

_INDIFFERENCE: Final = 0.02  # a stronger codec also costs convergence
_FULL: Final = 0.9
"""Greatest part of the compute time that a plan of averaging lets the wire take."""
_LONGEST_INTERVAL: Final = 4096


@dataclass(frozen=True)
class LinkModel:
    """What one half of an exchange costs: α, and β per byte."""

    alpha_s: float
    beta_s: float

    def half_s(self, size_bytes: float) -> float:
        """Return the time of a reduce-scatter or all-gather of a bucket of ``size_bytes``."""
        return self.alpha_s + self.beta_s * size_bytes

    @classmethod
    def fitted(cls, samples: Iterable[tuple[float, float]]) -> "LinkModel":
        """Fit α and β to pairs (bytes, seconds of one half) of several sizes by least squares; neither is negative."""
        points = list(samples)
        mean_x = sum(x for x, _ in points) / len(points)
        mean_y = sum(y for _, y in points) / len(points)
        spread = sum((x - mean_x) ** 2 for x, _ in points)
        beta_s = max(0.0, sum((x - mean_x) * (y - mean_y) for x, y in points) / spread)
        return cls(max(0.0, mean_y - beta_s * mean_x), beta_s)


class BucketTimes(NamedTuple):
    """One bucket of a recorded step, in the order of backward.

    ``ready_s``: seconds of backward's compute until its last gradient.
    """

    size_bytes: int
    ready_s: float


@dataclass(frozen=True)
class Workload:
    """One training step of one rank: compute and buckets."""

    forward_s: float
    backward_s: float
    buckets: tuple[BucketTimes, ...]

    @property
    def compute_s(self) -> float:
        """Seconds of the whole step without communication."""
        return self.forward_s + self.backward_s

    def encoded(self, hook_s: float) -> "Workload":
        """Add (or take away, if negative) the seconds that encoding costs for each byte, in backward."""
        filled, buckets = 0, []
        for bucket in self.buckets:
            filled += bucket.size_bytes
            buckets.append(bucket._replace(ready_s=max(0.0, bucket.ready_s + hook_s * filled)))
        return Workload(self.forward_s, max(0.0, self.backward_s + hook_s * filled), tuple(buckets))


def workload_of_records(records: Sequence[Sequence[tuple[int, float]]]) -> Workload | None:
    """Return the medians of recorded steps; None without any."""
    if not records:
        return None
    buckets = [
        BucketTimes(size_bytes, statistics.median(each[place][1] for each in records))
        for place, (size_bytes, _) in enumerate(records[-1])
    ]
    # No record tells the end of forward: all is "backward", whose buckets are ready at their moments.
    return Workload(0.0, max(bucket.ready_s for bucket in buckets), tuple(buckets))


def all_reduce_step_s(work: Workload, link: LinkModel) -> float:
    """Return the time of a step of plain DDP: every bucket is all-reduced during backward, which waits for all."""
    wire_s = 0.0
    for bucket in work.buckets:
        wire_s = max(wire_s, bucket.ready_s) + 2 * link.half_s(bucket.size_bytes)
    return work.forward_s + max(work.backward_s, wire_s)


@dataclass(frozen=True)
class AveragingPlan:
    """Arguments of ``LocalSGDState`` that suit a model on a link, and the predicted seconds of a step with them.

    ``compute_s``: C, seconds that a step computes. ``wire_s``: M, seconds that one exchange of all parameters takes.
    """

    sync_every: int
    delay: int
    fragments: int
    step_s: float
    compute_s: float
    wire_s: float

    def arguments(self) -> dict[str, Any]:
        """Return the arguments for ``LocalSGDState``."""
        return {"sync_every": self.sync_every, "delay": self.delay, "fragments": self.fragments}


def plan_averaging(compute_s: float, size_bytes: float, link: LinkModel) -> AveragingPlan:
    """Choose the shortest interval for which the wire keeps up, and the shortest delay that no step waits for.

    A fragment leaves in every step if the link's start-up time allows that, else all parameters at once. Our design.
    """
    room_s, wire_s = _FULL * compute_s, 2 * link.half_s(size_bytes)
    for sync_every in range(2, _LONGEST_INTERVAL + 1):
        for fragments in (sync_every, 1):
            one_s = 2 * link.half_s(size_bytes / fragments)
            delay = max(1, math.ceil(one_s / room_s))
            if fragments * one_s <= sync_every * room_s and delay < sync_every:
                return AveragingPlan(sync_every, delay, fragments, compute_s, compute_s, wire_s)
    raise ValueError(
        f"expected an exchange within {_LONGEST_INTERVAL} steps, got {wire_s:.3g} s for it and {compute_s:.3g} s a "
        "step; use larger batches or another link"
    )


@dataclass(frozen=True)
class CodecCost:
    """What a codec makes of an exchange, for each byte of gradient.

    Args:
        rate: bytes on the wire over those of an exact exchange.
        hook_s: seconds of encoding on the thread that computes.
        worker_s: processor seconds of adding, encoding again and decoding on other threads.
    """

    rate: float
    hook_s: float
    worker_s: float


EXACT: Final = CodecCost(1.0, 0.0, 0.0)


def coded_step_s(work: Workload, link: LinkModel, cost: CodecCost) -> float:
    """Return the time of a step with a codec, on one core for compute and workers.

    A bucket's workers wait for its wire, and the next half of it for them; so their time counts as the wire's. No step
    takes less than all compute of both. ``work`` is without a codec.
    """
    coded, total = work.encoded(cost.hook_s), sum(bucket.size_bytes for bucket in work.buckets)
    slowed = LinkModel(link.alpha_s, link.beta_s * cost.rate + cost.worker_s / 2)
    return max(all_reduce_step_s(coded, slowed), coded.compute_s + cost.worker_s * total)


def weakest_codec(
    work: Workload, link: LinkModel, costs: Sequence[CodecCost]
) -> tuple[int, tuple[float, ...]]:
    """Return which codec to take, of ``costs`` with the weakest first, and the predicted seconds of a step with each.

    The weakest whose step is about as short as the shortest: where it hides what is left of the exchange, a stronger
    one has nothing to gain. Source: our design, after the abstract of FusionLLM (arXiv 2410.12707).
    """
    if not costs:
        raise ValueError(
            "expected at least one codec to choose from, got none; pass None for no codec"
        )
    predicted = tuple([coded_step_s(work, link, cost) for cost in costs])
    good_s = min(predicted) * (1 + _INDIFFERENCE)
    return next(place for place, step_s in enumerate(predicted) if step_s <= good_s), predicted

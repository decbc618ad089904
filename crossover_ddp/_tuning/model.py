"""Cost model: predicts the step of plain DDP, and from it chooses a codec or an averaging interval.

Pure: no tensors, no processes, no clock. One half of an exchange (reduce-scatter or all-gather) of
m bytes costs α + β·m, the common model.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

_INDIFFERENCE: Final = 0.02
"""A stronger codec must shorten the step by more than this, since it also costs convergence."""
_FULL: Final = 0.9
"""Greatest part of the compute time for which a plan of averaging may occupy the wire."""
_LONGEST_INTERVAL: Final = 4096


@dataclass(frozen=True)
class LinkModel:
    """Cost of one half of an exchange: α, and β per byte."""

    alpha_s: float
    beta_s: float

    def half_s(self, size_bytes: float) -> float:
        """Return the time of a reduce-scatter or all-gather of a bucket of ``size_bytes``."""
        return self.alpha_s + self.beta_s * size_bytes

    @classmethod
    def fitted(cls, samples: Iterable[tuple[float, float]]) -> "LinkModel":
        """Fit α and β to pairs (bytes, seconds of one half) of several sizes by least squares.

        Negative results are replaced by 0.
        """
        points = list(samples)
        mean_x = sum(x for x, _ in points) / len(points)
        mean_y = sum(y for _, y in points) / len(points)
        spread = sum((x - mean_x) ** 2 for x, _ in points)
        beta_s = max(0.0, sum((x - mean_x) * (y - mean_y) for x, y in points) / spread)
        return cls(max(0.0, mean_y - beta_s * mean_x), beta_s)


class BucketTimes(NamedTuple):
    """One bucket of a recorded step, in the order of backward."""

    size_bytes: int
    # Seconds of backward's compute until the bucket's last gradient.
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
        """Return the workload with ``hook_s`` seconds of encoding per byte added to backward.

        A negative ``hook_s`` removes them.
        """
        filled_bytes = 0
        buckets = []
        for bucket in self.buckets:
            filled_bytes += bucket.size_bytes
            ready_s = max(0.0, bucket.ready_s + hook_s * filled_bytes)
            buckets.append(bucket._replace(ready_s=ready_s))
        backward_s = max(0.0, self.backward_s + hook_s * filled_bytes)
        return Workload(self.forward_s, backward_s, tuple(buckets))


def workload_of_records(records: Sequence[Sequence[tuple[int, float]]]) -> Workload | None:
    """Return the median of recorded steps. None if there are no records."""
    if not records:
        return None
    buckets = [
        BucketTimes(size_bytes, statistics.median(each[place][1] for each in records))
        for place, (size_bytes, _) in enumerate(records[-1])
    ]
    # Records do not have the end of forward, so the whole compute time counts as backward.
    return Workload(0.0, max(bucket.ready_s for bucket in buckets), tuple(buckets))


def all_reduce_step_s(work: Workload, link: LinkModel) -> float:
    """Return the time of a step of plain DDP.

    Every bucket is all-reduced during backward, and backward waits for all buckets.
    """
    wire_s = 0.0
    for bucket in work.buckets:
        wire_s = max(wire_s, bucket.ready_s) + 2 * link.half_s(bucket.size_bytes)
    return work.forward_s + max(work.backward_s, wire_s)


@dataclass(frozen=True)
class AveragingPlan:
    """Arguments of ``LocalSGDState`` that suit a model on a link, and a prediction of their effect.

    Args:
        sync_every: steps between two rounds.
        delay: steps that a round may take.
        fragments: parts in which the parameters are averaged.
        step_s: predicted seconds of a step.
        compute_s: C, the seconds of compute in a step.
        wire_s: M, the seconds of one exchange of all parameters.
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
    """Choose the shortest interval that the wire keeps up with, and a delay that no step waits for.

    One fragment is sent in every step if the link's start-up time allows it. Otherwise all
    parameters are sent at once. Our design.
    """
    room_s = _FULL * compute_s
    wire_s = 2 * link.half_s(size_bytes)
    for sync_every in range(2, _LONGEST_INTERVAL + 1):
        for fragments in (sync_every, 1):
            fragment_s = 2 * link.half_s(size_bytes / fragments)
            delay = max(1, math.ceil(fragment_s / room_s))
            if fragments * fragment_s <= sync_every * room_s and delay < sync_every:
                return AveragingPlan(sync_every, delay, fragments, compute_s, compute_s, wire_s)
    raise ValueError(
        f"expected an exchange within {_LONGEST_INTERVAL} steps, got {wire_s:.3g} s for it and "
        f"{compute_s:.3g} s a step; use larger batches or another link"
    )


@dataclass(frozen=True)
class CodecCost:
    """Cost of an exchange with a codec, per byte of gradient.

    Args:
        rate: bytes on the wire, divided by those of an exact exchange.
        hook_s: seconds of encoding on the training thread.
        worker_s: processor seconds of adding, encoding again and decoding on other threads.
    """

    rate: float
    hook_s: float
    worker_s: float


EXACT: Final = CodecCost(1.0, 0.0, 0.0)


def coded_step_s(work: Workload, link: LinkModel, cost: CodecCost) -> float:
    """Return the time of a step with a codec, if compute and workers share one core.

    The workers of a bucket wait for its first half on the wire, and its second half waits for the
    workers, so their time is added to that of the wire. A step takes at least the compute time of
    the model and the workers together. ``work`` is the workload without a codec.
    """
    coded = work.encoded(cost.hook_s)
    total_bytes = sum(bucket.size_bytes for bucket in work.buckets)
    slowed = LinkModel(link.alpha_s, link.beta_s * cost.rate + cost.worker_s / 2)
    return max(all_reduce_step_s(coded, slowed), coded.compute_s + cost.worker_s * total_bytes)


def weakest_codec(
    work: Workload, link: LinkModel, costs: Sequence[CodecCost]
) -> tuple[int, tuple[float, ...]]:
    """Return the index of the codec to use, and the predicted seconds of a step with each codec.

    ``costs`` has the weakest codec first. The result is the weakest one whose step is about as
    short as the shortest: once the exchange is hidden, a stronger codec gains nothing. Source: our
    design, after the abstract of FusionLLM (arXiv 2410.12707).
    """
    if not costs:
        raise ValueError(
            "expected at least one codec to choose from, got none; pass None for no codec"
        )
    predicted_s = tuple([coded_step_s(work, link, cost) for cost in costs])
    good_s = min(predicted_s) * (1 + _INDIFFERENCE)
    return next(index for index, step_s in enumerate(predicted_s) if step_s <= good_s), predicted_s

"""Predicts the step time of plain DDP, and uses it to choose a codec or an averaging interval.

These functions are pure: they use no tensors, no processes and no clock. As in the common cost
model, one half of an exchange of m bytes (a reduce-scatter or all-gather) costs α + β·m.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

_INDIFFERENCE: Final = 0.02
"""A stronger codec must shorten the step by more than this fraction, since it also slows down
convergence."""
_FULL: Final = 0.9
"""The largest fraction of the compute time for which an averaging plan may occupy the wire."""
_LONGEST_INTERVAL: Final = 4096
# The size of an `Int4` message relative to that of its float32 values.
_FOUR_BITS: Final = 0.133
# Averaging must be faster by this factor to be worth a higher loss.
_GAIN: Final = 1.1


@dataclass(frozen=True)
class LinkModel:
    """The cost of one half of an exchange: α, plus β per byte.

    With two levels, ``inside_s`` is the part of β that is spent within the node, without a codec.
    """

    alpha_s: float
    beta_s: float
    inside_s: float = 0.0

    def half_s(self, size_bytes: float) -> float:
        """Return the seconds for a reduce-scatter or all-gather of a bucket of ``size_bytes``."""
        return self.alpha_s + self.beta_s * size_bytes

    def coded(self, rate: float) -> "LinkModel":
        """Return the link as it is with a codec of this rate, which is used between nodes."""
        beta_s = self.inside_s + (self.beta_s - self.inside_s) * rate
        return LinkModel(self.alpha_s, beta_s, self.inside_s)

    @classmethod
    def fitted(cls, samples: Iterable[tuple[float, float]]) -> "LinkModel":
        """Fit α and β by least squares, and return the model. Negative results are replaced by 0.

        Args:
            samples: pairs (bytes, seconds for one half), for at least two different sizes.
        """
        points = list(samples)
        mean_x = sum(x for x, _ in points) / len(points)
        mean_y = sum(y for _, y in points) / len(points)
        spread = sum((x - mean_x) ** 2 for x, _ in points)
        beta_s = max(0.0, sum((x - mean_x) * (y - mean_y) for x, y in points) / spread)
        return cls(max(0.0, mean_y - beta_s * mean_x), beta_s)


class BucketTimes(NamedTuple):
    """The size of one bucket in a recorded step, and the time at which it was ready."""

    size_bytes: int
    # Seconds that backward had computed when the bucket's last gradient was ready.
    ready_s: float


@dataclass(frozen=True)
class Workload:
    """The compute time and the buckets of one rank's training step.

    The buckets are in the order in which backward fills them.
    """

    forward_s: float
    backward_s: float
    buckets: tuple[BucketTimes, ...]

    @property
    def compute_s(self) -> float:
        """Seconds that the whole step takes without communication."""
        return self.forward_s + self.backward_s

    def encoded(self, hook_s: float) -> "Workload":
        """Return the workload with the time for encoding added to backward.

        Args:
            hook_s: seconds of encoding per byte. A negative value removes this time instead.
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
    """Return a workload with the median times of the recorded steps. None if there are no records.

    Args:
        records: for each step, pairs (bytes, seconds until ready) of its buckets.
    """
    if not records:
        return None
    buckets = [
        BucketTimes(size_bytes, statistics.median(each[place][1] for each in records))
        for place, (size_bytes, _) in enumerate(records[-1])
    ]
    # Records do not contain the end of forward, so the whole compute time counts as backward.
    return Workload(0.0, max(bucket.ready_s for bucket in buckets), tuple(buckets))


def all_reduce_step_s(work: Workload, link: LinkModel) -> float:
    """Return the seconds that a step of plain DDP takes.

    Every bucket is all-reduced during backward, and backward waits for all buckets.
    """
    wire_s = 0.0
    for bucket in work.buckets:
        wire_s = max(wire_s, bucket.ready_s) + 2 * link.half_s(bucket.size_bytes)
    return work.forward_s + max(work.backward_s, wire_s)


@dataclass(frozen=True)
class AveragingPlan:
    """Arguments for ``LocalSGDState`` that suit a model on a link, with their predicted effect.

    Args:
        sync_every: the number of steps between two exchanges.
        delay: the number of steps that an exchange may take.
        fragments: the number of parts in which the parameters are averaged.
        step_s: the predicted seconds per step.
        compute_s: C, the seconds of compute in a step.
        wire_s: M, the seconds that one exchange of all parameters takes without a codec.
        gradients_s: the predicted seconds per step if gradients are exchanged in four bits instead,
            with two thirds of the compute to hide the exchange.
    """

    sync_every: int
    delay: int
    fragments: int
    step_s: float
    compute_s: float
    wire_s: float
    gradients_s: float

    def arguments(self) -> dict[str, Any]:
        """Return the arguments for ``LocalSGDState``."""
        return {"sync_every": self.sync_every, "delay": self.delay, "fragments": self.fragments}

    @property
    def pays(self) -> bool:
        """Whether averaging is predicted to be a tenth faster than gradients in four bits.

        If not, use ``AutoState(optimizer, losses="rounded")`` or ``CompressedState(Int4())``.
        """
        return self.gradients_s > _GAIN * self.step_s


def plan_averaging(
    compute_s: float, size_bytes: float, link: LinkModel, *, rate: float | None = None
) -> AveragingPlan:
    """Choose the shortest interval that the wire can sustain, and a delay that makes no step wait.

    If the link's start-up time allows it, one fragment is sent in every step. Otherwise all
    parameters are sent at once. Our design.

    Args:
        compute_s: the seconds of compute in a step.
        size_bytes: the size of all parameters.
        link: the cost model of the link.
        rate: with a codec, the bytes of a message over those of the values. An interval of one step
            is then tried as well. Default: no codec.

    Raises ``ValueError`` if the wire does not keep up even with the longest interval.
    """
    room_s = _FULL * compute_s
    wire_s = 2 * link.half_s(size_bytes)
    carrier = link if rate is None else link.coded(rate)
    in_four_bits_s = 2 * link.coded(_FOUR_BITS).half_s(size_bytes)
    gradients_s = compute_s / 3 + max(compute_s * 2 / 3, in_four_bits_s)
    for sync_every in range(2 if rate is None else 1, _LONGEST_INTERVAL + 1):
        for fragments in (sync_every, 1):
            fragment_s = 2 * carrier.half_s(size_bytes / fragments)
            delay = max(1, math.ceil(fragment_s / room_s))
            keeps_up = fragments * fragment_s <= sync_every * room_s
            if keeps_up and delay <= sync_every:
                return AveragingPlan(
                    sync_every, delay, fragments, compute_s, compute_s, wire_s, gradients_s
                )
    raise ValueError(
        f"expected an exchange within {_LONGEST_INTERVAL} steps, got {wire_s:.3g} s for it and "
        f"{compute_s:.3g} s a step; use larger batches or another link"
    )


@dataclass(frozen=True)
class CodecCost:
    """The cost of an exchange with a codec, per byte of gradient.

    Args:
        rate: the bytes on the wire, divided by the bytes of an exact exchange.
        hook_s: the seconds of encoding on the training thread.
        worker_s: the processor seconds of adding, encoding again and decoding on other threads.
    """

    rate: float
    hook_s: float
    worker_s: float


EXACT: Final = CodecCost(1.0, 0.0, 0.0)


def coded_step_s(work: Workload, link: LinkModel, cost: CodecCost) -> float:
    """Return the seconds that a step with a codec takes if compute and workers share one core.

    A bucket's workers wait for the first half of its exchange, and the second half waits for the
    workers, so the workers' time is added to the time on the wire. A step takes at least as long as
    the model and the workers compute together.

    Args:
        work: the workload without a codec.
        link: the cost model of the link.
        cost: the cost of the codec.
    """
    coded = work.encoded(cost.hook_s)
    total_bytes = sum(bucket.size_bytes for bucket in work.buckets)
    slowed = LinkModel(link.alpha_s, link.coded(cost.rate).beta_s + cost.worker_s / 2)
    return max(all_reduce_step_s(coded, slowed), coded.compute_s + cost.worker_s * total_bytes)


def weakest_codec(
    work: Workload, link: LinkModel, costs: Sequence[CodecCost]
) -> tuple[int, tuple[float, ...]]:
    """Return the index of the codec to use, and the predicted seconds per step with each codec.

    The choice is the weakest codec whose step is about as short as the shortest one, since a
    stronger codec gains nothing once the exchange is hidden. Source: our design, after the abstract
    of FusionLLM (arXiv 2410.12707).

    Args:
        work: the workload without a codec.
        link: the cost model of the link.
        costs: the costs of the codecs, with the weakest codec first.

    Raises ``ValueError`` if ``costs`` is empty.
    """
    if not costs:
        raise ValueError(
            "expected at least one codec to choose from, got none; pass None for no codec"
        )
    predicted_s = tuple([coded_step_s(work, link, cost) for cost in costs])
    good_s = min(predicted_s) * (1 + _INDIFFERENCE)
    return next(index for index, step_s in enumerate(predicted_s) if step_s <= good_s), predicted_s

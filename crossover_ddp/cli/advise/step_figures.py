"""Work out C, N and M of a job's step, its buckets and the link from a short run. Pure; all times in seconds.

C  compute of a step on the slowest rank: what is neither exposed communication nor waiting for a turn
N  exposed communication: the rest of the step
M  time in which the wire carries the step's gradients, even while the devices compute

A rank that is early waits inside its exchange for a rank that is late. That wait is not time of the wire. So of each
half of a bucket's exchange only the last part counts, as long as the shortest time of all ranks for that half.
"""

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median, quantiles
from typing import Final, NamedTuple

from crossover_ddp._planning import BucketTimes, Link, Workload
from crossover_ddp._timeline.merge import RawSpan

WARM_UP_STEPS: Final = 3
"""Iteration 0 is one bucket, 1 rebuilds them, 2 is the first in its final form."""
LEAST_STEPS: Final = 5
THE_LINE: Final = "model.register_comm_hook(None, reduce_scatter_all_gather_hook)"
THE_IMPORT: Final = "from crossover_ddp.comm_hooks import reduce_scatter_all_gather_hook"
_HALVES: Final = frozenset({"reduce_scatter", "all_gather"})
# If the sizes are closer to each other than this ratio, or explain a smaller share of the times, start-up and rate
# cannot be told apart.
_DISTINCT_RATIO: Final = 2.0
_EXPLAINED_SHARE: Final = 0.9
# No span records the end of forward; forward and backward of most networks take times as 1 : 2.
FORWARD_SHARE: Final = 1 / 3

SPLIT: Final = "split"
DECOUPLED: Final = "decoupled"
WRAPPED: Final = "wrapped"


class NotMeasurableError(Exception):
    """The recording does not suffice; the text says what was found and what to change."""


class Bucket(NamedTuple):
    """One bucket, medians over the steps. ``ready_s``: compute of the step before its hook. ``wire_s``: of M."""

    size_bytes: int
    largest_bytes: int
    ready_s: float
    wire_s: float


@dataclass(frozen=True)
class Figures:
    """One job, medians over the settled steps.

    Args:
        hook: `SPLIT` (or crossover's, which is the same exchange), `DECOUPLED` or `WRAPPED`.
        ranks: recorded ranks.
        steps: settled steps.
        skipped: steps left out: warm-up, and those with other buckets than the rest.
        step_s: C + N; waiting for a turn is left out.
        spread_s: first and third quartile of ``step_s``.
        compute_s: C.
        exposed_s: N.
        wire_s: M; None if no buckets were recorded (a wrapped hook).
        waited_s: for the turn, in a step.
        lag_s: by how much the slowest rank computes longer than the fastest, in a step.
        buckets: in the order of backward.
        link: what half an exchange costs; its ``alpha_s`` is 0 if ``alpha_known`` is false.
        alpha_known: whether the buckets' sizes and times determine both start-up and rate.
    """

    hook: str
    ranks: tuple[int, ...]
    steps: int
    skipped: int
    step_s: float
    spread_s: tuple[float, float]
    compute_s: float
    exposed_s: float
    wire_s: float | None
    waited_s: float
    lag_s: float
    buckets: tuple[Bucket, ...]
    link: Link | None
    alpha_known: bool

    @property
    def size_bytes(self) -> int:
        """Bytes of all gradients."""
        return sum(bucket.size_bytes for bucket in self.buckets)


class _HalfSpan(NamedTuple):
    bucket: int
    kind: str
    begin_s: float
    end_s: float


class _RankStep(NamedTuple):
    """One step of one rank."""

    step_s: float
    exposed_s: float
    waited_s: float
    sizes: tuple[int, ...]
    largest: tuple[int, ...]
    ready_s: tuple[float, ...]
    halves: tuple[_HalfSpan, ...]

    @property
    def compute_s(self) -> float:
        return self.step_s - self.exposed_s


def figures(ranks: Mapping[int, Sequence[RawSpan]]) -> Figures:
    """Work out the figures of one job from the recorded spans of its ranks.

    Raises `NotMeasurableError` if the spans do not suffice, or would mislead.
    """
    hook = _hook_of(ranks)
    steps = {rank: _steps_of(spans) for rank, spans in ranks.items()}
    recorded = min(len(each) for each in steps.values())
    settled = _settled(list(steps.values()), recorded)
    if len(settled) < LEAST_STEPS:
        raise NotMeasurableError(
            f"expected at least {LEAST_STEPS} steps after the first {WARM_UP_STEPS} (DDP forms its buckets in those), "
            f"got {len(settled)} of {recorded} recorded; let the job run longer (--seconds, --steps)"
        )
    together = [[each[place] for each in steps.values()] for place in settled]
    step_s = [max(step.step_s for step in one) for one in together]
    compute_s = [max(step.compute_s for step in one) for one in together]
    buckets = _buckets(together) if hook != WRAPPED else ()
    link, alpha_known = _link(buckets) if buckets else (None, False)
    lower_s, _, upper_s = quantiles(step_s, n=4, method="inclusive")
    return Figures(
        hook=hook,
        ranks=tuple(sorted(ranks)),
        steps=len(settled),
        skipped=recorded - len(settled),
        step_s=median(step_s),
        spread_s=(lower_s, upper_s),
        compute_s=median(compute_s),
        exposed_s=max(0.0, median(step_s) - median(compute_s)),
        wire_s=sum(bucket.wire_s for bucket in buckets) if buckets else None,
        waited_s=median(max(step.waited_s for step in one) for one in together),
        lag_s=median(max(s.compute_s for s in one) - min(s.compute_s for s in one) for one in together),
        buckets=buckets,
        link=link,
        alpha_known=alpha_known,
    )


def workload(found: Figures, *, pieces: int = 0) -> Workload:
    """Return the job as the cost model of `crossover_ddp._planning` needs it.

    No span records the end of forward: a third of the compute is assumed, or the time before the first bucket if
    that is less. Forward is assumed to need the buckets in the reverse order, at the mirrored times.

    Args:
        found: with buckets.
        pieces: cut each bucket into pieces of about this part of all gradients, ready at even distances, but none
            smaller than its largest gradient, which DDP cannot cut; 0: the buckets as they are.
    """
    forward_s = min(FORWARD_SHARE * found.compute_s, found.buckets[0].ready_s)
    backward_s = found.compute_s - forward_s
    parts: list[tuple[int, float]] = []
    before_s = forward_s
    for bucket in found.buckets:
        sizes = _pieces(bucket, found.size_bytes / pieces) if pieces else [bucket.size_bytes]
        filled = 0
        for size_bytes in sizes:
            filled += size_bytes
            parts.append(
                (size_bytes, before_s + (bucket.ready_s - before_s) * filled / bucket.size_bytes - forward_s)
            )
        before_s = bucket.ready_s
    return Workload(
        forward_s,
        backward_s,
        tuple(
            [
                BucketTimes(
                    size_bytes,
                    min(max(0.0, ready_s), backward_s),
                    forward_s * (1 - min(1.0, max(0.0, ready_s / backward_s))) if backward_s > 0 else 0.0,
                )
                for size_bytes, ready_s in parts
            ]
        ),
    )


def _pieces(bucket: Bucket, size_bytes: float) -> list[int]:
    """Cut a bucket into about equal pieces and its largest gradient, which may be complete only at the end."""
    if bucket.size_bytes <= size_bytes:
        return [bucket.size_bytes]
    largest = min(bucket.size_bytes, bucket.largest_bytes or bucket.size_bytes)
    whole = largest if largest > size_bytes else 0
    rest = bucket.size_bytes - whole
    count = max(1, round(rest / size_bytes)) if rest else 0
    cuts = [round(rest * place / count) for place in range(count + 1)] if count else [0]
    sizes = [end - begin for begin, end in pairwise(cuts)]
    return [size for size in [*sizes, whole] if size]


# --- steps --------------------------------------------------------------------------------------------------------


def _hook_of(ranks: Mapping[int, Sequence[RawSpan]]) -> str:
    """Return the kind of hook that recorded the spans; refuse spans that would mislead."""
    spans = [span for each in ranks.values() for span in each]
    kinds = {span.kind for span in spans}
    if any(map(_is_averaging, spans)):
        raise NotMeasurableError(
            "expected a hook that exchanges gradients in every step, got replicas that are averaged now and then; "
            f"measure the same model with\n    {THE_LINE}  # {THE_IMPORT}"
        )
    if "compute" not in kinds:
        raise NotMeasurableError(
            "expected spans of a hook of crossover_ddp, got none; add one line after "
            f"DistributedDataParallel(...):\n    {THE_LINE}  # {THE_IMPORT}\n"
            "(the gradients stay those of plain DDP; without CROSSOVER_DISABLE, which switches recording off, too)"
        )
    devices = {str(span.detail["device_type"]) for span in spans if "device_type" in span.detail} - {"cpu"}
    if devices:
        raise NotMeasurableError(
            f"expected a job on CPU devices, got device={', '.join(sorted(devices))}; there the spans show when the "
            "host launched a kernel, not when it ran, so C, N and M would be wrong. Try the hooks themselves"
        )
    if any(span.detail.get("owner") for span in spans):
        raise NotMeasurableError(
            "expected a hook that only exchanges gradients, got K-FAC's, whose exchanges contain the owners' compute; "
            f"measure the same model with\n    {THE_LINE}  # {THE_IMPORT}"
        )
    halves = [span for span in spans if span.kind in _HALVES]
    if any("sent_bytes" in span.detail for span in halves):
        raise NotMeasurableError(
            "expected a recording without a codec, got one with; measure with codec=None: the advice then says what a "
            "codec would bring"
        )
    if any("ready_s" not in span.detail for span in halves):
        raise NotMeasurableError(
            "expected spans that show when each bucket was ready, got those of an earlier version of crossover_ddp; "
            "record the job again"
        )
    if not halves and len(ranks) == 1:
        raise NotMeasurableError(
            "expected exchanges between ranks, got one rank that exchanges nothing; start at least two ranks "
            "(torchrun --nproc-per-node 2, or more nodes)"
        )
    if not halves:
        return WRAPPED
    return SPLIT if "exchange" in kinds else DECOUPLED


def _is_averaging(span: RawSpan) -> bool:
    """Whether this is the gather of something else than a bucket (none has its number) that an owner has worked on."""
    return span.kind == "all_gather" and span.detail.get("bucket", 0) < 0 and bool(span.detail.get("owner"))


def _steps_of(spans: Iterable[RawSpan]) -> list[_RankStep]:
    """Cut a rank's spans into steps, from the begin of one computation to the begin of the next."""
    by_kind: dict[str, list[RawSpan]] = defaultdict(list)
    for span in sorted(spans, key=lambda each: each.begin_s):
        by_kind[span.kind].append(span)
    computes = by_kind["compute"]
    begins_s = [span.begin_s for span in computes]
    idle, waited, halves = ([0.0] * len(computes), [0.0] * len(computes), [[] for _ in computes])  # type: ignore[var-annotated]
    for kind, sums in (("exchange", idle), ("stall", idle), ("wait", waited)):
        for span in by_kind[kind]:
            place = bisect_right(begins_s, span.begin_s) - 1
            if place >= 0:
                sums[place] += span.end_s - span.begin_s
    for kind in _HALVES:
        for span in by_kind[kind]:
            place = bisect_left(begins_s, span.detail["ready_s"]) - 1
            if place >= 0:
                halves[place].append(span)
    return [
        _step(begins_s[place : place + 2], idle[place], waited[place], halves[place], by_kind["stall"])
        for place in range(len(computes) - 1)
    ]


def _step(
    window_s: Sequence[float],
    idle_s: float,
    waited_s: float,
    spans: Sequence[RawSpan],
    stalls: Sequence[RawSpan],
) -> _RankStep:
    begin_s, end_s = window_s
    buckets: dict[int, dict[str, RawSpan]] = defaultdict(dict)
    for span in spans:
        buckets[int(span.detail["bucket"])][span.kind] = span
    whole = {number: both for number, both in buckets.items() if len(both) == len(_HALVES)}
    details = [next(iter(whole[number].values())).detail for number in sorted(whole)]
    return _RankStep(
        step_s=end_s - begin_s - waited_s,
        exposed_s=idle_s,
        waited_s=waited_s,
        sizes=tuple([int(detail["bytes"]) for detail in details]),
        largest=tuple([int(detail.get("largest_bytes", 0)) for detail in details]),
        ready_s=tuple(
            [
                detail["ready_s"] - begin_s - _stalled_s(stalls, begin_s, detail["ready_s"])
                for detail in details
            ]
        ),
        halves=tuple(
            [
                _HalfSpan(place, kind, span.begin_s, span.end_s)
                for place, number in enumerate(sorted(whole))
                for kind, span in whole[number].items()
            ]
        ),
    )


def _stalled_s(stalls: Sequence[RawSpan], begin_s: float, end_s: float) -> float:
    return sum(span.end_s - span.begin_s for span in stalls if begin_s <= span.begin_s < end_s)


def _settled(ranks: Sequence[Sequence[_RankStep]], recorded: int) -> list[int]:
    """Return which steps count: those after the warm-up with the buckets that most steps have, on all ranks."""
    shapes = [{steps[place].sizes for steps in ranks} for place in range(recorded)]
    after = [place for place in range(WARM_UP_STEPS, recorded) if len(shapes[place]) == 1]
    common = Counter(next(iter(shapes[place])) for place in after).most_common(1)
    return [place for place in after if shapes[place] == {common[0][0]}]


# --- the wire -----------------------------------------------------------------------------------------------------


def _buckets(together: Sequence[Sequence[_RankStep]]) -> tuple[Bucket, ...]:
    """Return the medians per bucket over the steps."""
    wire_s = [_wire_s(one) for one in together]
    first = together[0][0]
    if not first.sizes:
        raise NotMeasurableError(
            "expected both halves of each bucket's exchange, got steps without; was the job ended in its first steps?"
        )
    return tuple(
        [
            Bucket(
                size_bytes,
                first.largest[place],
                median(max(step.ready_s[place] for step in one) for one in together),
                median(each[place] for each in wire_s),
            )
            for place, size_bytes in enumerate(first.sizes)
        ]
    )


def _wire_s(ranks: Sequence[_RankStep]) -> list[float]:
    """Return how long the wire was busy with each bucket of a step, on the rank where that is least."""
    shortest: dict[tuple[int, str], float] = {}
    for step in ranks:
        for half in step.halves:
            key = (half.bucket, half.kind)
            length_s = half.end_s - half.begin_s
            shortest[key] = min(shortest.get(key, length_s), length_s)
    shares = [
        _shares(
            [
                (half.end_s - shortest[half.bucket, half.kind], half.end_s, half.bucket)
                for half in step.halves
            ],
            len(step.sizes),
        )
        for step in ranks
    ]
    return min(shares, key=sum)


def _shares(intervals: Sequence[tuple[float, float, int]], count: int) -> list[float]:
    """Share the time that intervals cover among their owners, evenly where several are active."""
    shares_s = [0.0] * count
    borders_s = sorted({at_s for begin_s, end_s, _ in intervals for at_s in (begin_s, end_s)})
    for begin_s, end_s in pairwise(borders_s):
        active = [owner for b, e, owner in intervals if b <= begin_s and e >= end_s]
        for owner in active:
            shares_s[owner] += (end_s - begin_s) / len(active)
    return shares_s


def _link(buckets: Sequence[Bucket]) -> tuple[Link, bool]:
    """Fit the link to the buckets' times; return whether these determine both start-up and rate, too."""
    wire_s, size_bytes = sum(each.wire_s for each in buckets), sum(each.size_bytes for each in buckets)
    plain = Link(0.0, wire_s / 2 / size_bytes)
    sizes = [bucket.size_bytes for bucket in buckets]
    if max(sizes) < _DISTINCT_RATIO * min(sizes):
        return plain, False
    fitted = Link.fitted((float(each.size_bytes), each.wire_s / 2) for each in buckets)
    halves_s = [each.wire_s / 2 for each in buckets]
    mean_s = wire_s / 2 / len(buckets)
    left_over = sum((half_s - fitted.half_s(size)) ** 2 for half_s, size in zip(halves_s, sizes, strict=True))
    spread = sum((half_s - mean_s) ** 2 for half_s in halves_s)
    determined = fitted.alpha_s > 0 and fitted.beta_s > 0 and left_over <= (1 - _EXPLAINED_SHARE) * spread
    return (fitted, True) if determined else (plain, False)

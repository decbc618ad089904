"""Computes the figures of a run from step logs and timelines: C, N, M, turns, waits, hand-overs.

docs/lab.md explains them. Pure: functions of records, which records.py reads from a run's
directory.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any, Final

from .spans import Statistics, TimelineSpan, handovers_s

WARM_UP_STEPS: Final = 3
"""Step 0 has one bucket, step 1 rebuilds the buckets, step 2 is the first with the final ones."""


@dataclass(frozen=True)
class MeteredStep:
    """One step of one rank, as its meter recorded it."""

    step: int
    begin_s: float
    end_s: float
    core_busy_s: float | None = None
    wire_bytes: int | None = None
    loss: float | None = None

    @property
    def length_s(self) -> float:
        """The duration of the step."""
        return self.end_s - self.begin_s


@dataclass(frozen=True)
class JobFigures:
    """One job of one run. Durations are medians over the steps after warm-up."""

    job: str
    ranks: int
    steps: int
    step_s: float | None
    busy_s: float | None
    exposed_s: float | None
    wire_s: float | None
    wire_bytes: float | None
    turns: int
    makespan_s: float | None
    step_times_s: Sequence[float]
    spans: Mapping[str, Statistics]
    handover: Statistics

    def as_json(self) -> dict[str, Any]:
        """The figures under the names that the documentation uses."""
        record = asdict(self)
        renamed = {
            "busy_s": "C_s",
            "exposed_s": "N_s",
            "wire_s": "M_s",
            "wire_bytes": "wire_bytes_per_step",
        }
        return {renamed.get(name, name): value for name, value in record.items()}


def bound(alone: Sequence[tuple[float, float, float]]) -> float:
    """Return the greatest possible speed-up of sibling jobs over running one after the other.

    For two equal jobs this is S = 2·T1 / max(2·C, T1, 2·M). Different jobs are bounded by the sum
    of their C, the longest T1, and the sum of their M.

    Args:
        alone: C, T1 and M of each job, in seconds, per step or over the whole run.
    """
    if not alone or any(not 0 < step_s < math.inf for _, step_s, _ in alone):
        raise ValueError(f"expected (C, T1, M) with T1 > 0 of at least one job, got {list(alone)}")
    busy_s, steps_s, wire_s = (list(column) for column in zip(*alone, strict=True))
    return float(sum(steps_s) / max(sum(busy_s), max(steps_s), sum(wire_s)))


def rate_for(ratio: float, compute_s: float, wire_bytes: float) -> float:
    """Return the rate in Mbit/s at which M/C, of the gradients of a step, is ``ratio``."""
    if ratio <= 0 or compute_s <= 0 or wire_bytes <= 0:
        raise ValueError(
            "expected a ratio, computation and traffic > 0, "
            f"got {ratio=}, {compute_s=}, {wire_bytes=}"
        )
    return wire_bytes * 8 / (ratio * compute_s) / 1e6


def wire_s(wire_bytes: float, rate_mbit: float | None) -> float:
    """Return M: how long the bytes are on a link of that rate. 0 without a link."""
    return wire_bytes * 8 / (rate_mbit * 1e6) if rate_mbit else 0.0


def job_figures(
    job: str,
    steps: Mapping[int, Sequence[MeteredStep]],
    spans: Sequence[TimelineSpan],
    *,
    rate_mbit: float | None,
    alone: bool,
    warm_up: int = WARM_UP_STEPS,
) -> JobFigures:
    """Compute the figures of one job.

    Args:
        job: name of the job.
        steps: the step logs by rank.
        spans: the spans of all jobs of the run (hand-overs are between jobs).
        rate_mbit: rate of the links. None if there are no links.
        alone: no other job shared the devices and links.
        warm_up: leave out this many steps, unless no others remain.
    """
    settled = {rank: log[warm_up:] if len(log) > warm_up else log for rank, log in steps.items()}
    own = [span for span in spans if span.job == job]
    exchanges = _settled_spans(own, "exchange", settled)
    computes = _settled_spans(own, "compute", settled)
    # Without emulated links the meter has counted all traffic of the machine.
    wire_bytes = _over_ranks(settled, "wire_bytes") if alone and rate_mbit else None
    # The kernel counts a core's busy time in ticks of 10 ms: a mean averages them out, a median
    # would keep the rounding.
    core_busy_s = _over_ranks(settled, "core_busy_s", fmean) if alone else None
    return JobFigures(
        job=job,
        ranks=len(steps) or len({span.rank for span in own}),
        steps=max((len(log) for log in steps.values()), default=0),
        step_s=_over_ranks(settled, "length_s"),
        busy_s=core_busy_s or _median_of(computes),
        exposed_s=_median_of(exchanges),
        wire_s=None if wire_bytes is None else wire_s(wire_bytes, rate_mbit),
        wire_bytes=wire_bytes,
        turns=sum(span.kind == "compute" and span.rank == 0 for span in own),
        makespan_s=makespan_s(steps.values()),
        step_times_s=[round(step.length_s, 6) for step in steps[min(steps)]] if steps else [],
        spans={kind: Statistics.of(lengths) for kind, lengths in _lengths_by_kind(own).items()},
        handover=Statistics.of(handovers_s(spans, job)),
    )


def _settled_spans(
    spans: Iterable[TimelineSpan], kind: str, settled: Mapping[int, Sequence[MeteredStep]]
) -> list[float]:
    begins_s = {rank: log[0].begin_s for rank, log in settled.items() if log}
    return [
        span.length_s
        for span in spans
        if span.kind == kind and span.begin_s >= begins_s.get(span.rank, -math.inf)
    ]


def _over_ranks(
    logs: Mapping[int, Sequence[MeteredStep]],
    name: str,
    average: Callable[[list[float]], float] = median,
) -> float | None:
    """Return the figure of the slowest or most loaded rank, for which the others wait."""
    averages = []
    for log in logs.values():
        values = [getattr(step, name) for step in log if getattr(step, name) is not None]
        if values:
            averages.append(float(average(values)))
    return max(averages, default=None)


def _median_of(lengths_s: Sequence[float]) -> float | None:
    return median(lengths_s) if lengths_s else None


def makespan_s(logs: Iterable[Sequence[MeteredStep]]) -> float | None:
    """Return the time from the first begin of a step to the last end, over all logs."""
    filled = [log for log in logs if log]
    if not filled:
        return None
    return max(log[-1].end_s for log in filled) - min(log[0].begin_s for log in filled)


def _lengths_by_kind(spans: Iterable[TimelineSpan]) -> dict[str, list[float]]:
    lengths: dict[str, list[float]] = defaultdict(list)
    for span in spans:
        lengths[span.kind].append(span.length_s)
    return dict(sorted(lengths.items()))

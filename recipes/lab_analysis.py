"""What a run says: C, N, M, turns, waits and hand-overs from step logs and timelines.

Pure: functions of records; lab_records.py reads them from a run's directory.

The letters are those of docs/lab.md. For one job *alone* on its devices:
C  busy time of the rank's core per step (communication's processor time counts as compute);
   where no log says it, the length of the "compute" spans
N  exposed communication: median "exchange" span (last bucket's hook to all buckets complete)
M  wire bytes per step × 8 / rate
T1 time of a step alone
Beside a sibling a core's busy time and a node's wire bytes belong to both jobs, so C and M are
given only for a job that ran alone.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, median
from typing import Any, Final

# Iteration 0 is one single bucket, 1 rebuilds the buckets, 2 is the first in its final form.
WARM_UP_STEPS: Final = 3


@dataclass(frozen=True)
class Span:
    """One thing that one rank of one job did."""

    job: str
    rank: int
    device: str
    kind: str
    begin_s: float
    end_s: float
    detail: Mapping[str, Any] = field(default_factory=dict)

    @property
    def length_s(self) -> float:
        """Its duration."""
        return self.end_s - self.begin_s


@dataclass(frozen=True)
class Step:
    """One step of one rank, as its meter saw it."""

    step: int
    begin_s: float
    end_s: float
    core_busy_s: float | None = None
    wire_bytes: int | None = None
    loss: float | None = None

    @property
    def length_s(self) -> float:
        """Its duration."""
        return self.end_s - self.begin_s


@dataclass(frozen=True)
class Statistics:
    """Some durations in short."""

    count: int
    total_s: float
    median_s: float
    p99_s: float
    max_s: float

    @classmethod
    def of(cls, lengths_s: Iterable[float]) -> Statistics:
        """Sum up durations; all zero if there is none."""
        ordered = sorted(lengths_s)
        if not ordered:
            return cls(0, 0.0, 0.0, 0.0, 0.0)
        p99 = ordered[math.ceil(0.99 * len(ordered)) - 1]
        return cls(len(ordered), math.fsum(ordered), median(ordered), p99, ordered[-1])


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
        renamed = {"busy_s": "C_s", "exposed_s": "N_s", "wire_s": "M_s", "wire_bytes": "wire_bytes_per_step"}
        return {renamed.get(name, name): value for name, value in record.items()}


def bound(alone: Sequence[tuple[float, float, float]]) -> float:
    """Greatest speed-up of sibling jobs over running one after the other.

    For two equal jobs this is S = 2·T1 / max(2·C, T1, 2·M). Jobs that differ are bounded by the
    sum of their computations, the longest one alone and the sum of their wire times.

    Args:
        alone: for each job C, T1 and M in seconds, per step or over the whole run.
    """
    if not alone or any(not 0 < step_s < math.inf for _, step_s, _ in alone):
        raise ValueError(f"expected (C, T1, M) with T1 > 0 of at least one job, got {list(alone)}")
    busy_s, steps_s, wire_s = (list(column) for column in zip(*alone, strict=True))
    return float(sum(steps_s) / max(sum(busy_s), max(steps_s), sum(wire_s)))


def job_figures(
    job: str,
    steps: Mapping[int, Sequence[Step]],
    spans: Sequence[Span],
    *,
    rate_mbit: float | None,
    alone: bool,
    warm_up: int = WARM_UP_STEPS,
) -> JobFigures:
    """Work out one job's figures.

    Args:
        job: its name.
        steps: the step logs by rank.
        spans: the spans of all jobs of the run (hand-overs are between jobs).
        rate_mbit: rate of the links; None if there is none.
        alone: no other job shared the devices and links.
        warm_up: steps to leave out, as long as others remain.
    """
    settled = {rank: _without_warm_up(log, warm_up) for rank, log in steps.items()}
    own = [span for span in spans if span.job == job]
    exchanges = _settled_spans(own, "exchange", settled)
    computes = _settled_spans(own, "compute", settled)
    # Without links of its own the job's meter has counted whatever the machine sent.
    wire_bytes = _over_ranks(settled, "wire_bytes") if alone and rate_mbit else None
    return JobFigures(
        job=job,
        ranks=len(steps) or len({span.rank for span in own}),
        steps=max((len(log) for log in steps.values()), default=0),
        step_s=_over_ranks(settled, "length_s"),
        busy_s=(_mean_busy_s(settled) if alone else None) or _median_of(computes),
        exposed_s=_median_of(exchanges),
        wire_s=wire_bytes * 8 / (rate_mbit * 1e6) if wire_bytes is not None and rate_mbit else None,
        wire_bytes=wire_bytes,
        turns=sum(span.kind == "compute" and span.rank == 0 for span in own),
        makespan_s=makespan_s(steps.values()),
        step_times_s=[round(step.length_s, 6) for step in _first(steps)],
        spans={kind: Statistics.of(lengths) for kind, lengths in _lengths_by_kind(own).items()},
        handover=Statistics.of(handovers_s(spans, job)),
    )


def handovers_s(spans: Iterable[Span], job: str) -> list[float]:
    """How long after a sibling gave its turn back did the job begin to compute, when it was waiting.

    Only turns that the job really waited for count: those where a sibling's last computation on the
    same device ended while the job's "wait" lasted.
    """
    waits = [span for span in spans if span.kind == "wait" and span.job == job]
    given_back: dict[str, list[float]] = defaultdict(list)
    for span in spans:
        if span.kind == "compute" and span.job != job:
            given_back[span.device].append(span.end_s)
    for ends_s in given_back.values():
        ends_s.sort()
    found = []
    for wait in waits:
        ends_s = given_back.get(wait.device, [])
        place = bisect_right(ends_s, wait.end_s)
        if place and ends_s[place - 1] > wait.begin_s:
            found.append(wait.end_s - ends_s[place - 1])
    return found


def occupancy(
    spans: Iterable[Span], device: str, *, window_s: tuple[float, float] | None = None
) -> dict[str, float]:
    """Shares of a device's time with nobody, one job, several jobs computing; they add up to 1.

    Args:
        spans: of any devices.
        device: the one asked for.
        window_s: begin and end; by default the time in which every job there was active, from
            the latest first span to the earliest last one.
    """
    here = [span for span in spans if span.device == device]
    begin_s, end_s = window_s or _all_active(here)
    if not end_s > begin_s:
        return {"idle": 1.0, "one": 0.0, "several": 0.0}
    by_depth = _time_by_depth((span for span in here if span.kind == "compute"), begin_s, end_s)
    one = by_depth.get(1, 0.0) / (end_s - begin_s)
    several = sum(length for depth, length in by_depth.items() if depth > 1) / (end_s - begin_s)
    return {"idle": 1 - one - several, "one": one, "several": several}


def _all_active(spans: Sequence[Span]) -> tuple[float, float]:
    by_job: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        by_job[span.job].append(span)
    begin_s = max((min(span.begin_s for span in job) for job in by_job.values()), default=0.0)
    return begin_s, min((max(span.end_s for span in job) for job in by_job.values()), default=0.0)


def chrome_trace(spans: Iterable[Span]) -> dict[str, Any]:
    """The spans for chrome://tracing or Perfetto: a process per device, a row per job and kind."""
    events: list[dict[str, Any]] = []
    devices: dict[str, int] = {}
    rows: dict[tuple[str, str], int] = {}
    for span in spans:
        process = devices.setdefault(span.device, len(devices))
        row = rows.setdefault((span.job, span.kind), len(rows))
        times = {"ts": span.begin_s * 1e6, "dur": span.length_s * 1e6}
        events.append(
            {
                "ph": "X",
                "pid": process,
                "tid": row,
                "name": span.kind,
                "cat": span.job,
                "args": dict(span.detail),
            }
            | times
        )
    for device, process in devices.items():
        events.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": device}})
        for (job, kind), row in rows.items():
            name = {"name": f"{job} {kind}"}
            events.append({"ph": "M", "name": "thread_name", "pid": process, "tid": row, "args": name})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _without_warm_up(log: Sequence[Step], warm_up: int) -> Sequence[Step]:
    return log[warm_up:] if len(log) > warm_up else log


def _settled_spans(spans: Iterable[Span], kind: str, settled: Mapping[int, Sequence[Step]]) -> list[float]:
    begins_s = {rank: log[0].begin_s for rank, log in settled.items() if log}
    return [
        span.length_s
        for span in spans
        if span.kind == kind and span.begin_s >= begins_s.get(span.rank, -math.inf)
    ]


def _over_ranks(logs: Mapping[int, Sequence[Step]], name: str) -> float | None:
    # The slowest or most loaded rank: the others wait for it.
    medians = []
    for log in logs.values():
        values = [getattr(step, name) for step in log]
        known = [value for value in values if value is not None]
        if known:
            medians.append(float(median(known)))
    return max(medians, default=None)


def _mean_busy_s(logs: Mapping[int, Sequence[Step]]) -> float | None:
    # The kernel counts a core's busy time in ticks of 10 ms: the mean keeps what a median rounds.
    means = []
    for log in logs.values():
        known = [step.core_busy_s for step in log if step.core_busy_s is not None]
        if known:
            means.append(fmean(known))
    return max(means, default=None)


def _median_of(lengths_s: Sequence[float]) -> float | None:
    return median(lengths_s) if lengths_s else None


def makespan_s(logs: Iterable[Sequence[Step]]) -> float | None:
    """From the first step's begin to the last one's end, over all the logs given."""
    filled = [log for log in logs if log]
    if not filled:
        return None
    return max(log[-1].end_s for log in filled) - min(log[0].begin_s for log in filled)


def _first(steps: Mapping[int, Sequence[Step]]) -> Sequence[Step]:
    return steps[min(steps)] if steps else []


def _lengths_by_kind(spans: Iterable[Span]) -> dict[str, list[float]]:
    lengths: dict[str, list[float]] = defaultdict(list)
    for span in spans:
        lengths[span.kind].append(span.length_s)
    return dict(sorted(lengths.items()))


def _time_by_depth(spans: Iterable[Span], begin_s: float, end_s: float) -> dict[int, float]:
    clipped = [(max(span.begin_s, begin_s), min(span.end_s, end_s)) for span in spans]
    changes = sorted((at_s, change) for b, e in clipped if e > b for at_s, change in ((b, 1), (e, -1)))
    lengths: dict[int, float] = defaultdict(float)
    depth, last_s = 0, begin_s
    for at_s, change in changes:
        lengths[depth] += at_s - last_s
        depth, last_s = depth + change, at_s
    return lengths

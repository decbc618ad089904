"""Reads recorded spans, and computes occupancy and hand-overs. All times are on one clock, in s."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Final

from crossover_ddp._timeline.trace import events

NETWORK_KINDS: Final = frozenset({"exchange", "all_reduce", "reduce_scatter", "all_gather"})


@dataclass(frozen=True)
class TimelineSpan:
    """One activity of one rank of one job, on the clock of all jobs."""

    job: str
    rank: int
    device: str
    kind: str
    begin_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        """The duration of the span."""
        return self.end_s - self.begin_s


def read_spans(path: Path, job: str = "") -> list[TimelineSpan]:
    """Read one rank's recording. Times are on the monotonic clock of its process.

    ``job`` is the name of the job. Default: the name in the recording.
    """
    first, *found = list(events(path)) or [{}]
    rank = first.get("args", {})
    return [
        TimelineSpan(
            job or str(rank["job"]),
            rank["rank"],
            rank["device"],
            event["cat"],
            event["ts"] / 1e6 - rank["wall_s"],
            (event["ts"] + event["dur"]) / 1e6 - rank["wall_s"],
        )
        for event in found
        if event["ph"] == "X"
    ]


@dataclass(frozen=True)
class Statistics:
    """A summary of some durations."""

    count: int
    total_s: float
    median_s: float
    p99_s: float
    max_s: float

    @classmethod
    def of(cls, lengths_s: Iterable[float]) -> "Statistics":
        """Summarize durations. All figures are zero if there are none."""
        ordered = sorted(lengths_s)
        if not ordered:
            return cls(0, 0.0, 0.0, 0.0, 0.0)
        p99 = ordered[math.ceil(0.99 * len(ordered)) - 1]
        return cls(len(ordered), math.fsum(ordered), median(ordered), p99, ordered[-1])


def occupancy(
    spans: Iterable[TimelineSpan], device: str, *, window_s: tuple[float, float] | None = None
) -> dict[str, float]:
    """Return the shares of a device's time in which no job, one job or several jobs computed.

    The shares add up to 1.

    Args:
        spans: spans of any devices.
        device: name of the device.
        window_s: begin and end. Default: the time in which every job there was active, from the
            latest first span to the earliest last one.
    """
    here = [span for span in spans if span.device == device]
    begin_s, end_s = window_s or _all_active(here)
    if not end_s > begin_s:
        return {"idle": 1.0, "one": 0.0, "several": 0.0}
    changes = [(begin_s, "", 0)]
    for span in here:
        if span.kind == "compute" and span.begin_s < end_s and span.end_s > begin_s:
            changes += [
                (max(span.begin_s, begin_s), span.job, 1),
                (min(span.end_s, end_s), span.job, -1),
            ]
    changes.sort()
    active: Counter[str] = Counter()
    lengths_s = [0.0, 0.0, 0.0]
    for (at_s, job, change), (next_s, _, _) in pairwise([*changes, (end_s, "", 0)]):
        active[job] += change
        lengths_s[min(2, sum(count > 0 for count in active.values()))] += next_s - at_s
    idle, one, several = (length_s / (end_s - begin_s) for length_s in lengths_s)
    return {"idle": idle, "one": one, "several": several}


def handovers_s(spans: Iterable[TimelineSpan], job: str) -> list[float]:
    """Return the seconds from a sibling's release to the computation of the job that waited for it.

    Only turns that the job waited for count: the sibling's last computation on the same device
    ended during the job's "wait".
    """
    released_s: dict[str, float] = {}
    found = []
    for span in sorted(spans, key=lambda span: (span.end_s, span.kind)):
        if span.kind == "compute" and span.job != job:
            released_s[span.device] = span.end_s
        elif (
            span.kind == "wait"
            and span.job == job
            and released_s.get(span.device, -math.inf) > span.begin_s
        ):
            found.append(span.end_s - released_s[span.device])
    return found


def extent_s(spans: Iterable[TimelineSpan]) -> tuple[float, float]:
    """Return when the first span began and the last one ended. Both are 0 without spans."""
    found = [(span.begin_s, span.end_s) for span in spans]
    return min((b for b, _ in found), default=0.0), max((e for _, e in found), default=0.0)


def _all_active(spans: Iterable[TimelineSpan]) -> tuple[float, float]:
    by_job: dict[str, list[TimelineSpan]] = defaultdict(list)
    for span in spans:
        by_job[span.job].append(span)
    extents_s = [extent_s(each) for each in by_job.values()]
    return max((b for b, _ in extents_s), default=0.0), min((e for _, e in extents_s), default=0.0)

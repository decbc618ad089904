"""Work out shares of time and hand-overs of devices and jobs from spans. Pure; all times on one clock, in seconds."""

import math
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final, NamedTuple, TypeVar

NETWORK_KINDS: Final = frozenset({"exchange", "reduce_scatter", "all_gather"})

_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True)
class TimelineSpan:
    """One thing that one rank of one job did, on the clock of all jobs."""

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
class Statistics:
    """A summary of some durations."""

    count: int
    total_s: float
    median_s: float
    p99_s: float
    max_s: float

    @classmethod
    def of(cls, lengths_s: Iterable[float]) -> "Statistics":
        """Sum up durations; all zero if there is none."""
        ordered = sorted(lengths_s)
        if not ordered:
            return cls(0, 0.0, 0.0, 0.0, 0.0)
        p99 = ordered[math.ceil(0.99 * len(ordered)) - 1]
        return cls(len(ordered), math.fsum(ordered), median(ordered), p99, ordered[-1])


class Handover(NamedTuple):
    """A turn that went from one job to another that was waiting for it."""

    giver: TimelineSpan
    """The computation that ended."""
    taker: TimelineSpan
    """The wait that this ended."""

    @property
    def gap_s(self) -> float:
        """From the end of the one's computation to the begin of the other's."""
        return self.taker.end_s - self.giver.end_s


@dataclass(frozen=True)
class JobShare:
    """One job on one device. Shares are of the window's time."""

    job: str
    ranks: Sequence[int]
    computed: float
    communicated: float
    waited: float
    turns: int
    handover: Statistics
    """From the end of a sibling's computation to the begin of its own, if it was waiting."""
    rate: float | None = None
    """With a codec: bytes sent over those of an exact exchange."""


@dataclass(frozen=True)
class DeviceShares:
    """One device in one window. Shares are of the window's time; ``idle``, ``one`` and ``several`` add up to 1."""

    device: str
    window_s: tuple[float, float]
    idle: float
    one: float
    several: float
    communicated: float
    turns: int
    handover: Statistics
    jobs: Sequence[JobShare]

    @property
    def busy(self) -> float:
        """Share of the time in which a job computed."""
        return self.one + self.several


def slices(intervals: Iterable[tuple[float, float, _Key]]) -> Iterator[tuple[float, float, tuple[_Key, ...]]]:
    """Cut overlapping intervals into consecutive slices.

    Args:
        intervals: begin, end and owner of each.

    Yields:
        begin, end and the active owners, in no order; slices without an owner are left out.
    """
    changes = [change for b, e, key in intervals if e > b for change in ((b, 1, key), (e, -1, key))]
    active: Counter[_Key] = Counter()
    last_s = -math.inf
    for at_s, change, key in sorted(changes, key=lambda each: each[0]):
        if at_s > last_s and active:
            yield last_s, at_s, tuple(active)
        active[key] += change
        if not active[key]:
            del active[key]
        last_s = at_s


def occupancy(
    spans: Iterable[TimelineSpan], device: str, *, window_s: tuple[float, float] | None = None
) -> dict[str, float]:
    """Return the shares of a device's time in which no job, one job or several jobs computed; they add up to 1.

    Args:
        spans: of any devices.
        device: the device to work on.
        window_s: begin and end; by default the time in which every job there was active, from
            the latest first span to the earliest last one.
    """
    here = [span for span in spans if span.device == device]
    begin_s, end_s = window_s or _all_active(here)
    if not end_s > begin_s:
        return {"idle": 1.0, "one": 0.0, "several": 0.0}
    clipped = (
        (max(span.begin_s, begin_s), min(span.end_s, end_s), span.job)
        for span in here
        if span.kind == "compute"
    )
    lengths_s: dict[bool, float] = {True: 0.0, False: 0.0}
    for slice_begin_s, slice_end_s, jobs in slices(clipped):
        lengths_s[len(jobs) > 1] += slice_end_s - slice_begin_s
    one, several = (lengths_s[many] / (end_s - begin_s) for many in (False, True))
    return {"idle": 1 - one - several, "one": one, "several": several}


def handovers(spans: Iterable[TimelineSpan], job: str | None = None) -> list[Handover]:
    """Find the turns that a job (None: any) took when a sibling gave its own back.

    Only turns that the job really waited for count: those where a sibling's last computation on the
    same device ended while the job's "wait" lasted.
    """
    waits: list[TimelineSpan] = []
    computed: dict[str, list[TimelineSpan]] = defaultdict(list)
    for span in spans:
        if span.kind == "wait" and job in (None, span.job):
            waits.append(span)
        elif span.kind == "compute":
            computed[span.device].append(span)
    for each in computed.values():
        each.sort(key=lambda span: span.end_s)
    ends_s = {device: [span.end_s for span in each] for device, each in computed.items()}
    found = []
    for wait in waits:
        place = bisect_right(ends_s.get(wait.device, []), wait.end_s) - 1
        while place >= 0 and (giver := computed[wait.device][place]).end_s > wait.begin_s:
            if giver.job != wait.job:
                found.append(Handover(giver, wait))
                break
            place -= 1
    return found


def handovers_s(spans: Iterable[TimelineSpan], job: str) -> list[float]:
    """Return the seconds from each release of a sibling for which the job was waiting to the job's own computation."""
    return [each.gap_s for each in handovers(spans, job)]


def device_shares(
    spans: Iterable[TimelineSpan], jobs: Sequence[str], *, window_s: tuple[float, float] | None = None
) -> list[DeviceShares]:
    """Return for every device the shares of time in which each job computed, communicated and waited.

    Args:
        spans: of all jobs and devices.
        jobs: in the order in which they are to be listed.
        window_s: begin and end; by default for each device the time in which all its jobs were active, or
            all its time if they never were at once.
    """
    by_device: dict[str, list[TimelineSpan]] = defaultdict(list)
    for span in spans:
        by_device[span.device].append(span)
    return [_one_device(name, here, jobs, window_s) for name, here in sorted(by_device.items())]


def _one_device(
    device: str, spans: Sequence[TimelineSpan], jobs: Sequence[str], window_s: tuple[float, float] | None
) -> DeviceShares:
    begin_s, end_s = window_s or _all_active(spans)
    if window_s is None and not end_s > begin_s:
        begin_s, end_s = extent_s(spans)
    window = (begin_s, end_s)
    visible = {span.job for span in spans if span.end_s > begin_s and span.begin_s < end_s}
    own = {job: [span for span in spans if span.job == job] for job in jobs if job in visible}
    passed = [each for each in handovers(spans) if begin_s <= each.taker.end_s <= end_s]
    return DeviceShares(
        device=device,
        window_s=window,
        **occupancy(spans, device, window_s=window),
        communicated=_share(spans, NETWORK_KINDS, window),
        turns=sum(_turns(each, window) for each in own.values()),
        handover=Statistics.of(each.gap_s for each in passed),
        jobs=[
            JobShare(
                job=job,
                ranks=sorted({span.rank for span in each}),
                computed=_share(each, {"compute"}, window),
                communicated=_share(each, NETWORK_KINDS, window),
                waited=_share(each, {"wait"}, window),
                turns=_turns(each, window),
                handover=Statistics.of(one.gap_s for one in passed if one.taker.job == job),
                rate=_rate(each, window),
            )
            for job, each in own.items()
        ],
    )


def _rate(spans: Iterable[TimelineSpan], window_s: tuple[float, float]) -> float | None:
    """Return the bytes sent over those of an exact exchange, of the coded halves that ended in the window."""
    begin_s, end_s = window_s
    ended = [span.detail for span in spans if "sent_bytes" in span.detail and begin_s <= span.end_s <= end_s]
    exact = sum(detail["exact_bytes"] for detail in ended)
    return sum(detail["sent_bytes"] for detail in ended) / exact if exact else None


def _share(spans: Iterable[TimelineSpan], kinds: Iterable[str], window_s: tuple[float, float]) -> float:
    """Return the part of the window in which at least one span of these kinds lasted."""
    begin_s, end_s = window_s
    if not end_s > begin_s:
        return 0.0
    wanted = frozenset(kinds)
    clipped = (
        (max(span.begin_s, begin_s), min(span.end_s, end_s), None) for span in spans if span.kind in wanted
    )
    return math.fsum(e - b for b, e, _ in slices(clipped)) / (end_s - begin_s)


def _turns(spans: Iterable[TimelineSpan], window_s: tuple[float, float]) -> int:
    """Count the job's turns that began in the window; its ranks on one device compute in the same ones."""
    begins = Counter(
        span.rank for span in spans if span.kind == "compute" and window_s[0] <= span.begin_s < window_s[1]
    )
    return max(begins.values(), default=0)


def extent_s(spans: Iterable[TimelineSpan]) -> tuple[float, float]:
    """Return when the first span began and the last one ended; both 0 if there is none."""
    found = [(span.begin_s, span.end_s) for span in spans]
    return min((b for b, _ in found), default=0.0), max((e for _, e in found), default=0.0)


def _all_active(spans: Iterable[TimelineSpan]) -> tuple[float, float]:
    by_job: dict[str, list[TimelineSpan]] = defaultdict(list)
    for span in spans:
        by_job[span.job].append(span)
    extents_s = [extent_s(each) for each in by_job.values()]
    return max((b for b, _ in extents_s), default=0.0), min((e for _, e in extents_s), default=0.0)


class NextComputation:
    """Finds the computation that a wait was for."""

    def __init__(self, spans: Iterable[TimelineSpan]) -> None:
        self._computed: dict[tuple[str, int, str], list[TimelineSpan]] = defaultdict(list)
        for span in spans:
            if span.kind == "compute":
                self._computed[span.job, span.rank, span.device].append(span)
        for each in self._computed.values():
            each.sort(key=lambda span: span.begin_s)

    def after(self, wait: TimelineSpan) -> TimelineSpan | None:
        """Return the rank's first computation since the end of ``wait``."""
        own = self._computed.get((wait.job, wait.rank, wait.device), [])
        place = bisect_left(own, wait.end_s, key=lambda span: span.begin_s)
        return own[place] if place < len(own) else None

"""Which job computes, which one queues, with which shares and rates; from looks at shared memory. Pure.

[Note: what counters show]
A slot says which turn was started and which was given back; the lead device's log says which slot drew which turn. So
the holder is the job that has started a turn which it has not given back, and a job that has drawn a turn which it has
not started queues (it draws early, so its exchange may still be under way). Rates and shares are counts of draws
between two looks. The length of turns is not published: frequent looks estimate the share of time in which a
device was held.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from crossover_ddp._turns.view import Liveness, Look, Place, Segment

COMPUTES, QUEUES, BETWEEN = "computes", "queues", "between turns"
GONE, DEAF = Liveness.GONE.value, Liveness.DEAF.value
_SIBLINGS = 2
_FEW_LOOKS = 5


@dataclass(frozen=True)
class JobReport:
    """One job on one device."""

    job: str
    state: str
    ranks: tuple[int, ...]
    """Its ranks on this device."""
    world_size: int
    pids: tuple[int, ...]
    """As the job's own container numbers them; other containers use other numbers."""
    turn: int
    """The last turn started here; 0 before the first."""
    drawn: int | None
    """The last turn drawn; None if this machine does not know it."""
    lease_s: float | None
    turns_per_s: float | None
    share: float | None
    """Part of the device's turns in the interval."""


@dataclass(frozen=True)
class DeviceReport:
    """One device of one group."""

    device: str
    path: str
    jobs: tuple[JobReport, ...]
    turns_per_s: float | None
    handover_age_s: float | None
    """Seconds since a turn was last given back."""
    idle_share: float | None
    """Part of the looks at which no job was inside a turn."""
    not_known: tuple[str, ...]


@dataclass(frozen=True)
class GroupReport:
    """The jobs that name one group."""

    group: str
    devices: tuple[DeviceReport, ...]


@dataclass(frozen=True)
class Report:
    """All groups of this user, between two looks."""

    directory: str
    interval_s: float
    groups: tuple[GroupReport, ...]
    problems: tuple[dict[str, Any], ...]


def report(looks: Sequence[Look]) -> Report:
    """Return what happened between the first look and the last one.

    Args:
        looks: at least one, in order; the first and the last with the log. Rates need two, idle shares several.
    """
    last = looks[-1]
    groups = sorted({segment.group for segment in last.segments})
    interval_s = (last.at_ns - looks[0].at_ns) / 1e9
    return Report(
        directory=last.directory,
        interval_s=interval_s,
        groups=tuple([GroupReport(group, _devices(group, looks, interval_s)) for group in groups]),
        problems=tuple([{"path": problem.path, "what": problem.what} for problem in last.problems]),
    )


def _devices(group: str, looks: Sequence[Look], interval_s: float) -> tuple[DeviceReport, ...]:
    segments = [segment for segment in looks[-1].segments if segment.group == group]
    drawn, counts = _last_draws(segments), draws(looks[0].segments, segments)
    return tuple(
        [
            _device(segment, drawn, counts if interval_s > 0 else None, interval_s, looks)
            for segment in segments
        ]
    )


def _last_draws(segments: Sequence[Segment]) -> dict[int, int]:
    """Return the last turn that each job has drawn, as far as the logs of this machine's devices show it."""
    drawn: dict[int, int] = {}
    for segment in segments:
        for place in segment.places:
            last = segment.log.last_turn(place.slot) if segment.log else 0
            if last > place.joined_at:
                drawn[place.job] = max(last, drawn.get(place.job, 0))
    return drawn


def draws(before: Sequence[Segment], after: Sequence[Segment]) -> Counter[int] | None:
    """Return how many turns each job drew between two looks; None if a log was made anew or cut."""
    numel = {segment.path: segment.log.numel for segment in before if segment.log}
    counts: Counter[int] = Counter()
    for segment in after:
        if segment.log is None:
            continue
        records = segment.log.drawn_since(numel.get(segment.path, 0))
        if records is None:
            return None
        jobs = {place.slot: place.job for place in segment.places}
        for slot, count in Counter(records).items():
            if slot in jobs:
                counts[jobs[slot]] += count
    return counts


def _holds(place: Place) -> bool:
    return place.liveness is not Liveness.GONE and place.started > place.returned


def _device(
    segment: Segment,
    drawn: dict[int, int],
    counts: Counter[int] | None,
    interval_s: float,
    looks: Sequence[Look],
) -> DeviceReport:
    living = {place.job for place in segment.places if place.liveness is not Liveness.GONE}
    known = counts is not None and bool(living) and all(job in drawn for job in living)
    total = sum(counts[job] for job in living) if counts is not None and known else 0
    jobs = []
    for job in sorted({place.job for place in segment.places}):
        count = counts[job] if counts is not None and job in drawn else None
        rate = count / interval_s if count is not None else None
        share = count / total if count is not None and total and job in living else None
        jobs.append(_job(job, segment, drawn.get(job), rate, share))
    idle, not_known = _idle(segment, living, looks)
    if any(job not in drawn for job in living):
        not_known += (
            "turns drawn by a job that has drawn none yet, or whose lead device is on another machine",
        )
    return DeviceReport(
        device=segment.device,
        path=segment.path,
        jobs=tuple(jobs),
        turns_per_s=total / interval_s if known else None,
        handover_age_s=_handover_age(segment, looks[-1].at_ns),
        idle_share=idle,
        not_known=not_known,
    )


def _job(job: int, segment: Segment, drawn: int | None, rate: float | None, share: float | None) -> JobReport:
    here = [place for place in segment.places if place.job == job]
    living = [place for place in here if place.liveness is not Liveness.GONE] or here
    leases = [place.lease_s for place in living if place.lease_s is not None]
    return JobReport(
        job=f"{job:x}",
        state=_state(living, drawn),
        ranks=tuple(sorted(place.rank for place in living)),
        world_size=max(place.world_size for place in living),
        pids=tuple([place.pid for place in sorted(living, key=lambda place: place.rank)]),
        turn=max(place.started for place in living),
        drawn=drawn,
        lease_s=max(leases, default=None),
        turns_per_s=rate,
        share=share,
    )


def _state(places: Sequence[Place], drawn: int | None) -> str:
    if all(place.liveness is Liveness.GONE for place in places):
        return GONE
    if any(place.liveness is Liveness.DEAF for place in places):
        return DEAF
    if any(_holds(place) for place in places):
        return COMPUTES
    return QUEUES if drawn is not None and drawn > min(place.started for place in places) else BETWEEN


def _handover_age(segment: Segment, at_ns: int) -> float | None:
    given = [
        place.returned_at_ns for place in segment.places if place.returned and place.returned_at_ns <= at_ns
    ]
    return (at_ns - max(given)) / 1e9 if given else None


def _idle(segment: Segment, living: set[int], looks: Sequence[Look]) -> tuple[float | None, tuple[str, ...]]:
    """Return the share of looks without a holder, and what is not known about it."""
    if len(living) < _SIBLINGS:
        # It begins its turns before it knows their numbers, and publishes a turn only at its end.
        return None, ("idle share: a job alone does not publish when it computes",)
    seen = [found for look in looks for found in look.segments if found.path == segment.path]
    if len(seen) < _FEW_LOOKS:
        return None, ("idle share: needs more looks",)
    idle = sum(not any(_holds(place) for place in found.places) for found in seen) / len(seen)
    on_device = segment.device.startswith("GPU-")
    return idle, (
        "idle share is as the host sees it: kernels may run on after a turn was given back",
    ) * on_device

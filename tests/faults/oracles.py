"""Judges the records of a schedule, whatever its faults were: pure functions of these records.

A *claim* is one rank's turn on its device, with the times at which it was wanted, begun and ended.
These promises are checked:

- For every two claims of siblings on a device, the later turn begins after the earlier one has
  ended, or its rank has died, left or given up, or the later rank has lost patience with its job
  and that has not moved since. It begins soon after that.
- A rank that loses patience has waited for a lease that the job had published. It does not wait for
  a second one while no rank of that job has moved.
- All ranks of a job have the same turns.
"""

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from crossover_ddp._turns.rules import DEFAULT_LEASE_S
from tests.faults.schedules import LATE_S, JobPlan, Schedule

FOREVER = float("inf")
EARLY_S = 2e-3  # records of one moment are written one after the other
PUBLISHED_S = LATE_S + 0.02  # from the record of a turn's end until a late device has published it
CLOSED = "closed"

Key = tuple[int, int]


class Claim(NamedTuple):
    turn: int
    wanted_s: float
    begins_s: float
    ends_s: float  # `FOREVER` if the rank never gave it back
    log: int  # the inode of the log of turns, on lead ranks; else 0
    ahead: bool  # whether it began without its number
    # From when it may have been given back, by a rank that was killed before it recorded the end.
    ending_s: float = FOREVER
    done_s: float = 0.0  # when a device that is behind its host had finished it


class Forgiven(NamedTuple):
    at_s: float
    job: int  # its number in shared memory
    turn: int
    since_s: float
    lease_s: float  # as the waiting rank has read it


@dataclass
class Rank:
    """The records of one rank after the schedule."""

    job: JobPlan
    rank: int
    claims: list[Claim] = field(default_factory=list)
    forgave: list[Forgiven] = field(default_factory=list)
    # (time, seconds): the leases that it has published.
    leases: list[tuple[float, float]] = field(default_factory=list)
    stops: list[tuple[float, float]] = field(default_factory=list)
    jumps: list[float] = field(default_factory=list)  # when its clock jumped
    last_log: int = 0  # the inode of its log of turns when it left
    is_lead: bool = False
    job_number: int = -1  # in shared memory; -1 if it has not joined
    refused: Sequence[str] = ()
    broken: str | None = None
    reason: str | None = None  # why it has left
    leaving_s: float = FOREVER
    left_s: float = FOREVER
    killed_s: float = FOREVER
    ended: bool = False
    error: str = ""

    def __str__(self) -> str:
        return f"job {self.job.number} rank {self.rank}"

    @property
    def device(self) -> int:
        return self.job.devices[self.rank]

    @property
    def gone_from_s(self) -> float:
        """The earliest time at which siblings may have found the rank gone."""
        return min(self.killed_s, self.leaving_s)

    @property
    def gone_by_s(self) -> float:
        """The time by which siblings must have found the rank gone."""
        return min(self.killed_s, self.left_s)


def read_rank(job: JobPlan, rank: int, lines: Iterable[Sequence[Any]]) -> Rank:
    """Return a rank from the lines of its record."""
    records = defaultdict[str, list[Any]](list)
    claims: list[Claim] = []
    for kind, at_s, *what in lines:
        records[kind].append((at_s, *what))
        if kind == "begin":
            turn, wanted_s, log = what
            claims.append(Claim(turn, wanted_s, at_s, FOREVER, log, ahead=turn == 0))
        elif kind == "ending":
            claims[-1] = claims[-1]._replace(ending_s=at_s)
        elif kind == "end":
            claims[-1] = claims[-1]._replace(ends_s=at_s, turn=what[0], done_s=what[1])

    def first(kind: str, *otherwise: Any) -> Any:
        return next(iter(records[kind]), otherwise)

    found = Rank(
        job, rank, claims, [Forgiven(*each) for each in records["forgave"]], records["lease"]
    )
    _, found.is_lead, found.job_number = first("joined", FOREVER, False, -1)
    found.leaving_s, found.reason = first("leaving", FOREVER, None)
    found.left_s, _ = first("left", FOREVER, None)
    _, *found.refused = first("refused", FOREVER)
    _, found.broken = first("broken", FOREVER, None)
    found.killed_s, _ = first("die", FOREVER, None)
    found.stops = [(at_s, at_s + lasts_s) for at_s, lasts_s in records["halt"]]
    found.jumps = [at_s for (at_s,) in records["suspend"]]
    found.ended = bool(records["done"])
    _, found.last_log = first("log", FOREVER, 0)
    return found


class Leftovers(NamedTuple):
    """Paths in shared memory."""

    at_end: Sequence[str] = ()
    by_next: Sequence[str] = ()  # those still there after a next job has joined and left
    refusals: Sequence[str] = ()  # the errors of that job


class Story(NamedTuple):
    """All records after a schedule."""

    schedule: Schedule
    ranks: Mapping[Key, Rank]
    meddled_s: Mapping[int, Sequence[float]]  # for each group: when its files were meddled with
    leftovers: Leftovers
    tolerance_s: float

    def of_job(self, job: int) -> list[Rank]:
        return [rank for (number, _), rank in self.ranks.items() if number == job]

    def beside(self, rank: Rank) -> list[Rank]:
        """Return the ranks on the same device, the rank itself included."""
        place = rank.job.group, rank.device
        return [other for other in self.ranks.values() if (other.job.group, other.device) == place]


def violations(story: Story) -> list[str]:
    """Return every promise that was broken, in words."""
    checks = (_ends, _job_order, _patience, _turn_order, _left)
    return [violation for check in checks for violation in check(story)]


def _left(story: Story) -> Iterator[str]:
    """No file is left in shared memory, but files that were refused by name, which may be foreign.

    If the last ranks of a group are killed, the group's next job removes their files.
    """
    refusals = [
        *story.leftovers.refusals,
        *(r.refused[1] for r in story.ranks.values() if r.refused),
    ]
    for path in sorted({*story.leftovers.at_end, *story.leftovers.by_next}):
        name = re.fullmatch(r"(.*-(\d+)@)\..*", path)
        assert name is not None
        if path not in story.leftovers.by_next and _killed_last(story, int(name[2])):
            continue
        if not any(f"{name[1]}.turns" in refusal for refusal in refusals):
            yield f"left behind in shared memory: {path}"


def _killed_last(story: Story, group: int) -> bool:
    ranks = [rank for rank in story.ranks.values() if rank.job.group == group]
    killed_s = [rank.killed_s for rank in ranks if rank.killed_s < FOREVER]
    left_s = [rank.leaving_s for rank in ranks if rank.leaving_s < FOREVER]
    # The kernel frees a killed process's memory before it drops its locks, which takes a while.
    return max(killed_s, default=0.0) > max(left_s, default=0.0) - story.tolerance_s


def _ends(story: Story) -> Iterator[str]:
    for rank in story.ranks.values():
        if rank.killed_s < FOREVER:
            continue
        meddled = bool(story.meddled_s.get(rank.job.group))
        lost_a_rank = any(each.killed_s < FOREVER for each in story.of_job(rank.job.number))
        if not rank.ended:
            yield f"{rank} did not end by itself: {rank.error[-1500:]}"
        if rank.broken and not lost_a_rank:
            yield f"{rank} lost its job: {rank.broken}"
        if rank.reason not in (None, CLOSED) and not meddled and not lost_a_rank:
            yield f"{rank} gave up turns: {rank.reason}"
        if rank.refused and not (meddled or lost_a_rank):
            yield f"{rank} was refused: {': '.join(rank.refused)}"


def _job_order(story: Story) -> Iterator[str]:
    """All ranks of a job have the same turns, each later than the one before."""
    for job in story.schedule.jobs:
        ranks = [rank for rank in story.of_job(job.number) if rank.claims]
        # 0 stands for a turn that began alone, without its number.
        turns = [[claim.turn for claim in rank.claims] for rank in ranks]
        for own in turns:
            if any(later <= earlier for earlier, later in itertools.pairwise(filter(None, own))):
                yield f"job {job.number} had turns out of order: {own}"
        if story.meddled_s.get(job.group):
            continue
        for own, other in itertools.pairwise(turns):
            if any(
                mine != theirs and mine and theirs for mine, theirs in zip(own, other, strict=False)
            ):
                yield f"ranks of job {job.number} had different turns: {own} and {other}"


def _overlap_s(intervals: Iterable[tuple[float, float]], start_s: float, stop_s: float) -> float:
    return sum(max(0.0, min(stop_s, end) - max(start_s, begin)) for begin, end in intervals)


def _patience(story: Story) -> Iterator[str]:
    """No rank waits twice for a job of which no rank on the device has moved.

    It does not matter how many slots or turns the job has.
    """
    margin_s = story.tolerance_s
    for rank in story.ranks.values():
        last: dict[int, Forgiven] = {}
        for lost in rank.forgave:
            before, last[lost.job] = last.get(lost.job), lost
            owners = [each for each in story.beside(rank) if each.job_number == lost.job]
            if _meddled_around(story, rank.job.group, lost.at_s) or not owners:
                continue
            where = f"{rank} lost patience with turn {lost.turn} of job {owners[0].job.number}"
            yield from _one_patience(story, rank, lost, owners, where)
            since_s, until_s = before.at_s - margin_s if before else 0.0, lost.at_s + margin_s
            if before is not None and not any(_moved(owner, since_s, until_s) for owner in owners):
                yield f"{where} as at turn {before.turn}, although none of its ranks had moved"


def _one_patience(
    story: Story, rank: Rank, lost: Forgiven, owners: list[Rank], where: str
) -> Iterator[str]:
    waited_s = lost.at_s - lost.since_s
    jumped = any(lost.since_s - EARLY_S <= at_s <= lost.at_s + EARLY_S for at_s in rank.jumps)
    published = {lease_s for owner in owners for at_s, lease_s in owner.leases if at_s <= lost.at_s}
    if lost.lease_s not in published:
        yield f"{where} after a lease of {lost.lease_s} s: published were {sorted(published)}"
    if waited_s < lost.lease_s - EARLY_S and not jumped:
        yield f"{where} after {waited_s:.3f} s of a lease of {lost.lease_s} s"
    own_stops_s = _overlap_s(rank.stops, lost.since_s, lost.at_s)
    if waited_s - own_stops_s > lost.lease_s + story.tolerance_s:
        yield f"{where} only after {waited_s:.3f} s: the lease is {lost.lease_s} s"


def _moved(rank: Rank, since_s: float, until_s: float) -> bool:
    """Whether a rank has started a turn, or given one back."""
    return any(
        since_s < at_s <= until_s
        for claim in rank.claims
        for at_s in (claim.begins_s, claim.ends_s)
    )


def _published_by(rank: Rank, claim: Claim) -> float:
    """Return by when a turn's end was surely published; the rank recorded it just before."""
    stops = [
        stop
        for stop in rank.stops
        if stop[0] <= claim.ends_s + PUBLISHED_S and stop[1] > claim.ends_s
    ]
    return max([claim.ends_s, *(end_s for _, end_s in stops)])


def _meddled_around(story: Story, group: int, at_s: float) -> bool:
    """Return whether files were damaged, and ranks may not have noticed it yet."""
    leases_s = [lease_s for rank in story.ranks.values() for _, lease_s in rank.leases]
    window_s = max([DEFAULT_LEASE_S, *leases_s]) + story.tolerance_s
    return any(each - EARLY_S <= at_s <= each + window_s for each in story.meddled_s.get(group, ()))


def _on_devices(story: Story) -> Iterable[list[tuple[Claim, Rank]]]:
    """Return the claims of siblings in one order: those of a group, device and log.

    A log that was cut short begins a new order.
    """
    # The log that each (job, turn) was drawn from. A turn that began alone had no number then.
    logs = {
        (rank.job.number, claim.turn): claim.log or rank.last_log
        for rank in story.ranks.values()
        for claim in rank.claims
        if claim.log or rank.last_log
    }
    found: dict[tuple[int, ...], list[tuple[Claim, Rank]]] = defaultdict(list)
    for rank in story.ranks.values():
        for claim in rank.claims:
            if claim.turn and (log := logs.get((rank.job.number, claim.turn))):
                meddled = sum(
                    at_s <= claim.begins_s for at_s in story.meddled_s.get(rank.job.group, ())
                )
                found[rank.job.group, rank.device, log, meddled].append((claim, rank))
    for claims in found.values():
        claims.sort(key=lambda each: each[0].turn)
    return found.values()


def _turn_order(story: Story) -> Iterator[str]:
    """A turn begins soon after each earlier one has ended, on the device as well."""
    for claims in _on_devices(story):
        open_before: list[tuple[Claim, Rank]] = []
        for claim, rank in claims:
            which = f"turn {claim.turn} of {rank} on device {rank.device}"
            freed_s = _freed_otherwise_s(story, claim, rank)
            for before, other in open_before:
                if other.job.number == rank.job.number:
                    continue
                end_s = min(before.ends_s, before.ending_s, other.gone_from_s)
                forgiven_s = _forgiven_at(rank, other, before.turn, claim.begins_s)
                excused = _excused(story, claim, rank, other)
                if min(end_s, forgiven_s) > claim.begins_s and not excused:
                    yield (
                        f"two holders: {which} began at {claim.begins_s:.4f}; {other} held turn "
                        f"{before.turn} from {before.begins_s:.4f} to {before.ends_s:.4f}"
                    )
                early_s = before.done_s - claim.begins_s
                if early_s > 1e-9 and forgiven_s == FOREVER and not excused:
                    yield (
                        f"{which} began {early_s:.4f} s before the device had finished turn "
                        f"{before.turn} of job {other.job.number}"
                    )
                freed_s = max(
                    freed_s, min(_published_by(other, before), other.gone_by_s, forgiven_s)
                )
            late_s = _lateness_s(story, claim, rank, min(freed_s, claim.begins_s))
            if late_s > story.tolerance_s:
                yield f"{which} began {late_s:.3f} s after it could, at {claim.begins_s:.4f}"
            open_before = [
                (b, o)
                for b, o in open_before
                if max(_published_by(o, b), b.done_s) >= claim.wanted_s
            ]
            open_before.append((claim, rank))


def _freed_otherwise_s(story: Story, claim: Claim, rank: Rank) -> float:
    """Return when the last rank ended, or was passed over, whose turn is not in this order.

    Such turns were drawn and never begun, or were held while files were damaged.
    """
    begins_s, beside = claim.begins_s, story.beside(rank)
    meddled_s = [at_s for at_s in story.meddled_s.get(rank.job.group, ()) if at_s < begins_s]
    gone = [min(other.gone_by_s, begins_s) for other in beside if other.gone_from_s <= begins_s]
    forgiven = [lost.at_s for lost in rank.forgave if lost.at_s <= begins_s]
    across = [
        min(
            _published_by(other, before),
            other.gone_by_s,
            _forgiven_at(rank, other, before.turn, begins_s),
        )
        for other in beside
        if other.job is not rank.job
        for before in other.claims
        if any(before.begins_s < at_s for at_s in meddled_s)
    ]
    return max([0.0, *gone, *forgiven, *across])


def _forgiven_at(rank: Rank, other: Rank, turn: int, begins_s: float) -> float:
    """Return when ``rank``, which begins a turn, lost patience with ``turn`` of ``other``.

    `FOREVER` if it did not.
    """
    return min(
        (
            lost.at_s
            for lost in rank.forgave
            if lost.job == other.job_number
            and (lost.turn >= turn or not _moved(other, lost.at_s + EARLY_S, begins_s))
        ),
        default=FOREVER,
    )


def _excused(story: Story, claim: Claim, rank: Rank, other: Rank) -> bool:
    """Return whether these turns may overlap: see "What can go wrong" in docs/turns.md."""
    jobs_broken = any(each.gone_from_s <= claim.begins_s for each in story.of_job(other.job.number))
    return claim.ahead or jobs_broken or _meddled_around(story, rank.job.group, claim.begins_s)


def _lateness_s(story: Story, claim: Claim, rank: Rank, freed_s: float) -> float:
    """Return how long a turn began after it could have begun; 0 where no rank is to blame."""
    if claim.ahead or _meddled_around(story, rank.job.group, claim.begins_s):
        return 0.0
    leads = [each for each in story.of_job(rank.job.number) if each.is_lead and each is not rank]
    asked = [c.wanted_s for each in leads for c in each.claims if c.turn == claim.turn]
    ready_s = max([claim.wanted_s, freed_s, *asked])
    stopped_s = sum(
        _overlap_s(each.stops, ready_s, claim.begins_s) for each in story.of_job(rank.job.number)
    )
    return claim.begins_s - ready_s - stopped_s


def longest_wait_s(story: Story) -> float:
    """Return the longest time from wanting a turn to its begin, less the rank's own stops."""
    return max(
        (
            claim.begins_s - claim.wanted_s - _overlap_s(rank.stops, claim.wanted_s, claim.begins_s)
            for rank in story.ranks.values()
            for claim in rank.claims
        ),
        default=0.0,
    )

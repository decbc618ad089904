"""Turns as pure decisions: who may compute now, whom one waits for, and for how long.

[Note: turn order]
All devices that a set of jobs share see one and the same sequence of turns, and a turn belongs to a
job, not to a process. The smallest device name of a job is its *lead* device, the same for all jobs that
share the devices. Only the job's rank there draws a turn number, by appending one record to the lead
device's log: the position of the record *is* the number, so the kernel's append is the only arbiter.
The number travels to the job's other ranks together with the last turn of every other live job before
it (a `Grant`). A rank may start turn n when, on its own device, every live slot of the other jobs has given
back the turns named in the grant.

Why nothing can deadlock: a rank in turn n waits only for turns below n, each of which waits only
for turns below itself, and a turn is never held while waiting for another one. Whatever collective a
rank enters inside its turn depends on its own job's ranks alone, and those wait for turns below n alone.
Deaths remove slots from the wait; a stopped job costs its siblings one lease. `tests/unit/
test_turn_model.py` explores every interleaving of two and three jobs on two devices with these functions.

[Note: one lease a job] A rank that has waited for a lease passes the job over, whatever slots the job has on the
device, up to that turn. It passes the job's later turns over as well, slot by slot, while a slot shows the
same last turns started and given back: its owner has begun no later turn, or the slot would show that. An owner that
goes on is waited for again. To pass over a slot removes a wait and adds none, so it cannot make a deadlock.

No clock, no I/O here: bytes of the log, views of slots and the time now are arguments. Our design.
"""

import heapq
import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

DEFAULT_LEASE_S = 5.0
LONGEST_LEASE_S = 60.0
_LEASE_TURNS = 4.0
_RECENT_TURNS = 16


class Grant(NamedTuple):
    """One turn of a job, as its lead rank tells it to the job's other ranks."""

    turn: int
    shared: bool
    """Whether a sibling was present when the turn was drawn."""
    after: tuple[tuple[int, int], ...]
    """(job, turn): what every other live job must have given back on a device before this turn starts."""


class Member(NamedTuple):
    """What a rank sees of one slot on its own device."""

    slot: int
    job: int
    incarnation: int
    joined_at: int
    started: int
    """The number of the last turn that this slot has started; 0 before the first."""
    returned: int
    """The number of the last turn that this slot has given back; 0 before the first."""
    lease_s: float


class Blocker(NamedTuple):
    """A member that has not yet given back the turn that must come first."""

    member: Member
    turn: int


class TurnLog:
    """The lead device's log, read step by step: record k (from 1) names the slot that drew turn k."""

    def __init__(self) -> None:
        self._last_turn: dict[int, int] = {}
        self._read_numel = 0

    @property
    def read_numel(self) -> int:
        """How many records have been read."""
        return self._read_numel

    def read(self, records: bytes) -> None:
        """Take in the records that follow those read so far."""
        for offset, slot in enumerate(records, start=self._read_numel + 1):
            self._last_turn[slot] = offset
        self._read_numel += len(records)

    def grant(self, turn: int, own_job: int, members: Iterable[Member]) -> Grant:
        """Return the grant of ``turn``, whose predecessors have all been read.

        Records older than a slot's present owner belong to an earlier one and say nothing.
        """
        others = [member for member in members if member.job != own_job]
        after: dict[int, int] = {}
        for member in others:
            last = self._last_turn.get(member.slot, 0)
            if last > member.joined_at:
                after[member.job] = max(last, after.get(member.job, 0))
        return Grant(turn, bool(others), tuple(sorted(after.items())))


def blockers(grant: Grant, own_job: int, members: Iterable[Member]) -> list[Blocker]:
    """Return whom ``grant`` still waits for on this device, the lowest turn first."""
    needed = dict(grant.after)
    waiting = [
        Blocker(member, needed[member.job])
        for member in members
        if member.job != own_job and member.returned < needed.get(member.job, 0)
    ]
    return sorted(waiting, key=lambda blocker: blocker.turn)


class Lost(NamedTuple):
    """A turn that a rank has ceased to wait for."""

    job: int
    turn: int
    waited_s: float
    lease_s: float
    at_limit: bool
    """Whether the rank's own limit ended the wait, before the job's lease was over."""

    def words(self, device: str) -> str:
        """Say what happened on ``device``."""
        if self.at_limit:
            return (
                f"a sibling on {device} kept its turn for {self.waited_s:.1f} s, which is less than its lease of "
                f"{self.lease_s:.1f} s, but siblings may cost this job a quarter of its process group's timeout at most"
            )
        return f"a sibling on {device} kept its turn for longer than its lease of {self.lease_s:.1f} s"


class Forgiven(NamedTuple):
    """What a rank remembers of a job that it has ceased to wait for; see [Note: one lease a job]."""

    job: int
    turn: int
    """This turn of the job is not waited for again, nor an earlier one."""
    seen: frozenset[tuple[int, int, int, int]]
    """(slot, incarnation, started, returned) of the job's members then: later turns of these are not waited for."""

    def covers(self, blocker: Blocker) -> bool:
        """Tell whether ``blocker`` is passed over."""
        return blocker.turn <= self.turn or _progress(blocker.member) in self.seen


def _progress(member: Member) -> tuple[int, int, int, int]:
    return member.slot, member.incarnation, member.started, member.returned


class Patience:
    """How long a rank waits for a job that neither gives back nor dies: one lease; see [Note: one lease a job].

    The lease of a job's turn runs from the moment when the waiting rank sees it at the front, on the waiting
    rank's own clock; no clock is shared. Of several leases of a job's members on the device the longest counts.

    Args:
        limit_s: the longest time of one wait, whatever leases the siblings have published.
        forgiven: from `forgiven` of another `Patience`, to go on where it ended.
    """

    def __init__(self, limit_s: float = math.inf, forgiven: Iterable[Forgiven] = ()) -> None:
        self.limit_s = limit_s
        self._forgiven = {each.job: each for each in forgiven}
        self._front: tuple[int, int] | None = None
        self._front_since_s = 0.0
        self._since_s: float | None = None
        self.lost: list[Lost] = []
        """What the present wait has ceased to wait for."""
        self.expired_count = 0
        """How often this rank has ceased to wait for a job."""

    @property
    def forgiven(self) -> frozenset[Forgiven]:
        """What is remembered of jobs that are not waited for."""
        return frozenset(self._forgiven.values())

    def remaining(self, waiting: Sequence[Blocker], members: Sequence[Member], now_s: float) -> float | None:
        """Return the seconds left before the job at the front is passed over; None when nobody is waited for.

        Args:
            waiting: from `blockers`, the lowest turn first.
            members: all that are on the device at the same moment.
            now_s: the waiting rank's monotonic clock.
        """
        if self._since_s is None:
            self._since_s = now_s
        for first in waiting:
            job, turn = first.member.job, first.turn
            leases_s = [each.member.lease_s for each in waiting if self._waits_for(job, each)]
            if not leases_s:
                continue
            if self._front != (job, turn):
                self._front, self._front_since_s = (job, turn), now_s
            lease_ends_s, limit_ends_s = self._front_since_s + max(leases_s), self._since_s + self.limit_s
            left_s = min(lease_ends_s, limit_ends_s) - now_s
            if left_s > 0:
                return left_s
            waited_s = now_s - self._front_since_s
            self._lose(Lost(job, turn, waited_s, max(leases_s), now_s < lease_ends_s), members)
        return None

    def _waits_for(self, job: int, blocker: Blocker) -> bool:
        known = self._forgiven.get(job)
        return blocker.member.job == job and not (known and known.covers(blocker))

    def _lose(self, lost: Lost, members: Sequence[Member]) -> None:
        self.forgive(lost.job, lost.turn, members)
        self.lost.append(lost)
        self.expired_count += 1

    def forgive(self, job: int, turn: int, members: Sequence[Member]) -> None:
        """Pass ``job`` over from now on up to ``turn``, and beyond for as long as its members do not go on."""
        present = {member.job for member in members}
        self._forgiven = {known: each for known, each in self._forgiven.items() if known in present}
        seen = frozenset(_progress(member) for member in members if member.job == job)
        self._forgiven[job] = Forgiven(job, turn, seen)

    def started(self) -> None:
        """End the present wait; the next one has a front, a limit and losses of its own."""
        self._front = self._since_s = None
        self.lost = []


class Lease:
    """How long siblings are asked to wait for a turn of the own job that does not end.

    What was given; else four of the longest of the 16 recent turns, but 5 s at least and 60 s at most. The very
    longest of them does not count: one evaluation inside a turn, or one turn in which a rank of the job waited for a
    stopped sibling while the others waited for that rank, says nothing of the turns to come. So a stop that costs the
    job one lease cannot make the job's own lease longer, and from there its siblings' ones.

    Args:
        given_s: what the user has chosen, None to follow the job's turns.
    """

    def __init__(self, given_s: float | None = None) -> None:
        self._given = given_s is not None
        self.seconds = DEFAULT_LEASE_S if given_s is None else given_s
        self._recent_s: deque[float] = deque(maxlen=_RECENT_TURNS)

    def matters(self, turn_s: float) -> bool:
        """Tell whether a turn of ``turn_s`` seconds can make the lease longer than the default."""
        return not self._given and _LEASE_TURNS * turn_s > DEFAULT_LEASE_S

    def note(self, turn_s: float) -> bool:
        """Take in how long a turn was, without waits that are not the job's own; tell whether the lease has changed."""
        self._recent_s.append(turn_s)
        before_s = self.seconds
        if not self._given:
            typical_s = [0.0, *heapq.nlargest(2, self._recent_s)[1:]][-1]
            self.seconds = min(max(_LEASE_TURNS * typical_s, DEFAULT_LEASE_S), LONGEST_LEASE_S)
        return self.seconds != before_s


def encode(grant: Grant) -> list[int]:
    """Return ``grant`` as integers, the form in which it travels between ranks."""
    return [grant.turn, int(grant.shared), *(number for pair in grant.after for number in pair)]


def decode(message: Sequence[int]) -> Grant:
    """Return the grant that `encode` wrote."""
    turn, shared, *pairs = message
    return Grant(turn, bool(shared), tuple([*zip(pairs[::2], pairs[1::2], strict=True)]))

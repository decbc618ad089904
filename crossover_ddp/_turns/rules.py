"""Turns as pure decisions: which job may compute now, which siblings a rank waits for, and for how long.

[Note: turn order]
All devices that a set of jobs share see one and the same sequence of turns, and a turn belongs to a
job, not to a process. The machine with the smallest number of a job's machines is its *lead* machine, the same for all
jobs on the machines, whatever devices they use. Only the job's *lead rank*, its first one there, draws a turn number,
by appending one record to the machine's log: the position of the record *is* the number, so the kernel's append is the
only arbiter.
The number travels to the job's other ranks together with the last turn of every other live job before
it (a `Grant`). A rank may start turn n when, on its own device, every live slot of the other jobs has given
back the turns named in the grant.

Why nothing can deadlock: a rank that waits for turn n waits only for turns below n, each of which waits only
for turns below itself, and no rank holds a turn while it waits for another one. A collective that a
rank enters inside its turn depends on its own job's ranks alone, and those wait only for turns below n.
Deaths remove slots from the wait; a stopped job costs its siblings one lease. `tests/unit/
test_turn_model.py` explores every interleaving of two and three jobs on two or three devices with these functions.

[Note: one lease a job] A rank that has waited for a whole lease passes the job over, slot by slot, as long as a slot
shows the same last turns started and given back: its owner has begun no later turn, or the slot would show that. When
an owner goes on, the rank waits for it again. Passing over a slot removes a wait and adds none, so it cannot make a
deadlock.

[Note: alone on a device] A rank that sees no sibling on its device need not know its turn's number to begin: nobody is
there to be waited for. It begins at once, and publishes the number when that is known; siblings that have joined
meanwhile wait for it. One that joins at this very moment may compute beside the turn.

No clock and no I/O here: the bytes of the log, what slots show, and the time are arguments. Our design.
"""

import heapq
import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .trial import Mode, Trial, Word

DEFAULT_LEASE_S = 5.0
LONGEST_LEASE_S = 60.0
_LEASE_TURNS = 4.0
_RECENT_TURNS = 16
_OUTLIERS = 3


class Grant(NamedTuple):
    """One turn of a job, as its lead rank sends it to the job's other ranks."""

    turn: int
    after: tuple[tuple[int, int], ...]
    """(job, turn): the turns that the other live jobs must have given back on a device before this turn starts."""
    mode: Mode = Mode.UNTRIED
    """A turn that does not wait has nothing in ``after``."""


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
    """The lead machine's log, read step by step: record k (from 1) names the slot that drew turn k, or is a word.

    Args:
        trial: takes in the records, too.
    """

    def __init__(self, trial: Trial | None = None) -> None:
        self._trial = trial
        self._last_turn: dict[int, int] = {}
        self._read_numel = 0
        self._word = 0  # whose second record is still to come

    @property
    def read_numel(self) -> int:
        """How many records have been read."""
        return self._read_numel

    def read(self, records: bytes) -> None:
        """Take in the records that follow those read so far."""
        for number, record in enumerate(records, start=self._read_numel + 1):
            if self._word:
                if self._trial is not None:
                    self._trial.word(number, Word(self._word), record)
                self._word = 0
            elif record >= Word.TRY:
                self._word = record
            else:
                self._last_turn[record] = number
                if self._trial is not None:
                    self._trial.turn(number, record)
        self._read_numel += len(records)

    def grant(self, turn: int, own_job: int, members: Iterable[Member]) -> Grant:
        """Return the grant of ``turn``; all records before it must have been read.

        Records from before a slot's present owner joined belong to an earlier owner and are ignored.
        """
        mode = Mode.UNTRIED if self._trial is None else self._trial.mode
        after: dict[int, int] = {}
        for member in members if mode.waits else ():
            last = self._last_turn.get(member.slot, 0)
            if member.job != own_job and last > member.joined_at:
                after[member.job] = max(last, after.get(member.job, 0))
        return Grant(turn, tuple(sorted(after.items())), mode)


def blockers(grant: Grant, own_job: int, members: Iterable[Member]) -> list[Blocker]:
    """Return the members for which ``grant`` must still wait on this device, the lowest turn first."""
    needed = dict(grant.after)
    waiting = [
        Blocker(member, needed[member.job])
        for member in members
        if member.job != own_job and member.returned < needed.get(member.job, 0)
    ]
    return sorted(waiting, key=lambda blocker: blocker.turn)


class Lost(NamedTuple):
    """A job for which a rank no longer waits."""

    job: int
    turn: int
    waited_s: float
    lease_s: float
    at_limit: bool
    """Whether the rank's own limit ended the wait, before the job's lease was over."""


Progress = tuple[int, int, int, int]
"""(slot, incarnation, started, returned) of a member."""


def _progress(member: Member) -> Progress:
    return member.slot, member.incarnation, member.started, member.returned


class Patience:
    """How long a rank waits for a job that neither gives its turn back nor dies: a lease; see [Note: one lease a job].

    The lease of a job's turn runs from the moment when the waiting rank sees it at the front, on the waiting
    rank's own clock; no clock is shared. Of several leases of a job's members on the device the longest counts.

    Args:
        limit_s: the longest time of one wait, whatever leases the siblings have published.
        passed: from `passed` of another `Patience`, to go on where it ended.
    """

    def __init__(self, limit_s: float = math.inf, passed: frozenset[Progress] = frozenset()) -> None:
        self.limit_s = limit_s
        self.passed = passed
        """What members for which the rank does not wait have shown."""
        self.lost: list[Lost] = []
        """The jobs on which the present wait has given up."""
        self.expired_count = 0
        """How often this rank has given up waiting for a job."""
        self._front: tuple[int, int] | None = None
        self._front_since_s = 0.0
        self._since_s: float | None = None

    def remaining(self, waiting: Sequence[Blocker], members: Sequence[Member], now_s: float) -> float | None:
        """Return the seconds left before the rank passes the job at the front over; None when it waits for nobody.

        Args:
            waiting: from `blockers`, the lowest turn first.
            members: all that are on the device at the same moment.
            now_s: the waiting rank's monotonic clock.
        """
        if self._since_s is None:
            self._since_s = now_s
        while lasting := [each for each in waiting if not self._passes(each)]:
            job, turn = lasting[0].member.job, lasting[0].turn
            lease_s = max(each.member.lease_s for each in lasting if each.member.job == job)
            if self._front != (job, turn):
                self._front, self._front_since_s = (job, turn), now_s
            lease_ends_s, limit_ends_s = self._front_since_s + lease_s, self._since_s + self.limit_s
            if (left_s := min(lease_ends_s, limit_ends_s) - now_s) > 0:
                return left_s
            self._lose(
                Lost(job, turn, now_s - self._front_since_s, lease_s, at_limit=now_s < lease_ends_s), members
            )
        return None

    def _passes(self, blocker: Blocker) -> bool:
        return _progress(blocker.member) in self.passed

    def _lose(self, lost: Lost, members: Sequence[Member]) -> None:
        self.lost.append(lost)
        self.expired_count += 1
        still = [each for each in members if each.job == lost.job or _progress(each) in self.passed]
        self.passed = frozenset(map(_progress, still))

    def started(self) -> None:
        """End the present wait; the next one begins with no front, the full limit and no losses."""
        self._front = self._since_s = None
        self.lost = []


class Lease:
    """How long siblings are asked to wait for a turn of the own job that does not end.

    It is what the user gave. Without that it is four times the fourth longest of the 16 recent turns, but at least 5 s
    and at most 60 s. The three longest of them do not count: an evaluation inside a turn, or a turn in which a rank of
    the job waited for a stopped sibling while the others waited for that rank, says nothing about the turns to come.
    So stops that cost the job a lease do not make the job's own lease longer, nor in turn its siblings' leases.

    Args:
        given_s: what the user gave; None to follow the job's turns.
    """

    def __init__(self, given_s: float | None = None) -> None:
        self._given = given_s is not None
        self.seconds = DEFAULT_LEASE_S if given_s is None else given_s
        self._recent_s: deque[float] = deque(maxlen=_RECENT_TURNS)

    def note(self, turn_s: float) -> bool:
        """Take in a turn's length; return whether the lease has changed."""
        self._recent_s.append(turn_s)
        before_s = self.seconds
        if not self._given:
            typical_s = [0.0, *heapq.nlargest(_OUTLIERS + 1, self._recent_s)[_OUTLIERS:]][-1]
            self.seconds = min(max(_LEASE_TURNS * typical_s, DEFAULT_LEASE_S), LONGEST_LEASE_S)
        return self.seconds != before_s

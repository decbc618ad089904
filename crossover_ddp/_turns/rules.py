"""Turns as pure decisions: which siblings a rank waits for, for how long, and whether the jobs take turns at all.

[Note: turn order]
All devices that a set of jobs share see one and the same sequence of turns, and a turn belongs to a job, not to a
process. The machine with the smallest number of a job's machines is its *lead* machine, the same for all jobs on the
machines, whatever devices they use. Only the job's *lead rank*, its first one there, draws a turn number, by appending
one record to the machine's log: the position of the record *is* the number, so the kernel's append is the only arbiter.
The number travels to the job's other ranks together with the last turn of every other live job before it (a `Grant`). A
rank may start turn n when, on its own device, every live slot of the other jobs has given back the turns named in the
grant.

Why nothing can deadlock: a rank that waits for turn n waits only for turns below n, each of which waits only for turns
below itself, and no rank holds a turn while it waits for another one. A collective that a rank enters inside its turn
depends on its own job's ranks alone, and those wait only for turns below n. Deaths remove slots from the wait; a
stopped job costs its siblings one lease. `tests/unit/turns/test_turn_model.py` explores every interleaving of two and
three jobs on two or three devices with these functions.

[Note: one lease a job]
A rank that has waited for a whole lease passes the job over, slot by slot, as long as a slot shows the same last turns
started and given back: its owner has begun no later turn, or the slot would show that. When an owner goes on, the rank
waits for it again. Passing over a slot removes a wait and adds none, so it cannot make a deadlock.

[Note: alone on a device]
A rank that sees no sibling on its device need not know its turn's number to begin: nobody is there to be waited for. It
begins at once, and publishes the number when that is known; siblings that have joined meanwhile wait for it. One that
joins at this very moment may compute beside the turn.

[Note: trial of turns]
Siblings take turns for some steps and train side by side for some, in alternation, and keep what was faster. Nobody
conducts that: what is tried, and the verdict, are *words* in the log of turns, whose order all lead ranks of the
siblings share, and what a record means for a job follows from the records before it. Any lead rank that draws a turn
may write the word that is due; a word that is written twice does no harm. So whoever has written words may die, stop or
leave. A turn that is tried side by side waits for nobody, and siblings' later turns wait for it as for every other. To
wait less cannot make a deadlock, so ranks need not change at the same moment.

A block lasts until every job has drawn `BLOCK` turns in it. Each lead rank publishes the medians of its own steps over
all blocks of a kind in its slot, and who sees the votes of all jobs decides: early where the difference is plain. Jobs
that share no device with the own one, even through others, have a trial of their own.

No clock and no I/O here: the bytes of the log, what slots show, and the time are arguments. Our design.
"""

import heapq
import math
import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Final, NamedTuple

from crossover_ddp._system.comparing import HYSTERESIS, LAST_PAIR, PLAIN, is_faster

DEFAULT_LEASE_S = 5.0
LONGEST_LEASE_S = 60.0
_LEASE_TURNS = 4.0
_RECENT_TURNS = 16
_OUTLIERS = 3
BLOCK: Final = 5
"""Steps of each job in a row of one kind, first side by side: turns may cost more than they can gain."""
UNCOUNTED: Final = 1
"""The first of them still ends the former kind."""
WARM_UP: Final = 16
"""Steps of each job before the trial: the first ones compile and measure."""
REST: Final = 200
"""Steps of each job from one trial to the next, where siblings come and go."""
REPEAT: Final = 4000
"""Steps of each job from one trial to the next."""
SIDE_STEPS: Final = 8
"""Steps for one turn of a job that stays side by side: drawing one costs each rank a quarter of a millisecond."""
_LONGEST_BLOCK: Final = 8
"""A block ends after so many times its turns, too: somebody is stopped, or does not train."""


class Word(IntEnum):
    """A record of the log that is no turn; the record behind it names the slot of who has written it."""

    TRY = 253
    SIDE_BY_SIDE = 254
    TAKE_TURNS = 255


class Mode(IntEnum):
    """How a job computes beside its siblings."""

    UNTRIED = 0
    """In turns."""
    TRYING_TURNS = 1
    TRYING_SIDE_BY_SIDE = 2
    TURNS = 3
    """In turns, which have paid."""
    SIDE_BY_SIDE = 4

    @property
    def waits(self) -> bool:
        """Whether the job's turns wait for those of siblings."""
        return self not in (Mode.TRYING_SIDE_BY_SIDE, Mode.SIDE_BY_SIDE)


class Vote(NamedTuple):
    """What a job has measured in a trial: the seconds of a step."""

    pairs: int = 0
    """Of how many blocks of each kind."""
    turns_s: float = 0.0
    side_s: float = 0.0


class Grant(NamedTuple):
    """One turn of a job, as its lead rank sends it to the job's other ranks."""

    turn: int
    after: tuple[tuple[int, int], ...]
    """(job, turn): the turns that the other live jobs must have given back on a device before this turn starts."""
    mode: Mode = Mode.UNTRIED
    """A turn that does not wait has nothing in ``after``."""
    steps: int = 1
    """So many times the job may `acquire` with it; after the first one it waits for nobody, and nobody waits for it."""


Process = tuple[int, int]
"""A slot, and the incarnation of its owner in it."""


class Member(NamedTuple):
    """One local process of one job, as its slot in shared memory shows it; numbers of turns are 0 before the first."""

    slot: int = 0
    job: int = 0
    incarnation: int = 0
    joined_at: int = 0  # length of the log when it joined
    started: int = 0  # last turn started
    returned: int = 0  # last turn given back
    lease_s: float = 0.0
    device: int = 0  # digest of the device's name
    trial: bool = True  # whether the job takes part in trials
    tried: int = 0  # the trial, by its first record, of the vote that follows
    pairs: int = 0  # 0 while the vote is being written
    turns_s: float = 0.0
    side_s: float = 0.0
    lead: int = 0  # the job's lead machine: the one whose log has its turns
    returned_at_ns: int = 0  # CLOCK_MONOTONIC of this machine
    queued: int = 0  # last turn waited for
    turns: int = 0  # how many were given back; for people to see, as all that follows
    mode: int = 0  # of the job's lead rank
    rank: int = 0
    world_size: int = 0
    pid: int = 0
    device_name: bytes = b""  # perhaps cut

    @property
    def process(self) -> Process:
        """Return whose slot it is."""
        return self.slot, self.incarnation

    @property
    def vote(self) -> Vote:
        """Return what the job has measured in the trial `tried`."""
        return Vote(self.pairs, self.turns_s, self.side_s)


class Blocker(NamedTuple):
    """A member that has not yet given back the turn that must come first."""

    member: Member
    turn: int


class TurnLog:
    """The lead machine's log, which ``trial`` reads, too: record k (from 1) is the slot that drew turn k, or a word."""

    def __init__(self, trial: "Trial") -> None:
        self._trial = trial
        self._last_turn: dict[int, int] = {}
        self.read_numel = 0
        """How many records have been read."""
        self._word = 0  # whose second record is still to come

    def read(self, records: bytes) -> None:
        """Take in the records that follow those read so far."""
        for number, record in enumerate(records, start=self.read_numel + 1):
            if self._word:
                self._trial.word(number, Word(self._word), record)
                self._word = 0
            elif record >= Word.TRY:
                self._word = record
            else:
                self._last_turn[record] = number
                self._trial.turn(number, record)
        self.read_numel += len(records)

    def grant(self, turn: int, own_job: int, members: Iterable[Member]) -> Grant:
        """Return the grant of ``turn``; all records before it must have been read.

        Records from before a slot's present owner joined belong to an earlier owner and are ignored.
        """
        mode = self._trial.mode
        after: dict[int, int] = {}
        for member in members if mode.waits else ():
            last = self._last_turn.get(member.slot, 0)
            if member.job != own_job and last > member.joined_at:
                after[member.job] = max(last, after.get(member.job, 0))
        return Grant(turn, tuple(sorted(after.items())), mode, self._trial.steps)


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
    """Less than the lease where the rank's own limit has ended the wait."""
    lease_s: float


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

    def __init__(
        self, limit_s: float = math.inf, passed: frozenset[Progress] = frozenset()
    ) -> None:
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

    def remaining(
        self, waiting: Sequence[Blocker], members: Sequence[Member], now_s: float
    ) -> float | None:
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
            ends_s = min(self._front_since_s + lease_s, self._since_s + self.limit_s)
            if (left_s := ends_s - now_s) > 0:
                return left_s
            self._lose(Lost(job, turn, now_s - self._front_since_s, lease_s), members)
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


# --- do turns pay? ---------------------------------------------------------------------------------------------------


def siblings_of(job: int, members: Iterable[Member]) -> frozenset[int]:
    """Return the jobs that share a device with ``job``, or with one that does; itself included."""
    devices = defaultdict[int, set[int]](set)
    for member in members:
        devices[member.job].add(member.device)
    found, new = frozenset[int](), frozenset({job})
    while new:
        found |= new
        seen = set[int]().union(*(devices[each] for each in found if each in devices))
        new = frozenset(each for each, its in devices.items() if its & seen) - found
    return found


class Trial:
    """What a lead rank of ``job`` knows of the trial of its job and the siblings."""

    def __init__(self, job: int) -> None:
        self.begun_at = 0
        """The record that began the last trial; 0 before the first."""
        self.vote = Vote()
        """The job's own measurement in that trial."""
        self._job = job
        self._verdict: Word | None = None
        self._running = False
        self._jobs = frozenset[int]()  # that take part
        self._block = 0
        self._drawn = Counter[int]()  # by job, in the present block
        self._members: Mapping[int, Member] = {}  # by slot
        self._siblings = frozenset({job})
        self._settled = self._since = (
            0  # steps of siblings since one came or went, and since the last word
        )
        self._draws_s: list[float] = []  # when the job drew its turns in the block that it is in
        self._drawn_in = 0  # that block
        self._times_s: tuple[list[float], list[float]] = [], []  # side by side, in turns

    @property
    def mode(self) -> Mode:
        """How the job computes in the turn that it draws now."""
        if self._running:
            return Mode.TRYING_TURNS if self._block % 2 else Mode.TRYING_SIDE_BY_SIDE
        if self._verdict is None:
            return Mode.UNTRIED
        return Mode.TURNS if self._verdict is Word.TAKE_TURNS else Mode.SIDE_BY_SIDE

    @property
    def steps(self) -> int:
        """For how many steps a sibling draws one turn."""
        return SIDE_STEPS if self.mode is Mode.SIDE_BY_SIDE else 1

    # --- what the log says -----------------------------------------------------------------------------------

    def look(self, members: Sequence[Member]) -> None:
        """Take in who is there, on all devices. Call it before `TurnLog.read`, whose records are understood by it."""
        before, self._members = self._siblings, {each.slot: each for each in members}
        self._siblings = siblings_of(self._job, members)
        if self._siblings != before:
            self._settled = 0

    def _job_of(self, slot: int, record: int) -> int | None:
        """Return the job of a sibling that has written a record; None for others, and for those that have left."""
        member = self._members.get(slot)
        if member is None or member.joined_at >= record or member.job not in self._siblings:
            return None
        return member.job

    def turn(self, record: int, slot: int) -> None:
        """Take in a record that draws a turn."""
        job = self._job_of(slot, record)
        if job is None:
            return
        self._settled += self.steps
        self._since += self.steps
        if not self._running:
            return
        self._drawn[job] += 1
        longest = _LONGEST_BLOCK * BLOCK * len(self._jobs)
        if self._drawn.total() >= longest or all(self._drawn[each] >= BLOCK for each in self._jobs):
            self._block += 1
            self._drawn.clear()

    def word(self, record: int, word: Word, slot: int) -> None:
        """Take in a word, which begins at ``record``."""
        too_early = (
            self._running and self._block <= min(PLAIN) and self._all_try
        )  # it is of the trial before
        if self._job_of(slot, record) is None or (too_early and word is not Word.TRY):
            return
        self._running, self._since = word is Word.TRY, 0
        if self._running:
            self.begun_at, self.vote, self._jobs, self._block = record, Vote(), self._siblings, 0
            self._drawn.clear()
            self._times_s, self._draws_s, self._drawn_in = ([], []), [], 0
        else:
            self._verdict = word

    # --- what the job measures -------------------------------------------------------------------------------

    def drew(self, now_s: float) -> bool:
        """Note that the job draws a turn, once a step while something is tried; return whether there is a new vote."""
        if not self._running:
            return False
        voted = False
        if self._drawn_in != self._block:
            counted_s = self._draws_s[UNCOUNTED:]
            if len(counted_s) > 1:
                step_s = (counted_s[-1] - counted_s[0]) / (len(counted_s) - 1)
                self._times_s[self._drawn_in % 2].append(step_s)
            self._draws_s, self._drawn_in = [], self._block
            done = min(map(len, self._times_s))
            if voted := done > self.vote.pairs:
                # Of two the one without an evaluation in it.
                side_s, turns_s = map(statistics.median_low, self._times_s)
                self.vote = Vote(done, turns_s, side_s)
        self._draws_s.append(now_s)
        return voted

    # --- what is due -----------------------------------------------------------------------------------------

    @property
    def _all_try(self) -> bool:
        return all(each.trial for each in self._members.values() if each.job in self._siblings)

    def due(self) -> Word | None:
        """Return the word that the job, which has drawn a turn, is to write; None for none."""
        jobs, count = self._siblings, len(self._siblings)
        if not self._all_try:
            return Word.TAKE_TURNS if self._running or not self.mode.waits else None
        if self._running and jobs == self._jobs:
            return self._due_verdict()
        if count == 1 or self._settled < WARM_UP * count:
            return None
        rested = self._running or not self.begun_at or self._since >= REST * count
        return (
            Word.TRY if (jobs != self._jobs and rested) or self._since >= REPEAT * count else None
        )

    def _due_verdict(self) -> Word | None:
        votes = {
            each.job: each.vote
            for each in self._members.values()
            if each.job in self._jobs and each.tried == self.begun_at and each.vote.pairs
        }
        missing = len(votes) < len(self._jobs)
        if missing and self._block <= 2 * LAST_PAIR:
            return None
        return verdict([*votes.values()], self._verdict, last=missing)


def verdict(votes: Sequence[Vote], standing: Word | None, *, last: bool = False) -> Word | None:
    """Return what is faster, by the geometric mean over jobs; None as long as that is not plain, unless it is ``last``.

    ``standing``: the verdict before; None for turns.
    """
    if not votes:
        return Word.TAKE_TURNS if last else None
    gain = statistics.fmean(math.log(each.turns_s / each.side_s) for each in votes)
    pairs = min(each.pairs for each in votes)
    needed = -HYSTERESIS if standing is Word.SIDE_BY_SIDE else HYSTERESIS
    faster = is_faster(gain, LAST_PAIR if last else pairs, needed)
    return None if faster is None else Word.SIDE_BY_SIDE if faster else Word.TAKE_TURNS

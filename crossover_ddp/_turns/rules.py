"""Pure decisions about turns: whom a rank waits for, for how long, and whether jobs take turns.

[Note: turn order]
All devices shared by a set of jobs see the same sequence of turns, and a turn belongs to a job, not
to a process. Among a job's machines, the one with the smallest number is its *lead* machine. Jobs
on the same machines have the same lead machine, whatever devices they use. Only the job's *lead
rank*, its first rank on that machine, draws a turn number. It appends one record to the machine's
log, and the position of the record *is* the number, so the kernel's append is the only arbiter. The
number travels to the job's other ranks in a `Grant`, together with the last turn that each of the
other live jobs has drawn before it. A rank may start turn n when, on its own device, every live
slot of the other jobs has given back the turns that the grant names.

Why nothing can deadlock: a rank that waits for turn n waits only for turns below n, each of which
waits only for turns below itself, and no rank holds a turn while it waits for another one. A
collective that a rank enters inside its turn depends only on ranks of its own job, and those wait
only for turns below n. When a process dies, its slot drops out of the wait. A stopped job costs its
siblings one lease. `tests/unit/turns/test_turn_model.py` uses these functions to explore every
interleaving of two and three jobs on two or three devices.

[Note: one lease a job]
A rank that has waited for a whole lease passes the job over. It keeps passing over a slot while
the last turn started and the last turn given back in that slot stay the same: if the owner had
begun a later turn, the slot would show it. When the owner moves again, the rank waits for it again.
Passing over a slot removes a wait and adds none, so it cannot cause a deadlock.

[Note: alone on a device]
A rank that sees no sibling on its device has no turn to wait for, so it begins without knowing its
turn's number. It publishes the number as soon as it is known, and siblings that have joined in the
meantime wait for the turn. A sibling that joins at this very moment may compute beside the turn.

[Note: trial of turns]
Siblings alternate between taking turns and training side by side for some steps each, and then keep
the faster way. There is no coordinator: both the start of a trial and its verdict are *words* in
the log of turns. All the siblings' lead ranks read that log in the same order, and earlier records
determine the meaning of a record for a job. Any lead rank that draws a turn may write the word that
is due, and writing a word twice does no harm. So any writer of words may die, stop or leave. A turn
drawn side by side does not wait, but siblings' later turns wait for it as for any other. Waiting
less cannot cause a deadlock, so ranks need not change their mode at the same moment.

A block lasts until every job has drawn `BLOCK` turns in it. For each of the two ways, each lead
rank publishes in its slot the median step time over all its blocks. Any lead rank that sees the
votes of all jobs decides, and it decides early if the difference is clear beside the scatter of its
own blocks. Whether it is clear may differ between lead ranks, but from the same votes they all
decide for the same way, and the word decides for all of them. Jobs that are not connected to this
one by shared devices have a trial of their own.

This module has no clock and does no I/O: the bytes of the log, the contents of slots and the time
are arguments. Our design.
"""

import heapq
import math
import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Final, NamedTuple

from crossover_ddp._system.comparing import (
    FIRST_PAIR,
    HYSTERESIS,
    LAST_PAIR,
    is_faster,
    scatter_of,
)

DEFAULT_LEASE_S = 5.0
LONGEST_LEASE_S = 60.0
_LEASE_TURNS = 4.0
_RECENT_TURNS = 16
_OUTLIERS = 3
BLOCK: Final = 5
"""How many steps each job takes in a block of a trial. Side by side is tried first, since turns may
cost more than they can gain."""
UNCOUNTED: Final = 1
"""How many steps at the start of a block are not measured. The first one overlaps the previous
block."""
WARM_UP: Final = 16
"""How many steps each job takes before the first trial. The first steps compile and benchmark."""
REST: Final = 200
"""How many steps each job takes between two trials if siblings come and go."""
REPEAT: Final = 4000
"""How many steps each job takes between two trials if the siblings stay the same."""
SIDE_STEPS: Final = 8
"""A job that stays side by side draws one turn for this many steps, since drawing a turn costs each
rank a quarter of a millisecond."""
_LONGEST_BLOCK: Final = 8
"""A block also ends after this many times its usual number of turns, in case a job is stopped or
does not train."""


class Word(IntEnum):
    """A record in the log that is not a turn. The next record names its writer's slot."""

    TRY = 253
    """Begins a trial."""
    SIDE_BY_SIDE = 254
    """Ends a trial: siblings compute side by side from here on."""
    TAKE_TURNS = 255
    """Ends a trial, or calls it off: siblings take turns from here on."""


class Mode(IntEnum):
    """The way a job shares a device with its siblings."""

    UNTRIED = 0
    """In turns, until the first trial begins."""
    TRYING_TURNS = 1
    """In turns, during every second block of a trial."""
    TRYING_SIDE_BY_SIDE = 2
    """Side by side, during the first block of a trial and every second block after it."""
    TURNS = 3
    """In turns, after a trial in which turns were faster (`Word.TAKE_TURNS`)."""
    SIDE_BY_SIDE = 4
    """Side by side, after a trial in which this was faster (`Word.SIDE_BY_SIDE`)."""

    @property
    def waits(self) -> bool:
        """Whether the job's turns wait for its siblings' turns."""
        return self not in (Mode.TRYING_SIDE_BY_SIDE, Mode.SIDE_BY_SIDE)


class Vote(NamedTuple):
    """A job's measurement in a trial: its seconds per step, in turns and side by side."""

    pairs: int = 0
    """How many blocks of each kind were measured."""
    turns_s: float = 0.0
    side_s: float = 0.0


class Grant(NamedTuple):
    """A message that grants a turn to all ranks of a job. The job's lead rank sends it."""

    turn: int
    # Pairs (job, turn). Each of these jobs must have given back its turn on a device before this
    # turn starts there. Empty for a turn that does not wait.
    after: tuple[tuple[int, int], ...]
    # The mode of the job in this turn.
    mode: Mode = Mode.UNTRIED
    # How many calls of `acquire` this grant covers. Only the first call takes the turn: the others
    # do not wait for siblings, and siblings do not wait for them.
    steps: int = 1


Process = tuple[int, int]
"""Identifies a process that has joined, by its slot and the incarnation of the slot's owner."""


class Member(NamedTuple):
    """The data that one process of a job publishes in its slot in shared memory.

    Turn numbers are 0 before the first turn. `segment` defines where each field is stored.
    """

    slot: int = 0
    job: int = 0
    # A random number that distinguishes the owners of one slot.
    incarnation: int = 0
    # Length of the log when the process joined. Earlier records with this slot belong to an
    # earlier owner.
    joined_at: int = 0
    # The last turn started, and the last turn given back.
    started: int = 0
    returned: int = 0
    # How long siblings wait for a turn of this process before they pass it over.
    lease_s: float = 0.0
    # Digest of the device's name.
    device: int = 0
    # Whether the job takes part in trials.
    trial: bool = True
    # The job's vote: the trial that it belongs to (`Trial.begun_at`), and the measurement. `pairs`
    # is 0 while the other fields are being written.
    tried: int = 0
    pairs: int = 0
    turns_s: float = 0.0
    side_s: float = 0.0
    # The job's lead machine, whose log holds its turns.
    lead: int = 0
    # When `returned` was published, by this machine's CLOCK_MONOTONIC.
    returned_at_ns: int = 0
    # The last turn that the process waited for.
    queued: int = 0

    # No decision depends on the fields from here on: `crossover-ddp status` shows them.
    # How many turns were given back.
    turns: int = 0
    # The `Mode` of the last turn that the job's lead rank drew.
    mode: int = 0
    rank: int = 0
    world_size: int = 0
    pid: int = 0
    # The beginning of the device's name.
    device_name: bytes = b""

    @property
    def process(self) -> Process:
        """The identity of the process that owns the slot."""
        return self.slot, self.incarnation

    @property
    def vote(self) -> Vote:
        """The job's measurement in the trial `tried`."""
        return Vote(self.pairs, self.turns_s, self.side_s)


class Blocker(NamedTuple):
    """A member that another rank waits for, because it has not yet given back ``turn``."""

    member: Member
    turn: int


class TurnLog:
    """Read the lead machine's log, and pass its records to ``trial``.

    Records are counted from 1. Record k is the number of the slot that drew turn k, or a word, or
    the slot of a word's writer.
    """

    def __init__(self, trial: "Trial") -> None:
        self._trial = trial
        # How many records have been read.
        self.read_numel = 0
        # The last turn that each slot has drawn.
        self._last_turn: dict[int, int] = {}
        # A word that was read without its second record, the writer's slot; 0 if there is none.
        self._word = 0

    def read(self, records: bytes) -> None:
        """Read ``records``, which must continue where the previous call stopped."""
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
        """Return the grant for ``turn``. All earlier records must have been read.

        Records that a slot's earlier owner wrote are ignored.
        """
        mode = self._trial.mode
        after: dict[int, int] = {}
        for member in members if mode.waits else ():
            last = self._last_turn.get(member.slot, 0)
            if member.job != own_job and last > member.joined_at:
                after[member.job] = max(last, after.get(member.job, 0))
        return Grant(turn, tuple(sorted(after.items())), mode, self._trial.steps)


def blockers(grant: Grant, own_job: int, members: Iterable[Member]) -> list[Blocker]:
    """Return the members that ``grant`` still waits for on this device, with the lowest turn first.

    Args:
        grant: the turn that this rank wants to start.
        own_job: the job of this rank, which does not wait for itself.
        members: all members on the device.
    """
    needed = dict(grant.after)
    waiting = [
        Blocker(member, needed[member.job])
        for member in members
        if member.job != own_job and member.returned < needed.get(member.job, 0)
    ]
    return sorted(waiting, key=lambda blocker: blocker.turn)


class Lost(NamedTuple):
    """A sibling's turn that a rank no longer waits for."""

    job: int
    turn: int
    # This is less than the lease if the rank's own limit ended the wait.
    waited_s: float
    lease_s: float


Progress = tuple[int, int, int, int]
"""A member's ``(slot, incarnation, started, returned)``."""


def _progress(member: Member) -> Progress:
    return member.slot, member.incarnation, member.started, member.returned


class Patience:
    """Decide when a rank stops waiting for a job that neither gives its turn back nor dies.

    The rank waits for one lease, see [Note: one lease a job]. The lease starts when the waiting
    rank first finds the job's turn at the front, and is measured on that rank's own clock. Clocks
    of different processes are not compared. If the job's members on the device have different
    leases, the longest one counts.

    Args:
        limit_s: the longest that one wait may last, in seconds, whatever leases siblings have
            published. There is no limit by default.
        passed: the `passed` of another `Patience`, whose state this one continues. Empty by
            default.
    """

    def __init__(
        self, limit_s: float = math.inf, passed: frozenset[Progress] = frozenset()
    ) -> None:
        self.limit_s = limit_s
        # The members that the rank does not wait for, each with the last turns in its slot.
        self.passed = passed
        # The turns that the rank has given up on during the current wait.
        self.lost: list[Lost] = []
        # How often this rank has given up waiting for a job.
        self.expired_count = 0
        # The (job, turn) at the front of the current wait, and since when it has been there.
        self._front: tuple[int, int] | None = None
        self._front_since_s = 0.0
        # When the current wait began; None between waits.
        self._since_s: float | None = None

    def remaining(
        self, waiting: Sequence[Blocker], members: Sequence[Member], now_s: float
    ) -> float | None:
        """Return the seconds until the rank passes over the job at the front.

        Return None if the rank need not wait.

        Args:
            waiting: the result of `blockers`, which has the lowest turn first.
            members: all members on the device, read at the same moment.
            now_s: the current time on the waiting rank's monotonic clock, in seconds.
        """
        if self._since_s is None:
            self._since_s = now_s
        while lasting := [each for each in waiting if not self._passes(each)]:
            job, turn = lasting[0].member.job, lasting[0].turn
            lease_s = max(each.member.lease_s for each in lasting if each.member.job == job)
            if self._front != (job, turn):
                self._front = job, turn
                self._front_since_s = now_s
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
        # Pass over all slots of the job, so that each further slot does not cost another lease.
        still = [each for each in members if each.job == lost.job or _progress(each) in self.passed]
        self.passed = frozenset(map(_progress, still))

    def started(self) -> None:
        """End the current wait. The next one begins with the full limit and without losses."""
        self._front = None
        self._since_s = None
        self.lost = []


class Lease:
    """The time for which siblings should wait if a turn of this job does not end.

    A lease that the user gave is used unchanged. The default is four times the fourth longest of
    the last 16 turns, but at least 5 s and at most 60 s. The three longest turns do not count,
    since they do not predict the next ones: a turn may contain an evaluation, or one rank may have
    waited for a stopped sibling while the job's other ranks waited for that rank. So a stop that
    costs the job a lease does not lengthen the job's own lease, nor in turn its siblings' leases.
    """

    def __init__(self, given_s: float | None = None) -> None:
        self._given = given_s is not None
        self.seconds = DEFAULT_LEASE_S if given_s is None else given_s
        self._recent_s: deque[float] = deque(maxlen=_RECENT_TURNS)

    def note(self, turn_s: float) -> bool:
        """Record the length of a turn, and return whether the lease has changed."""
        self._recent_s.append(turn_s)
        before_s = self.seconds
        if not self._given:
            longest_s = heapq.nlargest(_OUTLIERS + 1, self._recent_s)
            typical_s = longest_s[_OUTLIERS] if len(longest_s) > _OUTLIERS else 0.0
            self.seconds = min(max(_LEASE_TURNS * typical_s, DEFAULT_LEASE_S), LONGEST_LEASE_S)
        return self.seconds != before_s


# --- the trial: do turns pay? ------------------------------------------------------------------


def siblings_of(job: int, members: Iterable[Member]) -> frozenset[int]:
    """Return ``job`` and all jobs that share a device with it, directly or through other jobs."""
    devices_of = defaultdict[int, set[int]](set)
    for member in members:
        devices_of[member.job].add(member.device)
    found = frozenset[int]()
    new = frozenset({job})
    while new:
        found |= new
        shared = set[int]().union(*(devices_of[each] for each in found if each in devices_of))
        new = frozenset(each for each, devices in devices_of.items() if devices & shared) - found
    return found


class Trial:
    """Follow the trials of a job and its siblings on the job's lead rank.

    See [Note: trial of turns].
    """

    def __init__(self, job: int) -> None:
        self._job = job
        # The record number of the word that began the last trial; 0 before the first trial.
        self.begun_at = 0
        # The job's own measurement in that trial.
        self.vote = Vote()
        # Whether a trial is running. Only `word` changes it, together with the verdict.
        self._running = False
        # The last verdict; None before the first one.
        self._verdict: Word | None = None
        # The jobs that take part in the last trial.
        self._jobs = frozenset[int]()
        # The current block of the trial, from 0, and how many turns each job has drawn in it.
        self._block = 0
        self._drawn = Counter[int]()
        # All members by slot, and the jobs that are siblings of this one, including this job.
        self._members: Mapping[int, Member] = {}
        self._siblings = frozenset({job})
        # Steps of all siblings since a sibling joined or left.
        self._settled = 0
        # Steps of all siblings since the last word.
        self._since = 0
        # When the job drew its turns in the block that it is measuring, and the block's number.
        self._draws_s: list[float] = []
        self._drawn_in = 0
        # Seconds per step in each measured block: first side by side, then in turns.
        self._times_s: tuple[list[float], list[float]] = [], []

    @property
    def mode(self) -> Mode:
        """The mode for a turn drawn at this point."""
        if self._running:
            return Mode.TRYING_TURNS if self._block % 2 else Mode.TRYING_SIDE_BY_SIDE
        if self._verdict is None:
            return Mode.UNTRIED
        return Mode.TURNS if self._verdict is Word.TAKE_TURNS else Mode.SIDE_BY_SIDE

    @property
    def steps(self) -> int:
        """The number of steps that one turn covers if it is drawn at this point."""
        return SIDE_STEPS if self.mode is Mode.SIDE_BY_SIDE else 1

    # --- reading the log ------------------------------------------------------------------------

    def look(self, members: Sequence[Member]) -> None:
        """Store the current members on all devices.

        Call this before `TurnLog.read`: the meaning of a record depends on the members.
        """
        before = self._siblings
        self._members = {each.slot: each for each in members}
        self._siblings = siblings_of(self._job, members)
        if self._siblings != before:
            self._settled = 0

    def _job_of(self, slot: int, record: int) -> int | None:
        """Return the job that wrote a record. None if it has left or is not a sibling."""
        member = self._members.get(slot)
        if member is None or member.joined_at >= record or member.job not in self._siblings:
            return None
        return member.job

    def turn(self, record: int, slot: int) -> None:
        """Process a record in which a slot's owner draws a turn.

        Args:
            record: the number of the record in the log.
            slot: the slot that drew the turn.
        """
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
        """Process a word.

        Args:
            record: the number of the word's second record in the log.
            word: the word.
            slot: the slot of its writer.
        """
        # No trial can end in its first blocks, so an early verdict belongs to the previous trial.
        too_early = self._running and self._block <= FIRST_PAIR and self._all_try
        if self._job_of(slot, record) is None or (too_early and word is not Word.TRY):
            return
        self._since = 0
        self._running = word is Word.TRY
        if not self._running:
            self._verdict = word
            return
        self.begun_at = record
        self.vote = Vote()
        self._jobs = self._siblings
        self._block = 0
        self._drawn.clear()
        self._times_s = [], []
        self._draws_s = []
        self._drawn_in = 0

    # --- measuring ------------------------------------------------------------------------------

    def drew(self, now_s: float) -> bool:
        """Record that the job draws a turn at ``now_s``, and return whether `vote` has changed.

        During a trial the job draws one turn per step.
        """
        if not self._running:
            return False
        voted = False
        if self._drawn_in != self._block:
            self._measure_block()
            self._draws_s = []
            self._drawn_in = self._block
            pairs = min(map(len, self._times_s))
            voted = pairs > self.vote.pairs
            if voted:
                # The low median of two values is the one without an evaluation in it.
                side_s, turns_s = map(statistics.median_low, self._times_s)
                self.vote = Vote(pairs, turns_s, side_s)
        self._draws_s.append(now_s)
        return voted

    def _measure_block(self) -> None:
        """Record the mean step time of the block `_drawn_in`, which is over."""
        counted_s = self._draws_s[UNCOUNTED:]
        if len(counted_s) > 1:
            step_s = (counted_s[-1] - counted_s[0]) / (len(counted_s) - 1)
            self._times_s[self._drawn_in % 2].append(step_s)

    # --- deciding -------------------------------------------------------------------------------

    @property
    def _all_try(self) -> bool:
        return all(each.trial for each in self._members.values() if each.job in self._siblings)

    def due(self) -> Word | None:
        """Return the word that the job must write after drawing a turn. None if no word is due."""
        jobs = self._siblings
        if not self._all_try:
            return Word.TAKE_TURNS if self._running or not self.mode.waits else None
        if self._running and jobs == self._jobs:
            return self._due_verdict()
        if len(jobs) == 1 or self._settled < WARM_UP * len(jobs):
            return None
        rested = self._running or not self.begun_at or self._since >= REST * len(jobs)
        if (jobs != self._jobs and rested) or self._since >= REPEAT * len(jobs):
            return Word.TRY
        return None

    def _due_verdict(self) -> Word | None:
        votes = {
            each.job: each.vote
            for each in self._members.values()
            if each.job in self._jobs and each.tried == self.begun_at and each.vote.pairs
        }
        missing = len(votes) < len(self._jobs)
        if missing and self._block <= 2 * LAST_PAIR:
            return None
        pairs = zip(*self._times_s, strict=False)
        scatter = scatter_of([math.log(turns_s / side_s) for side_s, turns_s in pairs])
        return verdict([*votes.values()], self._verdict, scatter, last=missing)


def verdict(
    votes: Sequence[Vote], standing: Word | None, scatter: float, *, last: bool = False
) -> Word | None:
    """Return the faster way, by the geometric mean over jobs. None if it is not clear yet.

    Args:
        votes: one vote per job.
        standing: the verdict of the previous trial. None if there was none, which counts as a
            verdict for turns.
        scatter: the standard deviation of the logarithm of turns_s / side_s from block to block.
        last: decide now, even if the difference is small.
    """
    if not votes:
        return Word.TAKE_TURNS if last else None
    gain = statistics.fmean(math.log(each.turns_s / each.side_s) for each in votes)
    pairs = LAST_PAIR if last else min(each.pairs for each in votes)
    needed = -HYSTERESIS if standing is Word.SIDE_BY_SIDE else HYSTERESIS
    side_is_faster = is_faster(gain, pairs, scatter, needed)
    if side_is_faster is None:
        return None
    return Word.SIDE_BY_SIDE if side_is_faster else Word.TAKE_TURNS

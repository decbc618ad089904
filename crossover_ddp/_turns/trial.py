"""Do turns pay for the jobs on a device? Tried in some of their steps, and again when that may have changed.

[Note: trial of turns]
Turns gain what siblings would take from each other, and cost what a job does in its turn without computing. Which is
more shows only in training. So siblings take turns for some steps and train side by side for some, in alternation, and
keep what was faster. Nobody conducts that: what is tried, and the verdict, are *words* in the log of turns, whose order
all lead ranks of the siblings share, and what a record of the log means for a job follows from the records before it.
Any lead rank that draws a turn may write the word that is due; a word that is written twice does no harm. So whoever
has written words may die, stop or leave.

A turn that is tried side by side waits for nobody. Siblings' later turns wait for it as for every other. To wait less
cannot make a deadlock (see [Note: turn order] in `rules`), so ranks need not change at the same moment.

A block lasts until every job has drawn `BLOCK` turns in it. Each lead rank measures its own steps, publishes their
medians over all blocks of a kind in its slot, and who sees the votes of all jobs decides: early where the difference is
plain. Jobs that share no device with the own one, even through others, have a trial of their own.

Pure: records, votes and the time are arguments. Our design.
"""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Final, NamedTuple


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


BLOCK: Final = 5
"""Steps of each job in a row of one kind, first side by side: turns may cost more than they can gain."""
UNCOUNTED: Final = 1
"""The first of them still ends the former kind."""
WARM_UP: Final = 16
"""Steps of each job before the trial: the first ones compile and measure."""
LAST_PAIR: Final = 8
"""After so many blocks of each kind any difference decides."""
REST: Final = 200
"""Steps of each job from one trial to the next, where siblings come and go."""
REPEAT: Final = 4000
"""Steps of each job from one trial to the next."""
PLAIN: Final[Mapping[int, float]] = {2: 0.40, 3: 0.20, 4: 0.10, 6: 0.05}
"""After so many blocks of each kind so large a difference decides, as the logarithm of a ratio of times."""
HYSTERESIS: Final = math.log(1.02)
"""What stands is left for what is faster by so much."""
_LONGEST_BLOCK: Final = 8
"""A block ends after so many times its turns, too: somebody is stopped, or does not train."""


class Place(NamedTuple):
    """What a lead rank sees of one slot on its machine, of any job on any device."""

    job: int
    device: int
    joined_at: int
    trial: bool
    """Whether the job takes part in trials."""
    tried: int
    """The trial, by its first record, of which the job has published a vote."""
    pairs: int
    turns_s: float
    side_s: float


class Vote(NamedTuple):
    """What a job has measured: the seconds of a step."""

    pairs: int
    """Of how many blocks of each kind."""
    turns_s: float
    side_s: float


def siblings_of(job: int, places: Iterable[Place]) -> frozenset[int]:
    """Return the jobs that share a device with ``job``, or with one that does; itself included."""
    devices = defaultdict[int, set[int]](set)
    for place in places:
        devices[place.job].add(place.device)
    found, new = frozenset[int](), frozenset({job})
    while new:
        found |= new
        seen = set[int]().union(*(devices[each] for each in found if each in devices))
        new = frozenset(each for each, its in devices.items() if its & seen) - found
    return found


class Trial:
    """What a lead rank knows of the trial of its job and the siblings.

    Args:
        job: the own one.
    """

    def __init__(self, job: int) -> None:
        self.begun_at = 0
        """The record that began the last trial; 0 before the first."""
        self.vote: Vote | None = None
        """The job's own measurement in that trial."""
        self._job = job
        self._verdict: Word | None = None
        self._running = False
        self._jobs = frozenset[int]()  # that take part
        self._block = 0
        self._drawn = Counter[int]()  # by job, in the present block
        self._slots: Mapping[int, Place] = {}
        self._siblings = frozenset({job})
        self._settled = self._since = 0  # turns of siblings since one came or went, and since the last word
        self._begin_s: float | None = None  # of the block's first step that counts
        self._steps = self._block_of_steps = 0
        self._times_s: tuple[list[float], list[float]] = [], []  # side by side, in turns

    @property
    def mode(self) -> Mode:
        """How the job computes in the turn that it draws now."""
        if self._running:
            return Mode.TRYING_TURNS if self._block % 2 else Mode.TRYING_SIDE_BY_SIDE
        if self._verdict is None:
            return Mode.UNTRIED
        return Mode.TURNS if self._verdict is Word.TAKE_TURNS else Mode.SIDE_BY_SIDE

    # --- what the log says -----------------------------------------------------------------------------------

    def look(self, slots: Mapping[int, Place]) -> None:
        """Take in who has which slot. Call it before `read`, whose records are understood by it."""
        before, self._slots = self._siblings, slots
        self._siblings = siblings_of(self._job, slots.values())
        if self._siblings != before:
            self._settled = 0

    def _job_of(self, slot: int, record: int) -> int | None:
        """Return the job of a sibling that has written a record; None for others, and for those that have left."""
        place = self._slots.get(slot)
        if place is None or place.joined_at >= record or place.job not in self._siblings:
            return None
        return place.job

    def turn(self, record: int, slot: int) -> None:
        """Take in a record that draws a turn."""
        job = self._job_of(slot, record)
        if job is None:
            return
        self._settled += 1
        self._since += 1
        if not self._running:
            return
        self._drawn[job] += 1
        longest = _LONGEST_BLOCK * BLOCK * len(self._jobs)
        if self._drawn.total() >= longest or all(self._drawn[each] >= BLOCK for each in self._jobs):
            self._block += 1
            self._drawn.clear()

    def word(self, record: int, word: Word, slot: int) -> None:
        """Take in a word, which begins at ``record``."""
        too_early = self._running and self._block <= min(PLAIN) and self._all_try  # it is of the trial before
        if self._job_of(slot, record) is None or (too_early and word is not Word.TRY):
            return
        self._running, self._since = word is Word.TRY, 0
        if self._running:
            self.begun_at, self.vote, self._jobs, self._block = record, None, self._siblings, 0
            self._drawn.clear()
            self._times_s, self._begin_s = ([], []), None
        else:
            self._verdict = word

    # --- what the job measures -------------------------------------------------------------------------------

    def drew(self, now_s: float) -> bool:
        """Note that the job draws a turn, which it does once a step; return whether there is a new `vote`."""
        if not self._running:
            return False
        voted = False
        if self._block_of_steps != self._block or self._begin_s is None:
            self._block_of_steps, self._steps, self._begin_s = self._block, 0, now_s
            done = min(map(len, self._times_s))
            if voted := done > (self.vote.pairs if self.vote else 0):
                side_s, turns_s = map(
                    statistics.median_low, self._times_s
                )  # of two the one without an evaluation in it
                self.vote = Vote(done, turns_s, side_s)
        else:
            self._steps += 1
            if self._steps <= UNCOUNTED:
                self._begin_s = now_s
            else:
                self._note((now_s - self._begin_s) / (self._steps - UNCOUNTED))
        return voted

    def _note(self, step_s: float) -> None:
        """Keep a block's mean so far, one for each block."""
        times_s, nth = self._times_s[self._block % 2], self._block // 2
        times_s[nth:] = [step_s]

    # --- what is due -----------------------------------------------------------------------------------------

    @property
    def _all_try(self) -> bool:
        return all(place.trial for place in self._slots.values() if place.job in self._siblings)

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
        return Word.TRY if (jobs != self._jobs and rested) or self._since >= REPEAT * count else None

    def _due_verdict(self) -> Word | None:
        votes = {
            each.job: Vote(each.pairs, each.turns_s, each.side_s)
            for each in self._slots.values()
            if each.job in self._jobs and each.tried == self.begun_at and each.pairs
        }
        missing = len(votes) < len(self._jobs)
        if missing and self._block <= 2 * LAST_PAIR:
            return None
        return verdict([*votes.values()], self._verdict, last=missing)


def verdict(votes: Sequence[Vote], standing: Word | None, *, last: bool = False) -> Word | None:
    """Return what is faster, by the geometric mean over jobs; None as long as that is not plain.

    Args:
        votes: of all jobs.
        standing: the verdict before; None for turns.
        last: whether any difference is to decide now.
    """
    if not votes:
        return Word.TAKE_TURNS if last else None
    gain = statistics.fmean(math.log(each.turns_s / each.side_s) for each in votes)
    pairs = min(each.pairs for each in votes)
    if last or pairs >= LAST_PAIR:
        needed = -HYSTERESIS if standing is Word.SIDE_BY_SIDE else HYSTERESIS
        return Word.SIDE_BY_SIDE if gain > needed else Word.TAKE_TURNS
    plain = min((each for count, each in PLAIN.items() if pairs >= count), default=math.inf)
    if abs(gain) < plain:
        return None
    return Word.SIDE_BY_SIDE if gain > 0 else Word.TAKE_TURNS

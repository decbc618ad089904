"""The rules of turns, without a clock and without files: leases, and the trial of turns."""

import math
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from crossover_ddp._turns import rules
from crossover_ddp._turns.rules import (
    BLOCK,
    REPEAT,
    REST,
    WARM_UP,
    Blocker,
    Lease,
    Member,
    Mode,
    Patience,
    Trial,
    TurnLog,
    Vote,
    Word,
    siblings_of,
    verdict,
)

StepTimes = Callable[[Mode], float]
TRYING = Mode.TRYING_TURNS, Mode.TRYING_SIDE_BY_SIDE
SIDE, BACK = Word.SIDE_BY_SIDE, Word.TAKE_TURNS


class Lead:
    """A job's lead rank, which steps for as long as its mode takes."""

    def __init__(self, job: int, times: StepTimes, *, device: int = 0, trial: bool = True) -> None:
        self.trial = Trial(job)
        self.log = TurnLog(self.trial)
        self.place = Member(job, job, 7, 0, 0, 0, 5.0, device, trial)
        self.times = times
        self.now_s = 0.0
        self.steps = 0
        self.more = 0  # steps that the last turn still covers
        self.modes: list[Mode] = []

    def step(self, siblings: "Siblings") -> None:
        """Draw a turn as `Turns` does, unless the last one covers this step, and compute."""
        if self.more:
            self.more -= 1
            return self._compute(self.modes[-1])
        siblings.log += bytes([self.place.job])
        turn = len(siblings.log)
        self.trial.look([lead.place for lead in siblings.leads])
        self.log.read(siblings.log[self.log.read_numel : turn - 1])
        grant = self.log.grant(turn, self.place.job, [])
        self.more = grant.steps - 1
        if self.trial.drew(self.now_s):
            self.place = self.place._replace(tried=self.trial.begun_at, **self.trial.vote._asdict())
        if (word := self.trial.due()) is not None:
            siblings.log += bytes([word, self.place.job])
        self._compute(grant.mode)

    def _compute(self, mode: Mode) -> None:
        self.modes.append(mode)
        self.steps += 1
        self.now_s += self.times(mode)


class Siblings:
    """Lead ranks that step one after the other; the one whose time is earliest steps first."""

    def __init__(self, *leads: Lead) -> None:
        self.leads = [*leads]
        self.log = b""

    def join(self, late: Lead) -> None:
        late.place = late.place._replace(joined_at=len(self.log))
        late.now_s = self.leads[0].now_s
        self.leads.append(late)

    def run(self, steps: int) -> None:
        """Run until every lead rank has taken at least ``steps`` further steps."""
        ends = {lead.place.job: lead.steps + steps for lead in self.leads}
        while any(lead.steps < ends[lead.place.job] for lead in self.leads):
            self.step()

    def step(self) -> None:
        min(self.leads, key=lambda lead: lead.now_s).step(self)


def taking(turns_s: float, side_s: float) -> StepTimes:
    return lambda mode: turns_s if mode.waits else side_s


ALIKE = (0.37, 0.6, 0.8, 0.93, 0.97, 0.99, 1.0, 1.05, 1.15, 1.4, 1.9)
OTHERS = [0.8, 1.1], [0.9, 1.2], [0.2, 1.0, 1.0], [0.1, 1.0]


@pytest.mark.parametrize("side_s", [*([each] * 2 for each in ALIKE), *OTHERS])
def test_the_way_that_is_faster_by_the_geometric_mean_is_kept_and_a_trial_costs_little(
    side_s: list[float],
) -> None:
    """It costs at most a hundredth of two thousand steps if the jobs are alike."""
    leads = [Lead(job, taking(1.0, each)) for job, each in enumerate(side_s)]
    siblings = Siblings(*leads)
    siblings.run(WARM_UP + 40 * BLOCK)
    paid = Mode.SIDE_BY_SIDE if math.prod(side_s) < 0.98 ** len(side_s) else Mode.TURNS
    assert [lead.modes[-1] for lead in leads] == [paid] * len(leads)
    siblings.run(2000 - leads[0].steps)
    for lead in leads if len({*side_s}) == 1 else ():
        trying, fastest_s = [mode for mode in lead.modes if mode in TRYING], min(1.0, *side_s)
        assert trying
        assert sum(lead.times(mode) - fastest_s for mode in trying) <= 0.01 * 2000 * fastest_s


def test_a_turn_side_by_side_does_not_wait() -> None:
    lead = Lead(0, taking(1.0, 0.5))
    other = Lead(1, taking(1.0, 0.5))
    siblings = Siblings(lead, other)
    siblings.run(WARM_UP + 20 * BLOCK)
    assert lead.trial.mode is Mode.SIDE_BY_SIDE
    assert lead.log.grant(len(siblings.log) + 1, 0, [other.place]).after == ()
    lead.trial.word(len(siblings.log) + 1, BACK, 1)
    assert lead.log.grant(len(siblings.log) + 1, 0, [other.place]).after != ()


@pytest.mark.parametrize("leaves", [True, False])
def test_a_job_that_leaves_or_stops_does_not_hold_up_the_trial(leaves: bool) -> None:
    stopped, *others = leads = [Lead(job, taking(1.0, 0.5)) for job in range(3)]
    siblings = Siblings(*leads)
    siblings.run(WARM_UP + 2 * BLOCK)
    assert stopped.modes[-1] in TRYING, "it began the trial"
    stopped.now_s = math.inf
    if leaves:
        siblings.leads.remove(stopped)
    for _ in range(4000):
        siblings.step()
    assert {lead.modes[-1] for lead in others} == {Mode.SIDE_BY_SIDE}
    stopped.now_s = others[0].now_s
    siblings.run(2)
    assert leaves or stopped.modes[-1] is Mode.SIDE_BY_SIDE, "it reads the others' verdict"


def test_a_trial_is_repeated_when_a_sibling_joins_and_after_a_few_thousand_turns() -> None:
    siblings = Siblings(*(Lead(job, taking(1.0, 0.5)) for job in range(2)))
    siblings.run(REST + 10 * BLOCK)
    first = siblings.leads[0]
    assert first.modes[-1] is Mode.SIDE_BY_SIDE
    first.times = siblings.leads[1].times = taking(1.0, 2.0)
    siblings.join(Lead(2, taking(1.0, 3.0)))
    siblings.run(WARM_UP + REST + 20 * BLOCK)
    assert {lead.modes[-1] for lead in siblings.leads} == {Mode.TURNS}
    for lead in siblings.leads:
        lead.times = taking(1.0, 0.5)
    siblings.run(REPEAT + 20 * BLOCK)
    assert {lead.modes[-1] for lead in siblings.leads} == {Mode.SIDE_BY_SIDE}
    assert sum(siblings.log.count(word) for word in Word) <= 3 * 2 * len(siblings.leads), (
        "three trials"
    )


def test_there_is_no_trial_for_a_lone_job_nor_if_one_of_several_jobs_wants_turns() -> None:
    first = Lead(0, taking(1.0, 0.5))
    siblings = Siblings(first)
    siblings.run(2 * REPEAT)
    assert ({*first.modes}, Word.TRY in siblings.log) == ({Mode.UNTRIED}, False)
    siblings.join(Lead(1, taking(1.0, 0.5)))
    siblings.run(WARM_UP + REST + 20 * BLOCK)
    assert first.modes[-1] is Mode.SIDE_BY_SIDE
    siblings.join(Lead(2, taking(1.0, 0.5), trial=False))
    siblings.run(WARM_UP + REST + 20 * BLOCK)
    assert all(lead.modes[-1].waits for lead in siblings.leads)


def test_jobs_on_other_devices_have_a_trial_of_their_own() -> None:
    gains = [Lead(job, taking(1.0, 2.0), device=0) for job in (0, 1)]
    loses = [Lead(job, taking(1.0, 0.5), device=1) for job in (2, 3)]
    siblings = Siblings(*gains, *loses)
    siblings.run(2 * WARM_UP + 40 * BLOCK)
    assert [lead.modes[-1] for lead in (*gains, *loses)] == [Mode.TURNS] * 2 + [
        Mode.SIDE_BY_SIDE
    ] * 2


def test_an_evaluation_in_a_block_does_not_decide() -> None:
    count = [0]

    def sometimes_long(mode: Mode) -> float:
        count[0] += 1
        return 30.0 if count[0] in (WARM_UP + 4, WARM_UP + 16) else taking(1.0, 1.2)(mode)

    siblings = Siblings(Lead(0, sometimes_long), Lead(1, taking(1.0, 1.2)))
    siblings.run(WARM_UP + 40 * BLOCK)
    assert siblings.leads[0].modes[-1] is Mode.TURNS


def test_jobs_that_share_a_device_through_others_are_siblings() -> None:
    places = enumerate([(1, 0), (2, 0), (2, 1), (3, 1), (4, 2)])
    members = [Member(slot, job, 7, 0, 0, 0, 5.0, device) for slot, (job, device) in places]
    assert siblings_of(1, members) == siblings_of(3, members) == {1, 2, 3}
    assert siblings_of(4, members) == {4}


@pytest.mark.parametrize(
    ("gain", "pairs", "scatter", "standing", "expected"),
    [
        (1.3, 1, math.inf, None, None),
        (1.3, 2, 0.05, None, SIDE),
        (1.3, 2, 0.1, None, None),
        (1.3, 4, 0.15, None, SIDE),
        (1.03, 4, 0.001, None, SIDE),
        (1.01, 4, 0.001, None, BACK),
        (1.03, 7, 0.02, None, None),
        (1.01, 8, 9.0, None, BACK),
        (0.99, 8, 9.0, SIDE, SIDE),
        (0.97, 8, 9.0, SIDE, BACK),
    ],
)
def test_verdict(
    gain: float, pairs: int, scatter: float, standing: Word | None, expected: Word | None
) -> None:
    votes = [Vote(pairs, gain, 1.0), Vote(pairs + 1, gain, 1.0)]
    assert verdict(votes, standing, scatter) is expected


@settings(max_examples=50)
@given(st.lists(st.integers(0, 2), min_size=100, max_size=300))
def test_all_lead_ranks_find_the_same_mode_whenever_they_read_the_log(order: list[int]) -> None:
    siblings = Siblings(*(Lead(job, taking(1.0, 0.9)) for job in range(3)))
    for nth in order:
        siblings.leads[nth].step(siblings)
    for lead in siblings.leads:
        lead.trial.look([each.place for each in siblings.leads])
        lead.log.read(siblings.log[lead.log.read_numel :])
    assert len({lead.trial.mode for lead in siblings.leads}) == 1


def test_leases_are_waited_for_one_after_the_other_within_the_limit() -> None:
    patience = Patience(limit_s=10.0)

    def remaining(now_s: float, *waiting: Blocker) -> float | None:
        return patience.remaining(waiting, [each.member for each in waiting], now_s)

    def blocker(slot: int, job: int, turn: int, lease_s: float, started: int = 0) -> Blocker:
        return Blocker(Member(slot, job, 7, 0, started, 0, lease_s), turn)

    slots = [blocker(slot, 11, 5, 6.3 + slot / 10) for slot in range(8)]
    waiting = *slots, blocker(8, 12, 6, 2.0), blocker(9, 13, 7, 3600.0)
    assert remaining(100.0, *waiting) == pytest.approx(7.0), "the longest lease of the job's slots"
    assert remaining(106.5, *waiting) == pytest.approx(0.5)
    assert remaining(107.0, *waiting) == pytest.approx(2.0), "the second lease begins only now"
    assert patience.expired_count == 1
    assert remaining(109.5, *waiting) == pytest.approx(0.5), "the limit of one wait"
    assert remaining(110.0, *waiting) is None
    lost = [(each.job, each.turn, each.waited_s) for each in patience.lost]
    assert lost == [(11, 5, 7.0), (12, 6, 2.5), (13, 7, 0.5)]
    patience.started()
    assert patience.lost == []
    assert remaining(200.0, *waiting) is None, "they have not moved"
    moved = blocker(9, 13, 9, 3600.0, started=9)
    assert remaining(200.0, moved) == pytest.approx(10.0), "every wait has its own limit"


@given(st.lists(st.floats(0.0, 1e4), max_size=40), st.sampled_from([None, 0.5, 3600.0]))
@example([4.0] * 5 + [0.1] * 15, None)
def test_a_lease_is_given_or_follows_recent_turns(
    turns_s: list[float], given_s: float | None
) -> None:
    """Outliers do not count: a turn that waited for a lease must not make the next lease longer."""
    lease = Lease(given_s)
    recent_s = [0.0] * 16
    for turn_s in turns_s:
        before_s = lease.seconds
        recent_s = [*recent_s[1:], turn_s]
        assert lease.note(turn_s) == (lease.seconds != before_s)
    followed_s = min(max(rules.DEFAULT_LEASE_S, 4 * sorted(recent_s)[-4]), rules.LONGEST_LEASE_S)
    assert lease.seconds == (followed_s if given_s is None else given_s)

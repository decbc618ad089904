"""The trial of turns: what lead ranks read, measure and write, without a clock and without a file."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossover_ddp._turns.rules import (
    BLOCK,
    REPEAT,
    REST,
    WARM_UP,
    Member,
    Mode,
    Trial,
    TurnLog,
    Vote,
    Word,
    siblings_of,
    verdict,
)

StepTimes = Callable[[Mode], float]


class Lead:
    """A job's lead rank, which steps for as long as its mode takes."""

    def __init__(
        self, job: int, times: StepTimes, *, device: int = 0, joined_at: int = 0, trial: bool = True
    ) -> None:
        self.trial = Trial(job)
        self.log = TurnLog(self.trial)
        self.place = Member(job, job, 7, joined_at, 0, 0, 5.0, device, trial)
        self.times, self.now_s, self.steps, self.modes = times, 0.0, 0, list[Mode]()

    def step(self, siblings: "Siblings") -> None:
        """Draw a turn as `Turns` does, and compute."""
        siblings.log += bytes([self.place.job])
        turn = len(siblings.log)
        self.trial.look([lead.place for lead in siblings.leads])
        self.log.read(siblings.log[self.log.read_numel : turn - 1])
        mode = self.log.grant(turn, self.place.job, []).mode
        if self.trial.drew(self.now_s):
            self.place = self.place._replace(tried=self.trial.begun_at, **self.trial.vote._asdict())
        if (word := self.trial.due()) is not None:
            siblings.log += bytes([word, self.place.job])
        self.modes.append(mode)
        self.steps += 1
        self.now_s += self.times(mode)


class Siblings:
    """Lead ranks that step one after the other, whoever is due first."""

    def __init__(self, *leads: Lead) -> None:
        self.leads, self.log = [*leads], b""

    def go_on(self, steps: int) -> None:
        """Let every lead rank take at least so many steps."""
        ends = {lead.place.job: lead.steps + steps for lead in self.leads}
        while any(lead.steps < ends[lead.place.job] for lead in self.leads):
            min(self.leads, key=lambda lead: lead.now_s).step(self)


def taking(turns_s: float, side_s: float) -> StepTimes:
    return lambda mode: turns_s if mode.waits else side_s


@pytest.mark.parametrize(
    ("times", "paid"),
    [
        ([(1.0, 0.37), (1.0, 0.37)], Mode.SIDE_BY_SIDE),
        ([(1.0, 0.97), (1.0, 0.97)], Mode.SIDE_BY_SIDE),
        ([(1.0, 0.99), (1.0, 0.99)], Mode.TURNS),
        ([(1.0, 1.9), (1.0, 1.9)], Mode.TURNS),
        ([(1.0, 0.8), (1.0, 1.1)], Mode.SIDE_BY_SIDE),
        ([(1.0, 0.9), (1.0, 1.2)], Mode.TURNS),
        ([(1.0, 0.2), (1.0, 1.0), (1.0, 1.0)], Mode.SIDE_BY_SIDE),
        ([(1.0, 0.1), (1.0, 1.0)], Mode.SIDE_BY_SIDE),
    ],
)
def test_siblings_keep_what_is_faster_by_the_geometric_mean(
    times: Sequence[tuple[float, float]], paid: Mode
) -> None:
    siblings = Siblings(*(Lead(job, taking(*both)) for job, both in enumerate(times)))
    siblings.go_on(WARM_UP + 40 * BLOCK)
    assert {lead.modes[-1] for lead in siblings.leads} == {paid}


@pytest.mark.parametrize("side_s", [0.37, 0.6, 0.8, 0.93, 1.0, 1.05, 1.15, 1.4, 1.9])
def test_the_trial_costs_at_most_a_hundredth_of_two_thousand_steps(side_s: float) -> None:
    siblings = Siblings(*(Lead(job, taking(1.0, side_s)) for job in range(2)))
    siblings.go_on(2000)
    fastest_s = min(1.0, side_s)
    for lead in siblings.leads:
        trying = [mode for mode in lead.modes if mode in (Mode.TRYING_TURNS, Mode.TRYING_SIDE_BY_SIDE)]
        lost_s = sum(lead.times(mode) - fastest_s for mode in trying)
        assert trying
        assert lost_s <= 0.01 * 2000 * fastest_s


def test_a_turn_side_by_side_waits_for_nobody() -> None:
    siblings = Siblings(*(Lead(job, taking(1.0, 0.5)) for job in range(2)))
    siblings.go_on(WARM_UP + 20 * BLOCK)
    lead = siblings.leads[0]
    assert lead.trial.mode is Mode.SIDE_BY_SIDE
    others = [Member(1, 1, 7, 0, 0, 0, 5.0)]
    assert lead.log.grant(len(siblings.log) + 1, 0, others).after == ()
    lead.trial.word(len(siblings.log) + 1, Word.TAKE_TURNS, 1)
    assert lead.log.grant(len(siblings.log) + 1, 0, others).after != ()


def test_nobody_is_needed_to_conduct() -> None:
    leads = [Lead(job, taking(1.0, 0.5)) for job in range(3)]
    siblings = Siblings(*leads)
    siblings.go_on(WARM_UP + 2 * BLOCK)
    assert leads[0].modes[-1] in (Mode.TRYING_TURNS, Mode.TRYING_SIDE_BY_SIDE)
    siblings.leads.pop(0)  # whoever began it leaves
    siblings.go_on(WARM_UP + 20 * BLOCK)
    assert {lead.modes[-1] for lead in siblings.leads} == {Mode.SIDE_BY_SIDE}


def test_a_job_that_stands_still_holds_nobody_up() -> None:
    siblings = Siblings(*(Lead(job, taking(1.0, 0.5)) for job in range(3)))
    siblings.go_on(WARM_UP + 2 * BLOCK)
    stopped = siblings.leads[0]
    stopped.now_s = float("inf")
    for _ in range(4000):
        min(siblings.leads, key=lambda lead: lead.now_s).step(siblings)
    assert {lead.modes[-1] for lead in siblings.leads[1:]} == {Mode.SIDE_BY_SIDE}
    stopped.now_s = siblings.leads[1].now_s
    siblings.go_on(2)
    assert stopped.modes[-1] is Mode.SIDE_BY_SIDE, "it reads what was decided without it"


def test_it_is_tried_again_when_a_sibling_comes_and_after_a_few_thousand_turns() -> None:
    siblings = Siblings(*(Lead(job, taking(1.0, 0.5)) for job in range(2)))
    siblings.go_on(REST + 10 * BLOCK)
    first = siblings.leads[0]
    assert first.modes[-1] is Mode.SIDE_BY_SIDE
    late = Lead(2, taking(1.0, 3.0), joined_at=len(siblings.log))
    late.now_s = first.now_s
    for lead in siblings.leads:
        lead.times = taking(1.0, 2.0)
    siblings.leads.append(late)
    siblings.go_on(WARM_UP + REST + 20 * BLOCK)
    assert {lead.modes[-1] for lead in siblings.leads} == {Mode.TURNS}
    for lead in siblings.leads:
        lead.times = taking(1.0, 0.5)
    siblings.go_on(REPEAT + 20 * BLOCK)
    assert {lead.modes[-1] for lead in siblings.leads} == {Mode.SIDE_BY_SIDE}
    assert sum(siblings.log.count(word) for word in Word) <= 3 * 2 * len(siblings.leads), "three trials"


def test_one_job_that_wants_turns_is_enough() -> None:
    siblings = Siblings(Lead(0, taking(1.0, 0.5)), Lead(1, taking(1.0, 0.5)))
    siblings.go_on(WARM_UP + 20 * BLOCK)
    assert siblings.leads[0].modes[-1] is Mode.SIDE_BY_SIDE
    wants = Lead(2, taking(1.0, 0.5), joined_at=len(siblings.log), trial=False)
    wants.now_s = siblings.leads[0].now_s
    siblings.leads.append(wants)
    siblings.go_on(WARM_UP + REST + 20 * BLOCK)
    assert all(lead.modes[-1].waits for lead in siblings.leads)


def test_jobs_on_other_devices_have_a_trial_of_their_own() -> None:
    gains = [Lead(job, taking(1.0, 2.0), device=0) for job in (0, 1)]
    loses = [Lead(job, taking(1.0, 0.5), device=1) for job in (2, 3)]
    siblings = Siblings(*gains, *loses)
    siblings.go_on(2 * WARM_UP + 40 * BLOCK)
    assert [lead.modes[-1] for lead in (*gains, *loses)] == [Mode.TURNS] * 2 + [Mode.SIDE_BY_SIDE] * 2


def test_an_evaluation_in_a_block_does_not_decide() -> None:
    count = [0]

    def sometimes_long(mode: Mode) -> float:
        count[0] += 1
        return 30.0 if count[0] in (WARM_UP + 4, WARM_UP + 16) else taking(1.0, 1.2)(mode)

    siblings = Siblings(Lead(0, sometimes_long), Lead(1, taking(1.0, 1.2)))
    siblings.go_on(WARM_UP + 40 * BLOCK)
    assert siblings.leads[0].modes[-1] is Mode.TURNS


def test_a_lone_job_tries_nothing() -> None:
    siblings = Siblings(Lead(0, taking(1.0, 0.5)))
    siblings.go_on(2 * REPEAT)
    assert {*siblings.leads[0].modes} == {Mode.UNTRIED}
    assert Word.TRY not in siblings.log


def test_jobs_that_share_a_device_through_others_are_siblings() -> None:
    members = [
        Member(slot, job, 7, 0, 0, 0, 5.0, device)
        for slot, (job, device) in enumerate([(1, 0), (2, 0), (2, 1), (3, 1), (4, 2)])
    ]
    assert siblings_of(1, members) == siblings_of(3, members) == {1, 2, 3}
    assert siblings_of(4, members) == {4}


@pytest.mark.parametrize(
    ("gain", "pairs", "standing", "expected"),
    [
        (1.3, 1, None, None),
        (1.6, 2, None, Word.SIDE_BY_SIDE),
        (0.6, 2, None, Word.TAKE_TURNS),
        (1.3, 2, None, None),
        (1.3, 3, None, Word.SIDE_BY_SIDE),
        (1.03, 7, None, None),
        (1.03, 8, None, Word.SIDE_BY_SIDE),
        (1.01, 8, None, Word.TAKE_TURNS),
        (0.99, 8, Word.SIDE_BY_SIDE, Word.SIDE_BY_SIDE),
        (0.97, 8, Word.SIDE_BY_SIDE, Word.TAKE_TURNS),
    ],
)
def test_verdict(gain: float, pairs: int, standing: Word | None, expected: Word | None) -> None:
    assert verdict([Vote(pairs, gain, 1.0), Vote(pairs + 1, gain, 1.0)], standing) is expected


@settings(max_examples=50)
@given(st.lists(st.integers(0, 2), min_size=100, max_size=300))
def test_whoever_reads_the_log_at_whatever_moment_finds_the_same(order: list[int]) -> None:
    siblings = Siblings(*(Lead(job, taking(1.0, 0.9)) for job in range(3)))
    for nth in order:
        siblings.leads[nth].step(siblings)
    found = set[Mode]()
    for lead in siblings.leads:
        lead.trial.look([each.place for each in siblings.leads])
        lead.log.read(siblings.log[lead.log.read_numel :])
        found.add(lead.trial.mode)
    assert len(found) == 1

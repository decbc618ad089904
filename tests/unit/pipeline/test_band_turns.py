"""The turns of a step in bands, with real mutexes of jobs of one rank each."""

from collections.abc import Iterator
from typing import Any

import pytest

from crossover_ddp.gpu_mutex import GPUMutex
from crossover_ddp.pipeline.turns import BandTurns
from tests.harness.groups import new_group

BANDS = 8


@pytest.fixture
def mutexes() -> Iterator[list[GPUMutex]]:
    """Two jobs on one device."""
    group = new_group()
    made = [GPUMutex(group, device="dev0", lease=20.0) for _ in range(2)]
    yield made
    for mutex in made:
        mutex.close()


def phase_of(mutex: GPUMutex, sibling: GPUMutex) -> float | None:
    assert sibling._turns is not None
    return next(each.phase for each in sibling._turns.membership.segment.members() if each.job == mutex.job)


def step(turns: BandTurns, mutex: GPUMutex) -> list[bool]:
    found = []
    with turns.step():
        for number in range(BANDS):
            with turns.band(number):
                found.append(mutex.holding)
    return found


def test_each_band_is_a_turn_and_siblings_see_how_far_the_step_is(mutexes: list[GPUMutex]) -> None:
    mutex, sibling = mutexes
    turns, phases = BandTurns(mutex, BANDS), list[Any]()
    with turns.step():
        for number in range(BANDS):
            with turns.band(number):
                assert mutex.holding
                phases.append(phase_of(mutex, sibling))
            assert not mutex.holding
    assert phases == [(number + 1) / BANDS for number in range(BANDS)]
    assert phase_of(mutex, sibling) is None, "a job outside a step tells nothing"
    assert mutex.stats()["turns"] == BANDS


def test_a_step_s_first_turn_is_idle_until_a_sibling_close_before_is_half_a_step_ahead(
    mutexes: list[GPUMutex],
) -> None:
    mutex, sibling = mutexes
    ours, theirs, idle = BandTurns(mutex, BANDS), BandTurns(sibling, BANDS), []
    with theirs.step():
        with theirs.band(0):
            pass
        for number in range(1, BANDS):
            ours._request(0)  # the turn after the sibling's band that it has requested by now
            with theirs.band(number):
                pass
            with mutex:
                idle.append(ours._is_idle)
    assert idle == [True, True, False, False, False, False, False], "of 2/8, 3/8, 4/8 … of the sibling's step"


def test_a_sibling_that_stays_where_it_is_costs_one_step_s_turns_at_most(mutexes: list[GPUMutex]) -> None:
    mutex, sibling = mutexes
    turns, theirs = BandTurns(mutex, BANDS), BandTurns(sibling, BANDS)
    with theirs.step():
        with theirs.band(0):
            pass
        sibling.acquire()  # the turn that was requested for its next band
        sibling.release()
        assert step(turns, mutex) == [True] * BANDS
    assert mutex.stats()["turns"] == 2 * BANDS - 1


def test_without_turns_a_step_goes_on(mutexes: list[GPUMutex]) -> None:
    mutex, _ = mutexes
    mutex.close()
    assert step(BandTurns(mutex, BANDS), mutex) == [False] * BANDS


def test_a_band_that_fails_gives_its_turn_back(mutexes: list[GPUMutex]) -> None:
    mutex, sibling = mutexes
    turns = BandTurns(mutex, BANDS)
    with pytest.raises(RuntimeError, match="broken"), turns.step(), turns.band(0):
        raise RuntimeError("broken")
    assert not mutex.holding
    assert phase_of(mutex, sibling) is None

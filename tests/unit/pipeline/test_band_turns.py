"""The turns of a step in bands, with real mutexes of jobs of one rank each."""

from collections.abc import Iterator

import pytest

from crossover_ddp.gpu_mutex import GPUMutex
from crossover_ddp.pipeline.run import BandTurns
from tests.harness.groups import new_group

BANDS = 8


@pytest.fixture
def mutex() -> Iterator[GPUMutex]:
    mutex = GPUMutex(new_group(), device="dev0", lease=20.0)
    yield mutex
    mutex.close()


def step(turns: BandTurns, mutex: GPUMutex) -> list[bool]:
    found = []
    for number in range(BANDS):
        with turns.band(number):
            found.append(mutex.holding)
        assert not mutex.holding
    return found


def test_each_band_is_a_turn_and_the_first_step_leaves_as_many_as_the_job_s_number_says(
    mutex: GPUMutex,
) -> None:
    mutex.job = 2 * (3 * BANDS + 5) + 1
    turns = BandTurns(mutex, BANDS)
    assert step(turns, mutex) == [True] * BANDS
    assert mutex.stats()["turns"] == BANDS + 5
    assert step(turns, mutex) == [True] * BANDS
    assert mutex.stats()["turns"] == 2 * BANDS + 5


def test_without_turns_a_step_goes_on(mutex: GPUMutex) -> None:
    mutex.close()
    assert step(BandTurns(mutex, BANDS), mutex) == [False] * BANDS


def test_a_band_that_fails_gives_its_turn_back(mutex: GPUMutex) -> None:
    turns = BandTurns(mutex, BANDS)
    with pytest.raises(RuntimeError, match="broken"), turns.band(0):
        raise RuntimeError("broken")
    assert not mutex.holding

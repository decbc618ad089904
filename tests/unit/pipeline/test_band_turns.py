"""The turns of a step in bands, with real mutexes of jobs of one rank each."""

import pytest

from crossover_ddp.gpu_mutex import GPUMutex
from crossover_ddp.pipeline.run import BandTurns
from tests.unit.turns.mutexes import Make

BANDS = 8


def step(turns: BandTurns, mutex: GPUMutex) -> list[bool]:
    found = []
    for number in range(BANDS):
        with turns.band(number):
            found.append(mutex.holding)
        assert not mutex.holding
    return found


def test_each_band_is_a_turn_and_the_first_step_leaves_some(make: Make) -> None:
    """As many as the job's number says."""
    mutex = make()
    mutex.job = 2 * (3 * BANDS + 5) + 1
    turns = BandTurns(mutex, BANDS)
    for steps in (1, 2):
        assert step(turns, mutex) == [True] * BANDS
        assert mutex.stats()["turns"] == steps * BANDS + 5
    with pytest.raises(RuntimeError, match="broken"), turns.band(0):
        raise RuntimeError("broken")
    assert not mutex.holding
    mutex.close()
    assert step(turns, mutex) == [False] * BANDS, "without turns a step goes on"

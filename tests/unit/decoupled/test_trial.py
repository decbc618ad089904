"""Deferring is tried, and what is faster for the slowest rank is kept."""

from collections.abc import Sequence
from unittest import mock

import pytest
import torch

from crossover_ddp._decoupled.trial import BLOCK, WARM_UP, Trial
from crossover_ddp._system.comparing import LAST_PAIR

END = WARM_UP + 2 * BLOCK * LAST_PAIR


class World:
    """A rank whose steps take as long as they are told to."""

    def __init__(self, deferred_s: float, whole_s: float, others: Sequence[Sequence[float]] = ()) -> None:
        self.now_s = 0.0
        self.settled_at: list[int] = []
        self.modes: list[bool] = []
        self.asked = 0
        self._step_s = {True: deferred_s, False: whole_s}
        self._others = others
        self.trial = Trial()
        self.trial._clock = lambda: self.now_s  # type: ignore[method-assign]

    def step(self, extra_s: float = 0.0) -> None:
        self.now_s += self._step_s[self.trial.defers] + extra_s
        self.modes.append(self.trial.defers)
        with mock.patch("torch.cuda.synchronize", lambda _: self.settled_at.append(len(self.modes))):
            self.trial.backward_ended(self, torch.device("cuda"))  # type: ignore[arg-type]

    def gather_numbers(self, numbers: Sequence[float], device: torch.device) -> list[list[float]]:
        """As `Exchange.gather_numbers`."""
        self.asked += 1
        return [list(numbers), *map(list, self._others)]

    def run(self, steps: int = END) -> "World":
        for _ in range(steps):
            self.step()
        return self


@pytest.mark.parametrize(
    ("deferred_s", "whole_s", "others", "pairs", "defers"),
    [
        (1.0, 2.0, [], 2, True),
        (2.0, 1.0, [], 2, False),
        (1.0, 1.25, [], 3, True),
        (1.0, 1.03, [], LAST_PAIR, True),
        (1.0, 1.01, [], LAST_PAIR, False),  # it costs what is not measured, too
        (1.0, 2.0, [[3.0, 2.5]], 4, False),
    ],
)
def test_after_blocks_of_both_ways_the_plainly_faster_one_of_the_slowest_rank_is_kept(
    deferred_s: float, whole_s: float, others: list[list[float]], pairs: int, defers: bool
) -> None:
    end = WARM_UP + 2 * BLOCK * pairs
    world = World(deferred_s, whole_s, others).run(end - 1)
    assert not world.trial.is_over
    world.run(1 + 3 * BLOCK)
    assert world.trial.is_over and world.asked == pairs
    blocks = [world.modes[WARM_UP + BLOCK * i : WARM_UP + BLOCK * (i + 1)] for i in range(2 * pairs)]
    assert all(world.modes[:WARM_UP])
    assert blocks == [[i % 2 == 0] * BLOCK for i in range(2 * pairs)]
    assert set(world.modes[end:]) == {defers}
    assert len(world.settled_at) == 4 * pairs, "the device is waited for only at the ends of what is measured"


@pytest.mark.parametrize("place", range(END))
def test_one_long_step_does_not_decide(place: int) -> None:
    for deferred_s, whole_s in ((1.0, 1.2), (1.2, 1.0)):
        world = World(deferred_s, whole_s)
        for number in range(END):
            world.step(extra_s=60.0 if number == place else 0.0)
        assert world.trial.defers == (deferred_s < whole_s)

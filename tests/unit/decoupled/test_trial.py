"""The trial of deferring keeps the kind of step that is faster for the slowest rank."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from crossover_ddp._decoupled.trial import BLOCK, WARM_UP, Trial
from crossover_ddp._system.comparing import LAST_PAIR

END = WARM_UP + 2 * BLOCK * LAST_PAIR


class World:
    """A rank whose steps of each kind take a given time."""

    def __init__(
        self, deferred_s: float, whole_s: float, others: Sequence[Sequence[float]] = ()
    ) -> None:
        self.now_s = 0.0
        self.modes: list[bool] = []
        self.asked = 0
        self._step_s = {True: deferred_s, False: whole_s}
        self._others = others
        self.trial = Trial()
        self.trial._clock = lambda: self.now_s  # type: ignore[method-assign]

    def step(self, extra_s: float = 0.0) -> None:
        self.now_s += self._step_s[self.trial.defers] + extra_s
        self.modes.append(self.trial.defers)
        self.trial.backward_ended(self, torch.device("cpu"))  # type: ignore[arg-type]

    def gather_numbers(self, numbers: Sequence[float], device: torch.device) -> list[list[float]]:
        """As `Exchange.gather_numbers`."""
        self.asked += 1
        return [list(numbers), *map(list, self._others)]

    def run(self, steps: int = END) -> "World":
        for _ in range(steps):
            self.step()
        return self


@pytest.mark.parametrize(
    ("times_s", "others", "pairs", "defers"),
    [
        ((1.0, 2.0), [], 2, True),
        ((2.0, 1.0), [], 2, False),
        ((1.0, 1.25), [], 3, True),
        ((1.0, 1.03), [], LAST_PAIR, True),
        ((1.0, 1.01), [], LAST_PAIR, False),  # below the saving that deferring needs
        ((1.0, 2.0), [[3.0, 2.5]], 4, False),
    ],
)
def test_the_plainly_faster_way_is_kept(
    times_s: Any, others: Any, pairs: int, defers: bool
) -> None:
    """By the time of the slowest rank."""
    end = WARM_UP + 2 * BLOCK * pairs
    world = World(*times_s, others).run(end - 1)
    assert not world.trial.is_over
    world.run(1 + 3 * BLOCK)
    assert world.trial.is_over and world.asked == pairs
    alternating = [place // BLOCK % 2 == 0 for place in range(2 * BLOCK * pairs)]
    assert world.modes == [True] * WARM_UP + alternating + [defers] * (3 * BLOCK)


def test_one_long_step_does_not_decide() -> None:
    for place, times_s in itertools.product(range(END), ((1.0, 1.2), (1.2, 1.0))):
        world = World(*times_s)
        for number in range(END):
            world.step(extra_s=60.0 if number == place else 0.0)
        assert world.trial.defers == (times_s[0] < times_s[1])

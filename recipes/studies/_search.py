"""Random search with the same budget for everybody, and what its trials say. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol


class Range(Protocol):
    """Where a hyper-parameter is drawn from."""

    def draw(self, count: int, generator: random.Random) -> list[Any]:
        """Return so many values that cover the range evenly, in random order."""


@dataclass(frozen=True)
class Log:
    """From ``low`` to ``high``, evenly in the logarithm: one value from each of as many equal parts."""

    low: float
    high: float

    def draw(self, count: int, generator: random.Random) -> list[float]:
        parts = [(part + generator.random()) / count for part in range(count)]
        generator.shuffle(parts)
        ratio = math.log(self.high / self.low)
        return [float(f"{self.low * math.exp(part * ratio):.3g}") for part in parts]

    def __str__(self) -> str:
        return f"{self.low:g} to {self.high:g}, logarithmic"


@dataclass(frozen=True)
class OneOf:
    """One of several values, each as often as the others, or once more."""

    values: tuple[Any, ...]

    def draw(self, count: int, generator: random.Random) -> list[Any]:
        drawn = [self.values[index % len(self.values)] for index in range(count)]
        generator.shuffle(drawn)
        return drawn

    def __str__(self) -> str:
        return " or ".join(str(value) for value in self.values)


Space = Mapping[str, Range]


def draw(space: Space, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return ``count`` configurations; each hyper-parameter by itself covers its range evenly."""
    generator = random.Random(seed)
    columns = {name: values.draw(count, generator) for name, values in space.items()}
    return [{name: column[index] for name, column in columns.items()} for index in range(count)]


@dataclass(frozen=True)
class SearchTrial:
    """One training.

    Args:
        optimizer: by its name in the study.
        config: which of its configurations.
        seed: of weights and of the order of images.
        at: the moments of measuring, in steps or epochs.
        values: what was measured then, loss or accuracy.
        step_s: this rank's processor time per step, measuring included.
    """

    optimizer: str
    config: int
    seed: int
    at: Sequence[float]
    values: Sequence[float]
    step_s: float = 0.0

    def first(self, target: float, *, falling: bool) -> float:
        """Return when the target was met first; infinity if it was not."""
        pairs = zip(self.at, self.values, strict=True)
        met = (moment for moment, value in pairs if (value <= target if falling else value >= target))
        return next(met, math.inf)

    def value_at(self, moment: float) -> float:
        """Return the last value measured until then; infinity if training had broken down before."""
        if not self.at or self.at[-1] < moment:
            return math.inf
        return [value for at, value in zip(self.at, self.values, strict=True) if at <= moment][-1]


@dataclass(frozen=True)
class Result:
    """The best configuration of one optimizer, by the median over its seeds, and how many met the target at all.

    Args:
        each: of each seed, when it met the target.
        met: so many configurations of ``configs`` met it, by their medians.
        step_s: processor time per step of the best, the median.
    """

    optimizer: str
    config: int
    each: tuple[float, ...]
    met: int
    configs: int
    step_s: float

    @property
    def median(self) -> float:
        return median(self.each)


def by_config(trials: Sequence[SearchTrial]) -> dict[int, list[SearchTrial]]:
    """Group trials by their configuration."""
    groups: dict[int, list[SearchTrial]] = {}
    for trial in trials:
        groups.setdefault(trial.config, []).append(trial)
    return groups


def late_loss(trials: Sequence[SearchTrial], budget: int, share: float) -> float:
    """Return the loss that the best configuration has after ``share`` of the budget: the target for everybody.

    Best is who has the lowest median loss at the end of the budget.
    """
    groups = by_config(trials).values()
    best = min(groups, key=lambda group: median(trial.value_at(budget) for trial in group))
    return median(trial.value_at(round(share * budget)) for trial in best)


def best_of(optimizer: str, trials: Sequence[SearchTrial], target: float, *, falling: bool) -> Result:
    """Return the configuration that meets the target first, by the median over its seeds."""
    groups = by_config([trial for trial in trials if trial.optimizer == optimizer])
    times = {
        config: tuple(trial.first(target, falling=falling) for trial in group)
        for config, group in groups.items()
    }
    # Of equal medians, those whose other seeds are quicker.
    config = min(times, key=lambda config: (median(times[config]), sorted(times[config])))
    met = sum(median(each) < math.inf for each in times.values())
    step_s = median(trial.step_s for trial in groups[config])
    return Result(optimizer, config, times[config], met, len(times), step_s)

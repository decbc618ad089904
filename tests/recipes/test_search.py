"""Random search with equal budgets: what is drawn, and what trials say. Pure."""

import math

import pytest

from studies._search import Log, OneOf, Result, SearchTrial, best_of, draw, late_loss

SPACE = {"lr": Log(1e-3, 1.0), "clip": OneOf((None, 1e-3, 1e-2))}


def trial(optimizer: str, config: int, seed: int, *values: float) -> SearchTrial:
    return SearchTrial(optimizer, config, seed, range(len(values)), values, step_s=0.1 * (seed + 1))


def test_the_same_seed_draws_the_same() -> None:
    assert draw(SPACE, 12) == draw(SPACE, 12)
    assert draw(SPACE, 12) != draw(SPACE, 12, seed=1)


def test_each_third_of_a_range_gets_a_third_of_the_configurations() -> None:
    drawn = draw(SPACE, 12)
    decades = [math.floor(math.log10(each["lr"])) for each in drawn]
    assert [decades.count(decade) for decade in (-3, -2, -1)] == [4, 4, 4]
    assert sorted(str(each["clip"]) for each in drawn) == sorted(4 * ["None", "0.001", "0.01"])


@pytest.mark.parametrize("count", [1, 2, 7])
def test_any_number_of_configurations_lies_within_the_ranges(count: int) -> None:
    drawn = draw(SPACE, count)
    assert len(drawn) == count
    assert all(1e-3 <= each["lr"] <= 1.0 for each in drawn)


def test_hyper_parameters_are_drawn_independently() -> None:
    drawn = draw({"a": Log(1.0, 10.0), "b": Log(1.0, 10.0)}, 12)
    assert [each["a"] for each in drawn] != [each["b"] for each in drawn]


@pytest.mark.parametrize(
    ("values", "target", "falling", "expected"),
    [
        ((3.0, 2.0, 1.0), 2.0, True, 1),
        ((3.0, 2.0, 2.5), 1.9, True, math.inf),
        ((0.5, 0.97, 0.9), 0.97, False, 1),
        ((0.5, 0.9), 0.97, False, math.inf),
        ((3.0, math.nan), 2.0, True, math.inf),
        ((), 2.0, True, math.inf),
    ],
)
def test_the_first_moment_at_the_target(
    values: tuple[float, ...], target: float, falling: bool, expected: float
) -> None:
    assert trial("adam", 0, 0, *values).first(target, falling=falling) == expected


def test_a_training_that_broke_down_has_no_value_later() -> None:
    broken = trial("adam", 0, 0, 3.0, 2.0, math.nan)
    assert broken.value_at(1) == 2.0
    assert broken.value_at(3) == math.inf


def test_the_late_loss_is_that_of_the_best_configuration_at_the_end() -> None:
    # The second configuration is ahead in the middle, and is not the best at the end.
    trials = [trial("adam", 0, seed, 9.0, 8.0, 6.0 + seed, 4.0, 1.0 + seed) for seed in range(3)]
    trials += [trial("adam", 1, seed, 9.0, 5.0, 5.0, 5.0, 5.0) for seed in range(3)]
    assert late_loss(trials, 4, 0.5) == 7.0
    assert late_loss(trials, 4, 1.0) == 2.0


def test_the_best_is_found_by_its_median_among_its_own_trials() -> None:
    trials = [
        *(trial("kfac", 0, seed, *values) for seed, values in enumerate([(1.0,), (9.0, 9.0), (9.0, 9.0)])),
        *(trial("kfac", 1, seed, 9.0, 9.0, 1.0) for seed in range(3)),
        *(trial("sgd", 2, seed, 1.0) for seed in range(3)),
    ]
    result = best_of("kfac", trials, 1.0, falling=True)
    assert result == Result("kfac", 1, (2, 2, 2), met=1, configs=2, step_s=pytest.approx(0.2))
    assert result.median == 2


def test_of_equal_medians_the_other_seeds_decide() -> None:
    trials = [
        *(trial("sgd", 0, seed, *([9.0] * steps), 1.0) for seed, steps in enumerate([2, 2, 3])),
        *(trial("sgd", 1, seed, *([9.0] * steps), 1.0) for seed, steps in enumerate([1, 2, 3])),
    ]
    assert best_of("sgd", trials, 1.0, falling=True).config == 1

"""The race of arms, by simulated clocks: its choice, its length, and that all ranks agree."""

import functools
import math
import random
import statistics
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from crossover_ddp._decoupled.race import (
    COUNTED,
    DEFERRED,
    FIRST,
    WARM_UP,
    WATCHED,
    WHOLE,
    Race,
    most_passes,
    seconds_between,
)
from crossover_ddp._engine.observe import Meter
from crossover_ddp.auto_hooks import _ARMS

TWO = (WHOLE, DEFERRED)
ARMS = {2: TWO, 3: _ARMS["same"], 7: _ARMS["rounded"], 8: _ARMS["any"]}
CPU = torch.device("cpu")
SHORTEST = WARM_UP + 1 + FIRST
SETTLING = 2  # passes in which new buckets have yet to settle
# The passes of the most blocks that compare the weakest arm, if it is apart, beyond the usual two.
MORE = 2 * (1 + FIRST) + 1 + COUNTED + 2 * SETTLING
LENGTH = 170  # more passes than any race takes
# By name: seconds per step of each arm, and of the first arm the seconds of waiting and on the wire.
Times = tuple[Sequence[float], float, float]
TIMES: dict[str, Times] = {
    "two, equal": ([1.0, 1.0], 0.2, 0.4),
    "two, 5 %": ([1.0, 0.95], 0.2, 0.5),
    "two, 20 %": ([1.0, 0.8], 0.25, 0.7),
    "two, slower": ([1.0, 1.3], 0.1, 0.5),
    "three, equal": ([1.0, 1.0, 1.0], 0.2, 0.4),
    "three, 10 %": ([1.0, 0.92, 0.90], 0.2, 0.5),
    "three, 25 %": ([1.0, 0.85, 0.75], 0.3, 0.7),
    "three, slower": ([1.0, 1.1, 1.3], 0.1, 0.5),
    "seven, M/C 0.4": ([1.0, 1.0, 1.0, 0.98, 1.0, 1.0, 1.02], 0.05, 0.4),
    "seven, M/C 1": ([1.0, 0.85, 0.80, 0.76, 0.74, 0.77, 0.76], 0.28, 0.7),
    "seven, M/C 2": ([1.0, 0.90, 0.86, 0.57, 0.55, 0.46, 0.45], 0.6, 0.8),
    "seven, M/C 3": ([1.0, 0.97, 0.94, 0.55, 0.47, 0.36, 0.33], 0.7, 0.95),
    "seven, costly": ([1.0, 1.1, 1.5, 1.5, 2.0, 1.8, 2.2], 0.05, 0.4),
    "seven, close": ([1.0, 0.98, 0.97, 0.96, 0.94, 0.95, 0.93], 0.1, 0.5),
}
# With ``losses="any"`` the eighth arm may change the loss, and is chosen only if it is faster.
ANY: dict[str, Times] = {
    "eight, M/C 0.4": ([1.0, 1.0, 1.0, 0.97, 1.0, 1.0, 1.02, 0.96], 0.05, 0.4),
    "eight, M/C 1": ([1.0, 0.85, 0.80, 0.76, 0.74, 0.77, 0.76, 0.73], 0.28, 0.7),
    "eight, M/C 3": ([1.0, 0.97, 0.94, 0.55, 0.47, 0.36, 0.33, 0.28], 0.7, 0.95),
}
FAST_LINK: dict[str, Times] = {
    "two": ([1.0, 1.1], 0.01, 0.1),
    "three": ([1.0, 1.03, 1.1], 0.01, 0.1),
    "seven": ([1.0, 1.03, 1.06, 1.04, 1.09, 1.08, 1.12], 0.01, 0.05),
}


class Table:
    """The gather of simulated ranks, which run in threads, as `Exchange.gather_numbers`."""

    def __init__(self, ranks: int) -> None:
        self._rows: list[list[float]] = [[] for _ in range(ranks)]
        self._all_are_here = threading.Barrier(ranks)

    def gather(self, rank: int, numbers: Sequence[float]) -> list[list[float]]:
        self._rows[rank] = [*numbers]
        self._all_are_here.wait(timeout=10)
        rows = [*self._rows]
        self._all_are_here.wait(timeout=10)
        return rows


class Place:
    """One rank's place at a table."""

    def __init__(self, table: Table, rank: int = 0) -> None:
        self._gather = functools.partial(table.gather, rank)

    def gather_numbers(self, numbers: Sequence[float], device: torch.device) -> list[list[float]]:
        return self._gather(numbers)


class Rank:
    """A simulated rank with a race.

    Args:
        times: see `TIMES`.
        pace: returns the factor and the extra seconds of a pass.
        place: where its numbers are gathered; default alone.
    """

    def __init__(
        self,
        times: Times,
        pace: Callable[[int], tuple[float, float]],
        place: Any = None,
        *,
        clock_offset_s: float = 0.0,
    ) -> None:
        self.steps_s, self._waits_s, self._wire_s = times
        self._pace = pace
        self._place = place or Place(Table(1))
        self._now_s = clock_offset_s
        self._meter = Meter()
        self.arms = ARMS[len(self.steps_s)]
        self.said: list[str] = []
        self.race = Race(self.arms, self._meter, report=self.said.append)
        self.race._clock = lambda device: self._now_s  # type: ignore[method-assign]
        # The number of the arm of each pass.
        self.passes: list[int] = []
        self._has_refitted = False
        self._unsettled = 0

    def step(self) -> None:
        arm = self.race.arm
        number = self.arms.index(arm)
        factor, extra_s = self._pace(len(self.passes))
        self.passes.append(number)
        step_s = self.steps_s[number]
        self._now_s += step_s * factor + extra_s
        if not arm.defers:
            waits_s = max(0.0, self._waits_s + step_s - self.steps_s[0])
            self._meter.exposed_s += waits_s * factor
            self._meter.under_way_s += self._wire_s * arm.rate
        if self._unsettled:
            self._unsettled -= 1
            self.race.pass_over()
        else:
            self.race.backward_ended(self._place, CPU)
        if self._has_refitted != self.race.arm.is_refitted and self.race.has_begun:
            self._has_refitted = self.race.arm.is_refitted
            self._unsettled = SETTLING

    def run(self) -> "Rank":
        while not self.race.is_over and len(self.passes) < LENGTH:
            self.step()
        return self

    @property
    def chosen(self) -> int:
        assert self.race.chosen is not None
        return self.arms.index(self.race.chosen)

    @property
    def loss(self) -> float:
        """By how much the chosen arm is slower than the fastest one."""
        return self.steps_s[self.chosen] / min(self.steps_s) - 1

    @property
    def cost(self) -> float:
        """The race's time beyond that of steps of the fastest arm, in such steps."""
        fastest_s = min(self.steps_s)
        return sum(self.steps_s[number] / fastest_s - 1 for number in self.passes)


def scattering(
    seed: int, scatter: float, drift: float = 0.0
) -> Callable[[int], tuple[float, float]]:
    """Return a pace that scatters from step to step, and drifts over some thirty steps."""
    rng = random.Random(seed)
    memory = math.exp(-1 / 30)

    def factors() -> Iterator[float]:
        slow = rng.gauss(0, drift)
        while True:
            slow = memory * slow + rng.gauss(0, drift * math.sqrt(1 - memory**2))
            yield math.exp(slow + rng.gauss(0, scatter))

    paces = factors()
    return lambda number: (next(paces), 0.0)


@pytest.mark.parametrize("scatter", [0.0, 0.01, 0.03, 0.1, 0.3, 0.6])
@pytest.mark.parametrize("name", FAST_LINK)
def test_where_nothing_can_be_gained_the_race_ends_after_its_first_block(
    name: str, scatter: float
) -> None:
    for seed in range(10):
        rank = Rank(FAST_LINK[name], scattering(seed, scatter)).run()
        assert (rank.chosen, len(rank.passes)) == (0, SHORTEST)
        assert SHORTEST <= 12


@pytest.mark.parametrize("name", [*TIMES, *ANY])
def test_without_scatter_the_weakest_arm_within_two_percent_is_chosen(name: str) -> None:
    rank = Rank((TIMES | ANY)[name], lambda number: (1.0, 0.0)).run()
    assert rank.chosen == next(
        number
        for number, step_s in enumerate(rank.steps_s)
        if step_s <= 1.02 * min(rank.steps_s) + 1e-9
    )
    assert len(rank.passes) <= {2: 30, 3: 45, 7: 75, 8: 80}[len(rank.arms)]


@pytest.mark.parametrize("scatter", [0.01, 0.03, 0.06, 0.1, 0.3, 0.6])
@pytest.mark.parametrize("name", TIMES)
def test_the_choice_is_as_good_as_the_scatter_allows_and_the_race_is_short(
    name: str, scatter: float
) -> None:
    """A stronger arm than necessary is rare, and costs little: in doubt it is a weaker one."""
    runs = [
        Rank(TIMES[name], scattering(seed, scatter, min(scatter, 0.1))).run() for seed in range(20)
    ]
    arms = len(runs[0].arms)
    # Behind the last round, blocks that contradict each other are followed by others.
    assert max(len(run.passes) for run in runs) <= most_passes(arms) + (MORE if arms > 2 else 0)
    assert (most_passes(2), most_passes(3), most_passes(7)) == (60, 75, 135)
    losses = sorted(run.loss for run in runs)
    allowed = 0.025 + 1.3 * scatter
    assert losses[-3] <= allowed, losses
    in_vain = [run for run in runs if run.chosen and run.steps_s[run.chosen] >= run.steps_s[0]]
    assert len(in_vain) <= (6 if arms == 2 else 10)
    if scatter <= 0.03:
        # Two percent of 2,000 steps.
        assert max(run.cost for run in runs) <= 45
        assert statistics.mean(run.cost for run in runs) <= 40
        worse = [run for run in runs if run.steps_s[run.chosen] > 1.02 * run.steps_s[0]]
        assert worse == []


@pytest.mark.parametrize(
    "name",
    ["two, 20 %", "two, slower", "three, 25 %", "three, slower", "seven, M/C 1", "seven, M/C 3"],
)
def test_a_busy_minute_does_not_decide(name: str) -> None:
    """Steps take three times as long during up to four blocks, whenever these are."""
    losses = []
    for begin in range(SHORTEST, 60, 3):
        for length in (4, 8, 16):
            scatter = scattering(begin, 0.01)

            def pace(
                number: int, begin: int = begin, end: int = begin + length
            ) -> tuple[float, float]:
                return scatter(number)[0] * (3.0 if begin <= number < end else 1.0), 0.0  # noqa: B023

            losses.append(Rank(TIMES[name], pace).run().loss)
    assert sorted(losses)[int(0.95 * len(losses))] <= 0.05
    assert max(losses) <= 0.1


@pytest.mark.parametrize("name", TIMES)
def test_an_evaluation_does_not_decide(name: str) -> None:
    for place in range(60):
        rank = Rank(TIMES[name], lambda number: (1.0, 60.0 if number == place else 0.0)).run()  # noqa: B023
        assert rank.loss <= 0.02 + 1e-9, place


@pytest.mark.parametrize(
    "name", ["two, equal", "two, 5 %", "three, 10 %", "seven, M/C 1", "seven, close"]
)
@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_decide_alike_in_the_same_pass(name: str, ranks: int) -> None:
    """Their clocks, scatters and paces differ, and one rank evaluates alone now and then."""
    for seed in range(6):
        table = Table(ranks)
        made = []
        for rank in range(ranks):
            scatter = scattering(100 * seed + rank, [0.01, 0.3, 0.05][rank])

            def pace(number: int, rank: int = rank, scatter: Any = scatter) -> tuple[float, float]:
                is_evaluation = rank == 0 and number % 13 == 7
                return scatter(number)[0] * (3.0 if rank == 1 else 1.0), 30.0 * is_evaluation

            made.append(Rank(TIMES[name], pace, Place(table, rank), clock_offset_s=1e3 * rank))
        threads = [threading.Thread(target=each.run) for each in made]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len({tuple(each.passes) for each in made}) == 1
        assert all(each.race.is_over for each in made)
        assert len({each.race.chosen for each in made}) == 1
        assert len({str(each.race.figures) for each in made}) == 1


def test_the_slowest_rank_counts() -> None:
    """Deferring is faster on this rank, and slower on the other one, which takes longer."""

    class Other:
        def gather_numbers(self, numbers: Sequence[float], device: Any) -> list[list[float]]:
            other = [2.5 if rank.race.defers else 2.0, numbers[1], 1.5, numbers[3]]
            return [[*numbers], other]

    rank = Rank(TIMES["two, 20 %"], lambda number: (1.0, 0.0), Other())
    assert rank.run().chosen == 0
    assert rank.race.figures["whole"] == pytest.approx(2.0)


@pytest.mark.parametrize("factor", [1.1, 1.3])
def test_another_race_is_run_when_steps_become_a_fifth_slower(factor: float) -> None:
    """Deferring no longer gains anything then."""
    slowed = [1.0]
    rank = Rank(([1.0, 0.8], 0.25, 0.7), lambda number: (slowed[0], 0.0)).run()
    assert rank.chosen == 1
    for _ in range(2 * WATCHED):
        rank.step()
    assert rank.race.is_over and len(rank.said) == 1
    slowed[0] = factor
    rank.steps_s = [0.8, 0.8]
    rank.race._meter.under_way_s = rank.race._meter.exposed_s = 0.0
    for _ in range(2 * WATCHED + LENGTH):
        rank.step()
    assert rank.race.is_over
    assert (rank.chosen, len(rank.said)) == ((1, 1) if factor == 1.1 else (0, 2))


def test_another_race_is_run_when_waits_appear_where_nothing_was_tried() -> None:
    """A busy minute in the first block had hidden the waits."""
    rank = Rank(FAST_LINK["two"], lambda number: (1.0, 0.0)).run()
    assert rank.chosen == 0
    rank._waits_s = 0.25
    rank.steps_s = [1.0, 0.8]
    for _ in range(WATCHED + 1 + LENGTH):
        rank.step()
    assert rank.chosen == 1 and len(rank.said) == 2


def test_the_verdict_names_the_arms_and_their_times() -> None:
    rank = Rank(TIMES["two, 20 %"], lambda number: (1.0, 0.0)).run()
    steps = SHORTEST + 3 * (1 + COUNTED)
    text = "a step takes 1.0000 s (whole), 0.8000 s (deferred)"
    assert rank.said == [
        f"chose deferred: 1.25 times as fast as whole, after {steps} steps; {text}"
    ]
    found = {name: pytest.approx(value) for name, value in rank.race.figures.items()}
    assert found == {"whole": 1.0, "deferred": 0.8, "C": 0.75, "N": 0.25, "M": 0.7}
    rank = Rank(FAST_LINK["two"], lambda number: (1.0, 0.0)).run()
    text = "no other is 2 % faster than whole"
    assert rank.said == [
        f"chose whole: {text}, after {SHORTEST} steps; a step takes 1.0000 s (whole)"
    ]


def test_a_single_arm_is_chosen_from_the_start() -> None:
    used: list[object] = []
    race = Race(TWO[-1:], Meter(), used.append)
    assert (race.chosen, race.is_over, race.arm) == (DEFERRED, True, DEFERRED)
    assert used == [DEFERRED]
    race.backward_ended(None, CPU)  # type: ignore[arg-type]


def test_only_given_arms_are_used() -> None:
    assert Race(ARMS[7][3::2], Meter()).arm == ARMS[7][3]
    assert Race(ARMS[7], Meter()).arm == ARMS[7][2]
    assert Race(TWO, Meter()).arm == DEFERRED


def test_seconds_between_events_are_those_of_the_device() -> None:
    class Event:
        def __init__(self, at_ms: float) -> None:
            self.at_ms = at_ms

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, later: "Event") -> float:
            return later.at_ms - self.at_ms

    assert seconds_between([1.0, 3.0, 4.0]) == [2.0, 1.0]
    assert seconds_between([Event(1000.0), Event(3000.0), Event(4000.0)]) == [2.0, 1.0]

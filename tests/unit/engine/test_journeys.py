"""Journeys, without processes: one end, and errors wherever a journey is; stations: tests/journeys."""

import itertools
import sys
from collections.abc import Callable, Coroutine, Generator
from typing import Any

import pytest

from crossover_ddp._engine.journeys import Gate, Place, Trip, at_once


def start(way: Coroutine[Any, Any, None], ends: list[BaseException | None]) -> Trip:
    trip = Trip("it", Place())
    trip.start(at_once, way, at_once, lambda _, error: ends.append(error))
    return trip


class Parked:
    """Where a journey stops until somebody calls ``go_on``."""

    def __init__(self) -> None:
        self.go_on: Callable[[], None] = lambda: None

    def __await__(self) -> Generator[Any, None, None]:
        yield lambda go_on: setattr(self, "go_on", go_on)


def test_what_is_no_exception_ends_the_journey_and_goes_on() -> None:
    ends: list[Any] = []

    async def way() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start(way(), ends)
    assert isinstance(ends[0], KeyboardInterrupt)


def test_many_open_gates_are_no_recursion() -> None:
    ends: list[Any] = []
    gate = Gate()
    gate.open()

    async def way() -> None:
        for _ in range(sys.getrecursionlimit()):
            await gate

    start(way(), ends)
    assert ends == [None]


def test_all_orders_of_a_journey_two_wakers_and_two_errors() -> None:
    """Whatever comes when, from whichever side: the way runs on one side at a time, ends once, and cleans up."""
    for order in set(itertools.permutations(["go on", "go on", "throw", "throw"])):
        parked, finals, ends = Parked(), [], []

        async def way(parked: Parked = parked, finals: list[int] = finals) -> None:
            try:
                await parked
                await parked
            finally:
                finals.append(1)

        journey = start(way(), ends)
        for call in order:
            parked.go_on() if call == "go on" else journey.throw(ValueError(call))
        assert len(ends) == 1 and finals == [1], order
        first = order.index("throw")
        assert (ends[0] is None) == (order[:first].count("go on") == 2), order

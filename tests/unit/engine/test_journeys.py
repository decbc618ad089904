"""Stations and journeys, without processes: one thread at a time, one end, and errors wherever a journey is."""

import itertools
import os
import threading
import weakref
from collections.abc import Callable, Coroutine, Generator
from typing import Any

import pytest

from crossover_ddp._engine.journeys import Place, Station, Trip, at_once
from tests.harness.waiting import eventually

Ends = list[BaseException | None]


def start(way: Coroutine[Any, Any, None]) -> tuple[Trip, Ends]:
    ends: Ends = []
    trip = Trip("it", Place())
    trip.start(at_once, way, at_once, lambda _, error: ends.append(error))
    return trip, ends


class Parked:
    """Where a journey stops until somebody calls ``go_on``."""

    def __init__(self) -> None:
        self.go_on: Callable[[], None] = lambda: None

    def __await__(self) -> Generator[Any, None, None]:
        yield lambda go_on: setattr(self, "go_on", go_on)


def test_a_station_is_a_thread_in_order_of_arrival_takes_nothing_in_a_fork_and_keeps_nothing_alive_when_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Any] = []
    station, done, kept = Station("here", lambda: seen.append("adopted")), threading.Event(), Parked()

    async def way(number: int) -> None:
        await station
        seen.append((number, threading.current_thread().name))

    for number in range(3):
        start(way(number))
    alive = weakref.ref(kept)
    station.put(lambda kept=kept: done.set())
    assert done.wait(60)
    del kept
    assert eventually(lambda: alive() is None)
    assert seen == ["adopted", (0, "here"), (1, "here"), (2, "here")]
    with monkeypatch.context() as fork, pytest.raises(RuntimeError, match="this process is a fork of its owner"):
        fork.setattr(os, "getpid", lambda: 0)
        station.put(lambda: None)
    station.stop()
    assert station.join(60)
    with pytest.raises(RuntimeError, match="takes no more work"):
        raise start(way(3))[1][0] or AssertionError("the journey went on")


def test_what_is_no_exception_ends_the_journey_and_goes_on() -> None:
    ends: Ends = []

    async def way() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Trip("it", Place()).start(at_once, way(), at_once, lambda _, error: ends.append(error))
    assert isinstance(ends[0], KeyboardInterrupt)


def test_all_orders_of_a_journey_two_wakers_and_two_errors() -> None:
    """Whatever comes when, from whichever side: the way runs on one side at a time, ends once, and cleans up."""
    for order in set(itertools.permutations(["go on", "go on", "throw", "throw"])):
        parked, finals = Parked(), []

        async def way(parked: Parked = parked, finals: list[int] = finals) -> None:
            try:
                await parked
                await parked
            finally:
                finals.append(1)

        journey, ends = start(way())
        for call in order:
            parked.go_on() if call == "go on" else journey.throw(ValueError(call))
        assert len(ends) == 1 and finals == [1], order
        first = order.index("throw")
        assert (ends[0] is None) == (order[:first].count("go on") == 2), order

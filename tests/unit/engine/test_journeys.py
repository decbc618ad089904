"""Journeys, without processes: one end, and errors wherever a journey is; stations: tests/journeys."""

import itertools
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Coroutine, Generator
from typing import Any

import pytest

from crossover_ddp._engine.journeys import Gate, Journey, JourneyThread, Place
from tests.harness.waiting import eventually


def start(way: Coroutine[Any, Any, None], ends: list[BaseException | None]) -> Journey:
    trip = Journey("it", Place())
    trip.start(way, lambda _, error: ends.append(error))
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


def test_a_journey_that_has_failed_waits_for_nothing_while_it_cleans_up() -> None:
    ends: list[BaseException | None] = []
    parked, resumed = Parked(), list[bool]()

    async def way() -> None:
        try:
            await parked
        finally:
            await parked
            resumed.append(True)

    error = ValueError("broken")
    start(way(), ends).throw(error)
    assert ends == [error] and not resumed


def test_a_station_keeps_no_job_alive_and_refuses_jobs_after_stop() -> None:
    station, done = JourneyThread("crossover-test"), threading.Event()
    kept = weakref.WeakMethod(done.set)
    station.put(done.set)
    assert done.wait(60)
    del done
    assert eventually(lambda: kept() is None)
    station.stop()
    assert station.join(60)
    with pytest.raises(RuntimeError, match="takes no more work: it was closed"):
        station.put(lambda: None)


def test_a_station_refuses_jobs_in_a_fork_made_while_its_lock_was_held() -> None:
    station = JourneyThread("crossover-test")
    with station._lock:  # as another thread might
        if not (child := os.fork()):
            code = 1
            try:
                signal.alarm(20)
                with pytest.raises(
                    RuntimeError, match="takes no more work: this process is a fork"
                ):
                    station.put(lambda: None)
                station.stop()
                code = 0
            finally:
                os._exit(code)
    assert os.waitpid(child, 0)[1] == 0

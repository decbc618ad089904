"""Threads end in their order, and none is left although one of them takes longer than anybody waits."""

import functools
import threading
import weakref

import pytest

from crossover_ddp._exchange.endings import stop_workers
from crossover_ddp._system.worker import Worker
from tests.harness.waiting import eventually


def _wait(event: threading.Event) -> None:
    assert event.wait(10)


def names_of_threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


def test_what_an_earlier_thread_still_hands_on_is_done() -> None:
    first, second = Worker("first"), Worker("second")
    done: list[str] = []
    go_on = threading.Event()

    def hand_on() -> None:
        assert go_on.wait(10)
        second.put(lambda: done.append("handed on"))

    second.put(lambda: done.append("before"))
    first.put(hand_on)
    threading.Timer(0.1, go_on.set).start()
    assert stop_workers([first, second], 10)
    assert done == ["before", "handed on"]


def test_later_threads_end_although_the_first_one_was_late() -> None:
    first, second, third = Worker("first"), Worker("second"), Worker("third")
    go_on = threading.Event()
    first.put(functools.partial(_wait, go_on))
    third.put(lambda: None)
    assert not stop_workers([first, second, third], 0.01)
    assert not stop_workers([first, second, third], 0.01)  # may be asked again
    assert names_of_threads() >= {"first", "third"}
    go_on.set()
    assert eventually(lambda: not names_of_threads() & {"first", "third"})
    for worker in (first, second, third):
        with pytest.raises(RuntimeError, match="takes no more work: it was closed"):
            worker.put(lambda: None)


def test_an_idle_thread_keeps_nothing_of_its_last_job_alive() -> None:
    class Kept:
        pass

    kept = Kept()
    seen, worker = weakref.ref(kept), Worker("idle")
    worker.put(functools.partial(lambda _: None, kept))
    del kept
    assert eventually(lambda: seen() is None)
    assert "idle" in names_of_threads()
    assert stop_workers([worker], 10)

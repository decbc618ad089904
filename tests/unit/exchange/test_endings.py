"""Threads end in their order, and none is left although one of them takes longer than anybody waits."""

import threading

from crossover_ddp._engine.endings import stop_workers
from crossover_ddp._system.worker import Worker


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

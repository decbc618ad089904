"""Devices that run behind the host's back, and what the mutex asks of their order; real ones are in tests/gpu."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from crossover_ddp._system import environment
from crossover_ddp._turns import joining
from crossover_ddp._turns.device_order import DeviceOrder, order_on
from crossover_ddp.errors import SegmentError
from crossover_ddp.gpu_mutex import GPUMutex
from tests.harness.waiting import eventually
from tests.unit.turns.mutexes import SOON_S, Make, held_up, membership_of


class Order(DeviceOrder):
    """Of a device that has done a turn when the test says so."""

    def __init__(self) -> None:
        super().__init__(torch.device("cuda", 0))
        self.over = threading.Event()
        self.over.set()
        self.check_usable = lambda: None
        self.streams = lambda: ()
        self.mark = lambda streams=(): self.over  # type: ignore[assignment,return-value]

    def wait(self, end: Any) -> None:
        assert end.wait(SOON_S)


def order_of(mutex: GPUMutex) -> Order:
    order: Any = membership_of(mutex).order
    return order


@pytest.fixture(autouse=True)
def noted_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "order_on", lambda device: Order())


def take_turns(*mutexes: GPUMutex) -> None:
    for mutex in mutexes:
        mutex.acquire()
        mutex.release()


def test_a_sibling_waits_until_the_device_has_done_the_turn_and_who_cannot_say_so_ends_its_turns(
    make: Make, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = make(), make()
    over = order_of(first).over
    over.clear()
    take_turns(first)
    with held_up(threads, second):
        over.set()
    over.clear()
    second.release()
    take_turns(first)
    error = SegmentError("expected the segment to stay, got it removed under way")
    monkeypatch.setattr(membership_of(first).segment, "publish_returned", raising(error))
    over.set()
    assert eventually(lambda: "removed under way" in str(first.disabled_because))


def test_who_leaves_lets_the_device_end_first(make: Make, threads: ThreadPoolExecutor) -> None:
    first, second = make(), make()
    over = order_of(first).over
    over.clear()
    take_turns(first)
    leaving = threads.submit(first.close)
    assert not eventually(lambda: second.stats()["siblings"] == 0, 0.1), "it left before the device had ended"
    over.set()
    leaving.result(SOON_S)
    assert second.stats()["siblings"] == 0


def raising(error: Exception) -> Any:
    def fail(*_: Any) -> Any:
        raise error

    return fail


def test_the_choice_of_an_order_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.DEVICE_ORDER, "events")
    with pytest.warns(FutureWarning, match="ordered on the host; unset it"):
        assert order_on(torch.device("cpu")) is None

"""Devices that run behind the host's back: what the mutex asks of their order, and what the order asks of CUDA.

That turns wait for the device, whatever becomes of siblings, is shown by real processes in tests/gpu.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from crossover_ddp._system import environment
from crossover_ddp._turns import device_order, joining
from crossover_ddp._turns.device_order import DeviceOrder, order_on
from crossover_ddp._turns.segment import EVENT_HANDLE_BYTES
from crossover_ddp.errors import SegmentError
from crossover_ddp.gpu_mutex import GPUMutex
from tests.harness.waiting import eventually
from tests.unit.turns.mutexes import SOON_S, Make, held_up, membership_of, warnings

GPU = torch.device("cuda", 0)


def raising(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any) -> Any:
        raise error

    return fail


class Order(DeviceOrder):
    """An order by events whose device does what the test says."""

    def __init__(self) -> None:
        super().__init__(GPU)
        self.handle = b"\1" * EVENT_HANDLE_BYTES
        self.over = threading.Event()
        self.over.set()
        self.check_usable = self.close = lambda: None
        self.streams = lambda: ()
        self.mark = lambda streams=(): None  # published at once
        self.follow = lambda *_: self.over
        self.left_behind = 0

    def wait(self, end: Any) -> None:
        assert end.wait(SOON_S)

    def leave_behind(self) -> None:
        self.left_behind += 1


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


# --- the mutex ----------------------------------------------------------------------------------------------------


def test_an_end_that_never_comes_costs_a_lease(make: Make) -> None:
    first, second = make(lease=0.2), make()
    order_of(second).follow = lambda *_: threading.Event()
    take_turns(first, second)
    assert order_of(second).left_behind == 1


def test_events_that_cannot_be_opened_are_told_once(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    first, second = make(), make()
    order_of(second).follow = raising(RuntimeError("invalid resource handle"))
    take_turns(first, second, first, second)
    (warning,) = warnings(caplog)
    assert "invalid resource handle" in warning
    assert "CROSSOVER_DEVICE_ORDER" in warning
    assert second.stats()["turns"] == 2


def test_a_sibling_waits_until_the_turn_is_published_and_who_cannot_ends_its_turns(
    make: Make, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = make(), make()
    reached = threading.Event()
    order_of(first).mark = lambda streams=(): reached
    take_turns(first)
    with held_up(threads, second):
        reached.set()
    reached.clear()
    second.release()
    take_turns(first)
    error = SegmentError("expected the segment to stay, got it removed under way")
    monkeypatch.setattr(membership_of(first).segment, "publish_returned", raising(error))
    reached.set()
    assert eventually(lambda: "removed under way" in str(first.disabled_because))


def test_who_leaves_lets_the_device_end_first_even_where_that_fails(make: Make) -> None:
    for error in (None, RuntimeError("CUDA error: unspecified launch failure")):
        first, second, siblings = make(), make(), list[int]()

        def ends(second: GPUMutex = second, siblings: list[int] = siblings, error: Any = error) -> None:
            siblings.append(second.stats()["siblings"])
            if error is not None:
                raise error

        order_of(first).close = ends
        first.close()
        assert siblings == [1], "the slot was given up before the device had ended"
        assert second.stats()["siblings"] == 0
        second.close()


# --- CUDA ---------------------------------------------------------------------------------------------------------


def test_without_ipc_the_host_orders_turns_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(environment.DEVICE_ORDER, "events")
    monkeypatch.setattr(device_order, "_take_event", raising(RuntimeError("not supported")))
    assert order_on(GPU).kind == "host"  # type: ignore[union-attr]
    assert "CUDA IPC events do not work on cuda:0" in warnings(caplog)[0]


def test_orders_of_other_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.DEVICE_ORDER, "semaphores")
    with pytest.warns(FutureWarning, match="ordered on the host"):
        assert order_on(GPU).kind == "host"  # type: ignore[union-attr]
    monkeypatch.setenv(environment.DEVICE_ORDER, "event")
    for device in (GPU, torch.device("cpu")):
        with pytest.raises(ValueError, match="one of host, events, got 'event'"):
            order_on(device)

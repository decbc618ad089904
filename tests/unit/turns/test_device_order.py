"""Devices that run behind the host's back: what the mutex asks of their order, and what the order asks of CUDA.

Turns of real processes on the fake device, in both orders, with deaths and captures: tests/gpu.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from crossover_ddp._system import environment
from crossover_ddp._turns import device_order
from crossover_ddp._turns.device_order import DeviceOrder
from crossover_ddp._turns.slots import EVENT_HANDLE_BYTES
from crossover_ddp.errors import SegmentError, UnsupportedConfigurationError
from crossover_ddp.gpu_mutex import GPUMutex
from tests.harness.waiting import eventually
from tests.unit.turns.mutexes import SOON_S, Make, group, make, membership_of, warnings

__all__ = ["group", "make"]  # fixtures


class Order(DeviceOrder):
    """An order by events whose device does what the test says."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.handle = bytes(EVENT_HANDLE_BYTES)
        self.usable = True
        self.reached: threading.Event | None = None  # None: published at once
        self.followed = 0
        self.end: Callable[[], threading.Event] = _over
        self.left_behind = 0
        self.on_close: Callable[[], None] = lambda: None

    def check_usable(self) -> None:
        if not self.usable:
            raise UnsupportedConfigurationError("expected no capture")

    def mark(self, streams: Sequence[Any] = ()) -> Any:
        return self.reached

    def wait(self, end: Any) -> None:
        assert end.wait(SOON_S)

    def follow(self, process: object, handle: bytes, wake: Callable[[], None]) -> threading.Event:
        self.followed += 1
        return self.end()

    def leave_behind(self) -> None:
        self.left_behind += 1

    def close(self) -> None:
        self.on_close()


def _over() -> threading.Event:
    over = threading.Event()
    over.set()
    return over


@pytest.fixture(autouse=True)
def noted_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_order, "DeviceOrder", Order)


def order_of(mutex: GPUMutex) -> Order:
    order = membership_of(mutex).order
    assert isinstance(order, Order)
    return order


def take_turns(*mutexes: GPUMutex) -> None:
    for mutex in mutexes:
        mutex.acquire()
        mutex.release()


# --- the mutex ----------------------------------------------------------------------------------------------------


def test_a_turn_begins_when_siblings_turns_are_over_on_the_device(make: Make) -> None:
    first, second = make(), make()
    ends = threading.Event()
    order_of(second).end = lambda: ends
    take_turns(first)
    taking = threading.Thread(target=second.acquire)
    taking.start()
    taking.join(0.2)
    assert taking.is_alive()
    ends.set()
    membership_of(second).segment.ring_self()
    taking.join(SOON_S)
    second.release()
    take_turns(first)
    assert (order_of(second).followed, order_of(first).followed) == (1, 1)
    assert second.stats()["leases_expired"] == order_of(second).left_behind == 0


def test_an_end_that_never_comes_is_left_behind_with_its_dead_owner(make: Make) -> None:
    first, second = make(), make()

    def dies() -> threading.Event:
        first.close()
        return threading.Event()

    order_of(second).end = dies
    take_turns(first, second)
    assert order_of(second).left_behind == 1
    assert second.stats()["turns"] == 1


def test_an_end_that_never_comes_costs_a_lease(make: Make) -> None:
    first, second = make(lease=0.2), make()
    order_of(second).end = threading.Event
    take_turns(first, second)
    assert order_of(second).left_behind == 1


def test_events_that_cannot_be_opened_are_told_once(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    first, second = make(), make()

    def fail() -> threading.Event:
        raise RuntimeError("invalid resource handle")

    order_of(second).end = fail
    take_turns(first, second, first, second)
    (warning,) = warnings(caplog)
    assert "invalid resource handle" in warning
    assert "CROSSOVER_DEVICE_ORDER" in warning
    assert second.stats()["turns"] == 2


def test_a_sibling_waits_until_the_turn_is_published(make: Make) -> None:
    first, second = make(), make()
    reached = order_of(first).reached = threading.Event()
    take_turns(first)
    taking = threading.Thread(target=second.acquire)
    taking.start()
    taking.join(0.2)
    assert taking.is_alive()
    reached.set()
    taking.join(SOON_S)
    assert second.holding


def test_in_a_graph_capture_turns_are_refused_and_nothing_changes(make: Make) -> None:
    first, second = make(), make()
    order = order_of(first)
    order.usable = False
    with pytest.raises(UnsupportedConfigurationError, match="no capture"):
        first.acquire()
    assert first.stats()["turns"] == 0
    order.usable = True
    take_turns(second)
    first.acquire()
    order.usable = False
    with pytest.raises(UnsupportedConfigurationError, match="no capture"):
        first.release()
    assert first.holding
    order.usable = True
    first.release()
    assert first.stats()["turn"] == 2, "the refused calls have drawn a turn, or given one back"
    assert first.disabled_because is None


def test_a_turn_that_cannot_be_published_ends_the_turns(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    mutex = make()
    reached = order_of(mutex).reached = threading.Event()
    take_turns(mutex)

    def fail(turn: int) -> None:
        raise SegmentError("expected the segment to stay, got it removed under way")

    monkeypatch.setattr(membership_of(mutex).segment, "publish_returned", fail)
    reached.set()
    assert eventually(lambda: "removed under way" in str(mutex.disabled_because))


def test_who_leaves_lets_the_device_end_first(make: Make) -> None:
    first, second = make(), make()
    siblings = []
    order_of(first).on_close = lambda: siblings.append(second.stats()["siblings"])
    first.close()
    assert siblings == [1], "the slot was given up before the device had ended"
    assert second.stats()["siblings"] == 0


def test_a_device_that_fails_at_the_end_does_not_keep_the_slot(make: Make) -> None:
    first, second = make(), make()

    def fail() -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    order_of(first).on_close = fail
    first.close()
    assert second.stats()["siblings"] == 0


# --- CUDA ---------------------------------------------------------------------------------------------------------


GPU = torch.device("cuda", 0)


def test_without_ipc_the_host_orders_turns_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(device: torch.device) -> None:
        raise RuntimeError("not supported")

    monkeypatch.setenv(environment.DEVICE_ORDER, "events")
    monkeypatch.setattr(device_order, "_take_event", refuse)
    assert DeviceOrder(GPU).kind == "host"
    assert "CUDA IPC events do not work on cuda:0" in warnings(caplog)[0]


def test_orders_of_other_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.DEVICE_ORDER, "semaphores")
    with pytest.warns(FutureWarning, match="ordered on the host"):
        assert DeviceOrder(GPU).kind == "host"
    monkeypatch.setenv(environment.DEVICE_ORDER, "event")
    with pytest.raises(ValueError, match="one of host, events, got 'event'"):
        DeviceOrder(GPU)

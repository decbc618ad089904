"""The order of turns on a device, with events and streams that only note what is done to them.

What follows from it for several processes is in test_gpu_turns.py, what the hardware does in tests/gpu.
"""

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from crossover_ddp._system import device as device_module
from crossover_ddp._turns import (
    event_order as event_order_module,
)
from crossover_ddp._turns import (
    gpu_order as gpu_order_module,
)
from crossover_ddp._turns.device_order import EventOrder, HostOrder, SynchronizedOrder, device_order
from crossover_ddp._turns.event_order import Pools
from crossover_ddp._turns.slots import EVENT_COUNT, EVENT_HANDLE_BYTES

GPU = torch.device("cuda", 0)
SOON_S = 60.0


class Alone:
    """A process whose siblings all live."""

    def is_alive(self, slot: int, incarnation: int) -> bool:
        return True

    def make_private_file(self, suffix: str) -> int:
        raise OSError("no files in this test")

    open_private_file = make_private_file

    def remove_private_file(self, suffix: str) -> None:
        raise AssertionError("nothing was made")


class Notes:
    """What happened, in order; and the gate at which every wait of a host blocks."""

    def __init__(self) -> None:
        self.made = itertools.count()
        self.seen: list[tuple[str, Any]] = []
        self.opened: dict[bytes, int] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.ipc_works = True
        self.over: set[str] = set()

    def add(self, what: str, which: Any) -> None:
        self.seen.append((what, which))

    def of(self, *kinds: str) -> list[tuple[str, Any]]:
        return [note for note in self.seen if note[0] in kinds]


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Notes]:
    notes = Notes()

    class Event:
        def __init__(
            self,
            *,
            interprocess: bool = False,
            enable_timing: bool = False,
            blocking: bool = False,
            name: str = "",
        ) -> None:
            assert not (interprocess and enable_timing), "CUDA refuses such an event"
            self.name = name or f"own{next(notes.made)}"

        def record(self, stream: object = None) -> None:
            notes.add("record", self.name)

        def ipc_handle(self) -> bytes:
            if not notes.ipc_works:
                raise RuntimeError("CUDA error: operation not supported")
            return self.name.encode().ljust(EVENT_HANDLE_BYTES, b"\0")

        @classmethod
        def from_ipc_handle(cls, device: torch.device, handle: bytes) -> "Event":
            name = handle.rstrip(b"\0").decode()
            notes.add("open", name)
            if name.startswith("gone"):
                raise RuntimeError("CUDA error: invalid resource handle")
            return cls(name=name)

        def query(self) -> bool:
            return self.name in notes.over

        def synchronize(self) -> None:
            assert notes.gate.wait(SOON_S)
            notes.add("synchronize", self.name)

    class Stream:
        def wait_event(self, event: Event) -> None:
            notes.add("wait", event.name)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: notes.add("set_device", device))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream())
    monkeypatch.setattr(event_order_module, "_pools", Pools())
    monkeypatch.setattr(gpu_order_module, "_DRAIN_TIMEOUT_S", 0.05)
    monkeypatch.setattr(gpu_order_module, "_SETTLE_TIMEOUT_S", 0.05)
    yield notes
    notes.gate.set()
    for order in made:
        notes.over.update(f"own{index}" for index in range(100))
        notes.over.update(each.name for events in order._opened.values() for each in events)  # type: ignore[attr-defined]
        order.close()
    made.clear()


made: list[EventOrder] = []


def event_order(pools: Pools | None = None) -> EventOrder:
    """Make an order that is closed at the end of the test."""
    made.append(EventOrder(GPU, EVENT_COUNT, Alone(), pools=pools or Pools()))
    return made[-1]


def handles(*names: str) -> bytes:
    return b"".join(name.encode().ljust(EVENT_HANDLE_BYTES, b"\0") for name in names)


def test_a_turn_is_told_after_its_end_is_recorded(notes: Notes) -> None:
    order = event_order()
    notes.seen.clear()
    order.finish(7, lambda: notes.add("publish", 7))
    assert notes.seen == [("record", "own1"), ("publish", 7)]


def test_a_turn_whose_record_fails_is_not_told(notes: Notes, monkeypatch: pytest.MonkeyPatch) -> None:
    order = event_order()

    def fail(event: object, stream: object = None) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda.Event, "record", fail)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        order.finish(7, lambda: notes.add("publish", 7))
    assert not notes.of("publish")


def test_every_event_is_recorded_before_its_handle_is_told(notes: Notes) -> None:
    order = event_order()
    assert notes.of("record") == [("record", "own0"), ("record", "own1")]
    assert order.handles == handles("own0", "own1")
    assert len(order.handles) == EVENT_COUNT * EVENT_HANDLE_BYTES


def test_recorder_and_waiter_choose_the_same_event(notes: Notes) -> None:
    order = event_order()
    for turn in (1, 2, 3, 4, 12, 13):
        notes.seen.clear()
        order.finish(turn, lambda: None)
        order.follow((3, 99), order.handles, turn)
        (_, recorded), *_ = notes.of("record")
        assert notes.of("wait") == [("wait", recorded)]


def test_handles_are_opened_once_per_owner_of_a_slot(notes: Notes) -> None:
    order = event_order()
    for turn in range(1, 50):
        order.follow((3, 99), handles("a0", "a1"), turn)
    assert notes.of("open") == [("open", "a0"), ("open", "a1")]
    order.follow((3, 100), handles("b0", "b1"), 50)
    assert notes.of("open")[2:] == [("open", "b0"), ("open", "b1")]
    assert notes.of("wait")[-1] == ("wait", "b0")


def test_handles_of_a_slots_former_owner_are_closed(notes: Notes) -> None:
    order = event_order()
    for incarnation in range(50):
        order.follow((3, incarnation), handles(f"a{incarnation}", f"b{incarnation}"), 1)
    order.follow((4, 7), handles("c0", "c1"), 1)
    assert set(order._opened) == {(3, 49), (4, 7)}


@pytest.mark.parametrize(
    ("found", "why"),
    [(handles("gone", "gone"), "invalid resource handle"), (handles("one"), "in another way")],
)
def test_handles_that_mean_nothing_here_are_told_once(notes: Notes, found: bytes, why: str) -> None:
    order = event_order()
    assert why in str(order.follow((3, 99), found, 1))
    assert order.follow((3, 99), found, 3) is None
    assert len(notes.of("open")) <= 1, "tried again at every turn"
    assert not notes.of("wait")
    assert order.follow((3, 100), handles("a0", "a1"), 4) is None
    assert notes.of("wait") == [("wait", "a0")]


def test_the_own_processs_events_are_not_opened(notes: Notes) -> None:
    pools = Pools()
    first, second = event_order(pools), event_order(pools)
    first.follow((3, 99), second.handles, 1)
    assert not notes.of("open"), "CUDA refuses to open an event in the process that has made it"
    assert notes.of("wait") == [("wait", "own3")]


def test_nobody_waits_for_what_is_over(notes: Notes) -> None:
    order = event_order()
    notes.over.add("a1")
    order.follow((3, 99), handles("a0", "a1"), 1)
    assert not notes.of("wait")
    order.follow((3, 99), handles("a0", "a1"), 2)
    assert notes.of("wait") == [("wait", "a0")]


def test_no_host_waits_before_the_end(notes: Notes) -> None:
    notes.gate.clear()  # whoever synchronises would hang
    order = event_order()
    order.finish(1, lambda: None)
    order.follow((3, 99), handles("a0", "a1"), 2)
    assert not notes.of("synchronize")
    order.close()  # the device is stuck, and still it ends
    order.close()


def test_the_next_order_of_a_process_takes_the_pool_over(notes: Notes) -> None:
    pools = Pools()
    first = event_order(pools)
    other = event_order(pools)
    assert first.handles != other.handles, "two mutexes at a time share a pool"
    notes.over.update({"own0", "own1"})
    first.close()
    assert event_order(pools).handles == first.handles
    assert next(notes.made) == 2 * EVENT_COUNT, "events were made anew"


def test_a_pool_that_may_still_be_recorded_is_not_given_to_others(notes: Notes) -> None:
    pools = Pools()
    first = event_order(pools)
    first.close()
    assert event_order(pools).handles != first.handles


def test_without_ipc_turns_are_told_by_a_thread_in_order(notes: Notes) -> None:
    notes.gate.clear()
    order = SynchronizedOrder(GPU)
    assert order.handles == b""  # siblings have nothing to wait for on the device
    for turn in (1, 2, 3):
        order.finish(turn, lambda turn=turn: notes.add("publish", turn))  # type: ignore[misc]
    assert not notes.of("publish"), "told before the device was done"
    notes.gate.set()
    order.close()
    assert order.waits_on_host
    assert [which for _, which in notes.of("publish")] == [1, 2, 3]
    waits = [kind for kind, _ in notes.of("synchronize", "publish")]
    assert waits == ["synchronize", "publish"] * 3
    assert set(notes.of("set_device")) == {("set_device", GPU)}
    assert not any(thread.name == "crossover-turn-end" for thread in threading.enumerate())


def test_the_thread_may_close_the_order_itself(notes: Notes) -> None:
    order = SynchronizedOrder(GPU)
    closed = threading.Event()

    def give_up() -> None:
        order.close()
        closed.set()

    order.finish(1, give_up)
    assert closed.wait(SOON_S)
    order.close()


@pytest.mark.parametrize("wanted", [None, "events", "semaphores", "host"])
def test_gpus_without_ipc_are_ordered_on_the_host_and_the_log_says_so(
    notes: Notes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, wanted: str | None
) -> None:
    if wanted is not None:
        monkeypatch.setenv("CROSSOVER_DEVICE_ORDER", wanted)
    notes.ipc_works = False
    with caplog.at_level(logging.WARNING):
        order = device_order(GPU, EVENT_COUNT, Alone())
    assert isinstance(order, SynchronizedOrder)
    assert len(caplog.records) == (wanted not in (None, "host"))
    if wanted == "events":
        assert "operation not supported" in caplog.text
    order.close()


def test_by_default_no_stream_waits_for_another_process(notes: Notes) -> None:
    order = device_order(GPU, EVENT_COUNT, Alone())
    assert isinstance(order, SynchronizedOrder)
    assert order.waits_on_host, "siblings publish a turn after its kernels have finished"
    assert order.follow((1, 7), b"", 3) is None
    assert notes.seen == []
    order.close()


def test_a_turn_told_at_once_does_not_overtake_one_told_late(notes: Notes) -> None:
    order = event_order()
    notes.gate.clear()
    order.finish(1, lambda: notes.add("publish", 1), on_host=True)
    order.finish(2, lambda: notes.add("publish", 2))
    assert not notes.of("publish")
    notes.gate.set()
    order.close()
    assert notes.of("publish") == [("publish", 1), ("publish", 2)]


def test_after_late_turns_the_next_is_told_at_once_again(notes: Notes) -> None:
    order = event_order()
    told = threading.Event()
    order.finish(1, told.set, on_host=True)
    assert told.wait(SOON_S)
    deadline_s = time.monotonic() + SOON_S
    while order._late:
        assert time.monotonic() < deadline_s, "it tells late for ever"
        time.sleep(0.001)
    notes.gate.clear()
    order.finish(2, lambda: notes.add("publish", 2))
    assert notes.of("publish") == [("publish", 2)]


def test_a_broken_device_does_not_keep_a_turn(notes: Notes, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(event: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    order = SynchronizedOrder(GPU)
    monkeypatch.setattr(torch.cuda.Event, "synchronize", fail)
    order.finish(1, lambda: notes.add("publish", 1))
    order.close()
    assert notes.of("publish") == [("publish", 1)]


def test_a_cpu_needs_no_order_of_its_own() -> None:
    order = device_order(torch.device("cpu"), EVENT_COUNT, Alone())
    assert isinstance(order, HostOrder)
    assert order.handles == b""
    assert not order.on_device
    assert not order.waits_on_host
    told = []
    order.check_usable()
    order.finish(1, lambda: told.append(1))
    assert order.follow((0, 1), b"", 1) is None
    order.admit([])
    order.close()
    assert told == [1]


def test_a_gpu_is_named_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = type("Properties", (), {"uuid": "3e8f-1"})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert device_module.device_name(GPU) == "GPU-3e8f-1"


@pytest.mark.parametrize(("initialized", "expected"), [(True, "cuda:1"), (False, "cpu")])
def test_the_default_is_the_gpu_that_is_in_use(
    monkeypatch: pytest.MonkeyPatch, initialized: bool, expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert device_module.default_device() == torch.device(expected)

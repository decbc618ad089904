"""The order of turns on a device, with events and streams that only note what is done to them.

What the hardware does with real ones is in tests/gpu/test_device_order.py.
"""

import contextlib
import itertools
import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from crossover_ddp import _device_order
from crossover_ddp._device_order import EventOrder, HostOrder, SynchronizedOrder, device_order
from crossover_ddp._segment_files import EVENT_COUNT, EVENT_HANDLE_BYTES

GPU = torch.device("cuda", 0)
SOON_S = 10.0


class Notes:
    """What happened, in order; and the gate at which every wait of a host blocks."""

    def __init__(self) -> None:
        self.made = itertools.count()
        self.seen: list[tuple[str, Any]] = []
        self.opened: dict[bytes, int] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.ipc_works = True

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
    yield notes
    notes.gate.set()


def handles(*names: str) -> bytes:
    return b"".join(name.encode().ljust(EVENT_HANDLE_BYTES, b"\0") for name in names)


def test_a_turn_is_told_after_its_end_is_recorded(notes: Notes) -> None:
    order = EventOrder(GPU, EVENT_COUNT)
    notes.seen.clear()
    order.finish(7, lambda: notes.add("publish", 7))
    assert notes.seen == [("record", "own1"), ("publish", 7)]


def test_a_turn_whose_record_fails_is_not_told(notes: Notes, monkeypatch: pytest.MonkeyPatch) -> None:
    order = EventOrder(GPU, EVENT_COUNT)

    def fail(event: object, stream: object = None) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda.Event, "record", fail)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        order.finish(7, lambda: notes.add("publish", 7))
    assert not notes.of("publish")


def test_every_event_is_recorded_before_its_handle_is_told(notes: Notes) -> None:
    order = EventOrder(GPU, EVENT_COUNT)
    assert notes.of("record") == [("record", "own0"), ("record", "own1")]
    assert order.handles == handles("own0", "own1")
    assert len(order.handles) == EVENT_COUNT * EVENT_HANDLE_BYTES


def test_recorder_and_waiter_choose_the_same_event(notes: Notes) -> None:
    order = EventOrder(GPU, EVENT_COUNT)
    for turn in (1, 2, 3, 4, 12, 13):
        notes.seen.clear()
        order.finish(turn, lambda: None)
        order.follow((3, 99), order.handles, turn)
        (_, recorded), *_ = notes.of("record")
        assert notes.of("wait") == [("wait", recorded)]


def test_handles_are_opened_once_per_owner_of_a_slot(notes: Notes) -> None:
    order = EventOrder(GPU, EVENT_COUNT)
    for turn in range(1, 50):
        order.follow((3, 99), handles("a0", "a1"), turn)
    assert notes.of("open") == [("open", "a0"), ("open", "a1")]
    order.follow((3, 100), handles("b0", "b1"), 50)
    assert notes.of("open")[2:] == [("open", "b0"), ("open", "b1")]
    assert notes.of("wait")[-1] == ("wait", "b0")


def test_a_handle_that_cannot_be_opened_is_tried_again(notes: Notes) -> None:
    order = EventOrder(GPU, EVENT_COUNT)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="invalid resource handle"):
            order.follow((3, 99), handles("gone", "gone"), 1)
    assert notes.of("open") == [("open", "gone"), ("open", "gone")]
    assert not notes.of("wait")


def test_no_host_waits_before_the_end(notes: Notes) -> None:
    notes.gate.clear()  # whoever synchronises would hang
    order = EventOrder(GPU, EVENT_COUNT)
    order.finish(1, lambda: None)
    order.follow((3, 99), handles("a0", "a1"), 2)
    notes.gate.set()
    order.close()
    assert notes.of("synchronize") == [("synchronize", "own0"), ("synchronize", "own1")]


def test_without_ipc_turns_are_told_by_a_thread_in_order(notes: Notes) -> None:
    notes.gate.clear()
    order = SynchronizedOrder(GPU)
    assert order.handles == b""  # siblings have nothing to wait for on the device
    for turn in (1, 2, 3):
        order.finish(turn, lambda turn=turn: notes.add("publish", turn))  # type: ignore[misc]
    assert not notes.of("publish"), "told before the device was done"
    notes.gate.set()
    order.close()
    assert [which for _, which in notes.of("publish")] == [1, 2, 3]
    waits = [kind for kind, _ in notes.of("synchronize", "publish")]
    assert waits == ["synchronize", "publish"] * 3
    assert notes.of("set_device") == [("set_device", GPU)]
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


def test_gpus_without_ipc_are_ordered_on_the_host_and_the_log_says_so(
    notes: Notes, caplog: pytest.LogCaptureFixture
) -> None:
    assert isinstance(device_order(GPU, EVENT_COUNT), EventOrder)
    notes.ipc_works = False
    with caplog.at_level(logging.WARNING):
        order = device_order(GPU, EVENT_COUNT)
    assert isinstance(order, SynchronizedOrder)
    assert "operation not supported" in caplog.text
    order.close()


def test_a_cpu_needs_no_order_of_its_own() -> None:
    order = device_order(torch.device("cpu"), EVENT_COUNT)
    assert isinstance(order, HostOrder)
    assert order.handles == b""
    told = []
    order.finish(1, lambda: told.append(1))
    order.follow((0, 1), b"", 1)
    order.close()
    assert told == [1]


def test_a_gpu_is_named_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = type("Properties", (), {"uuid": "3e8f-1"})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert _device_order.device_name(GPU) == "GPU-3e8f-1"


@pytest.mark.parametrize(("initialized", "expected"), [(True, "cuda:1"), (False, "cpu")])
def test_the_default_is_the_gpu_that_is_in_use(
    monkeypatch: pytest.MonkeyPatch, initialized: bool, expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert _device_order.default_device() == torch.device(expected)

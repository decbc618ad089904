"""Order of turns on the device itself: what the next holder's kernels wait for.

On a GPU the host runs ahead of the device, so a turn given back on the host still has kernels in the queue.
The holder records an inter-process CUDA event behind them before it gives back; the next holder's stream
waits for that event, and no host synchronises. Our design, on CUDA IPC events.

[Note: one record per turn]
A wait on an event covers its last record only. The host publishes the turn *after* it has recorded the event
and a sibling looks at the turn before it enqueues its wait, so the record it waits for has always happened.
The same event is recorded again only after the sibling has had its own turn, hence after that wait.
"""

import logging
import queue
import threading
from collections.abc import Callable
from typing import Protocol

import torch

logger = logging.getLogger(__name__)

_JOIN_TIMEOUT_S = 10.0


class DeviceOrder(Protocol):
    """How a turn's end is known to the device."""

    handles: bytes
    """What siblings need in order to wait for this process, as published in its slot."""

    def finish(self, turn: int, publish: Callable[[], None]) -> None:
        """Mark the end of ``turn`` behind what the current stream has queued; ``publish`` tells siblings."""

    def follow(self, key: tuple[int, int], handles: bytes, turn: int) -> None:
        """Let the current stream wait for the end of a sibling's ``turn``."""

    def close(self) -> None:
        """Free what the device holds, once nothing waits for it."""


class HostOrder:
    """CPU devices: when the host says that the turn is over, it is."""

    handles = b""

    def finish(self, turn: int, publish: Callable[[], None]) -> None:
        """Publish at once."""
        publish()

    def follow(self, key: tuple[int, int], handles: bytes, turn: int) -> None:
        """Nothing runs behind the host's back."""

    def close(self) -> None:
        """Nothing to free."""


class EventOrder:
    """GPUs with working CUDA IPC: a fixed pool of inter-process events, allocated once.

    Args:
        device: the GPU, as this process numbers it.
        event_count: size of the pool; two, so that a lease that ran out does not meet a record under way.
    """

    def __init__(self, device: torch.device, event_count: int) -> None:
        self._device = device
        self._opened: dict[tuple[int, int], list[torch.cuda.Event]] = {}
        with torch.cuda.device(device):
            self._pool = [
                torch.cuda.Event(interprocess=True, enable_timing=False) for _ in range(event_count)
            ]
            for event in self._pool:  # an event that was never recorded has no handle on some drivers
                event.record()
            self.handles = b"".join(bytes(event.ipc_handle()) for event in self._pool)

    def finish(self, turn: int, publish: Callable[[], None]) -> None:
        """Record, then publish: see [Note: one record per turn]."""
        self._pool[turn % len(self._pool)].record(torch.cuda.current_stream(self._device))
        publish()

    def follow(self, key: tuple[int, int], handles: bytes, turn: int) -> None:
        """Enqueue a device-side wait; the sibling has recorded already."""
        if key not in self._opened:
            self._opened[key] = self._open(handles)
        events = self._opened[key]
        torch.cuda.current_stream(self._device).wait_event(events[turn % len(events)])

    def _open(self, handles: bytes) -> list[torch.cuda.Event]:
        size = len(self.handles) // len(self._pool)
        with torch.cuda.device(self._device):
            return [
                torch.cuda.Event.from_ipc_handle(self._device, handles[start : start + size])
                for start in range(0, len(handles), size)
            ]

    def close(self) -> None:
        """Wait for the own records: destroying an event under way can block its waiters for ever."""
        for event in self._pool:
            event.synchronize()


class SynchronizedOrder:
    """GPUs where CUDA IPC does not work (WSL 2): a thread waits for the device, then tells siblings.

    Costs the hand-over the time the host takes to notice, and the host's run-ahead across a turn's end.
    """

    handles = b""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ended: queue.SimpleQueue[tuple[torch.cuda.Event, Callable[[], None]] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._run, name="crossover-turn-end", daemon=True)
        self._thread.start()

    def finish(self, turn: int, publish: Callable[[], None]) -> None:
        """Publish from the thread once the device has done what is queued now; ``publish`` must not raise."""
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self._device))
        self._ended.put((event, publish))

    def follow(self, key: tuple[int, int], handles: bytes, turn: int) -> None:
        """The sibling published after its device was done."""

    def close(self) -> None:
        """Let the thread finish what is queued and end."""
        self._ended.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=_JOIN_TIMEOUT_S)

    def _run(self) -> None:
        torch.cuda.set_device(self._device)
        while (ended := self._ended.get()) is not None:
            event, publish = ended
            event.synchronize()
            publish()


def device_order(device: torch.device, event_count: int) -> DeviceOrder:
    """Return the order that works on ``device``; says so in the log if that is not the device's own."""
    if device.type != "cuda":
        return HostOrder()
    try:
        return EventOrder(device, event_count)
    except RuntimeError as error:
        logger.warning(
            "CUDA IPC events do not work on %s (%s): turns are ordered on the host, which costs some of the gain",
            device,
            error,
        )
        return SynchronizedOrder(device)


def device_name(device: torch.device) -> str:
    """Return the name of a GPU that is the same in every process and container: its UUID."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def default_device() -> torch.device:
    """Return the current GPU if this process uses one, else the CPU."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")

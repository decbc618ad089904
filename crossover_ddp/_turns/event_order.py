"""Turns on a GPU ordered by inter-process events of CUDA.

[Note: one record per turn]
A wait on an event covers its last record at the moment of the call; later records do not change it. The host publishes
the turn *after* it has recorded the event, and a sibling reads the turn before it enqueues its wait, so the
record it waits for has always been enqueued. The same event is recorded again only after the sibling has had its own
turn, hence after that wait. Where that does not hold (a lease ran out, a turn was taken ahead) the sibling
may wait for a later turn of the same process instead: longer than it had to, but never for a missing record.

[Note: events live as long as the process]
Using an opened event after its owner has destroyed it is undefined, and siblings may have it open when a mutex is
closed. So a pool is never destroyed: the process's next mutex on the device takes it over.
"""

import functools
import logging
import threading
from typing import ClassVar, Final, NamedTuple

import torch

from crossover_ddp._system.cuda_driver import IPC_EVENT_SUPPORTED, cuda_driver

from .gpu_order import GpuOrder, Key, SiblingFiles, WaitWatcher, drained

logger = logging.getLogger(__name__)


class Pool(NamedTuple):
    """Events that siblings can open, and the handles by which they do."""

    events: tuple[torch.cuda.Event, ...]
    handles: bytes


class Pools:
    """All pools that this process has made; see [Note: events live as long as the process]."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._unused: dict[torch.device, list[Pool]] = {}
        self._own: dict[bytes, tuple[torch.cuda.Event, ...]] = {}

    def take(self, device: torch.device, event_count: int) -> Pool:
        """Return an unused pool. Raises ``RuntimeError`` where CUDA IPC does not work."""
        with self._lock:
            unused = self._unused.get(device)
            if unused:
                return unused.pop()
            pool = _new_pool(device, event_count)
            self._own[pool.handles] = pool.events
            return pool

    def give_back(self, device: torch.device, pool: Pool) -> None:
        """Keep a pool whose records are over for the next `take`."""
        with self._lock:
            self._unused.setdefault(device, []).append(pool)

    def own(self, handles: bytes) -> tuple[torch.cuda.Event, ...] | None:
        """Return the events if they are this process's own, which CUDA cannot open by handle; None otherwise."""
        with self._lock:
            return self._own.get(handles)


def _new_pool(device: torch.device, event_count: int) -> Pool:
    with torch.cuda.device(device):
        events = tuple([torch.cuda.Event(interprocess=True, enable_timing=False) for _ in range(event_count)])
        for event in events:  # an event that was never recorded has no handle on some drivers
            event.record()
        return Pool(events, b"".join(bytes(event.ipc_handle()) for event in events))


_pools: Final = Pools()


class EventOrder(GpuOrder):
    """GPUs with working CUDA IPC: a fixed pool of inter-process events, allocated once.

    Args:
        device: the GPU, as this process numbers it.
        event_count: size of the pool.
        siblings: the process's place among its siblings.
        pools: where pools are kept; default the process's own.

    On failure: the constructor raises ``RuntimeError`` where the device, or the driver, has no such events.
    """

    kind: ClassVar[str] = "events"

    def __init__(
        self, device: torch.device, event_count: int, siblings: SiblingFiles, *, pools: Pools | None = None
    ) -> None:
        _check_supported(device)
        super().__init__(device)
        self._pools = _pools if pools is None else pools
        self._pool = self._pools.take(device, event_count)
        self.handles = self._pool.handles
        # No events: they could not be opened.
        self._opened: dict[Key, tuple[torch.cuda.Event, ...]] = {}
        self._watch = WaitWatcher(device, lambda key: siblings.is_alive(*key))
        self._mourned: set[Key] = set()
        self._closed = False

    def _mark(self, turn: int, stream: torch.cuda.Stream) -> None:
        events = self._pool.events
        events[turn % len(events)].record(stream)

    def follow(self, key: Key, handles: bytes, turn: int) -> str | None:
        """Enqueue a wait on the device for a record that the sibling has enqueued already, unless it is over."""
        if key not in self._opened:
            problem = self._open(key, handles)
            if problem is not None:
                return problem
        events = self._opened[key]
        if not events:
            return None
        event = events[turn % len(events)]
        if not event.query():
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(event)
            # An event of our own: a sibling that goes on records its events again, and those never look finished.
            passed = torch.cuda.Event()
            passed.record(stream)
            self._watch.add(key, passed.query, functools.partial(self._mourn, key))
        return None

    def _open(self, key: Key, handles: bytes) -> str | None:
        slot, _ = key
        for former in [known for known in self._opened if known[0] == slot]:
            del self._opened[former]  # closes the events; a wait that is enqueued stays
        self._opened[key] = ()
        if len(handles) != len(self.handles):
            return "the sibling orders its turns in another way: set the same CROSSOVER_DEVICE_ORDER in both jobs"
        own = self._pools.own(handles)
        if own is not None:
            self._opened[key] = own
            return None
        size = len(handles) // len(self._pool.events)
        try:
            with torch.cuda.device(self._device):
                self._opened[key] = tuple(
                    [
                        torch.cuda.Event.from_ipc_handle(self._device, handles[start : start + size])
                        for start in range(0, len(handles), size)
                    ]
                )
        except RuntimeError as error:
            return f"its events cannot be opened: {error}"
        return None

    def _mourn(self, key: Key) -> None:
        if key in self._mourned:
            return
        self._mourned.add(key)
        logger.error(
            "a sibling on %s was killed before its kernels were done, and this job's stream waits for their end; if "
            "the job makes no more progress the driver has dropped them: restart it, with "
            "CROSSOVER_DEVICE_ORDER=host (or =semaphores), which does not wait for the dead",
            self._device,
        )

    def close(self) -> None:
        """Wait for the own records, for at most 30 s: the own stream may wait for the record of a dead process."""
        if self._closed:
            return
        self._closed = True
        self._watch.close()
        super().close()
        if drained(self._pool.events):
            self._pools.give_back(self._device, self._pool)
        self._opened.clear()


def _check_supported(device: torch.device) -> None:
    """Raise ``RuntimeError`` if the driver says that the device has no such events (WSL 2)."""
    try:
        supported = cuda_driver().attribute(device.index or 0, IPC_EVENT_SUPPORTED)
    except (OSError, RuntimeError) as error:  # making a pool will show it
        logger.debug("does not know whether %s supports IPC events: %s", device, error)
        return
    if not supported:
        raise RuntimeError("the driver says that the device has none")

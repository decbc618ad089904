"""The end of a turn on the device itself, whose kernels run on when the host has given the turn back. Our design.

``CROSSOVER_DEVICE_ORDER`` says what the next holder waits for:

- ``host``, the default: the holder's own thread waits for the device, and then publishes the turn.
- ``events``: the holder records an inter-process CUDA event and publishes the turn at once. A thread of the next
  holder waits for that event.

[Note: no stream waits for another process]
A process may die before its kernels are done (out of memory, a SIGTERM, a SIGKILL), and nobody can take back a wait
that a stream has been given: an innocent job would stand still for ever. So only threads wait for a foreign event, and
a thread whose event never comes is left behind. The price: some tens of microseconds once per turn,
in which a thread notices the end.

[Note: one record per turn]
A wait for an event covers its last record. The turn is published *after* the record, and a sibling reads the turn
before it waits, so what it waits for has always been enqueued.
"""

import logging
import os
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import torch

from crossover_ddp._system import environment
from crossover_ddp._system.cuda_driver import adopt_thread
from crossover_ddp._system.worker import Worker
from crossover_ddp.errors import UnsupportedConfigurationError

logger = logging.getLogger(__name__)

Process = tuple[int, int]
"""A sibling process: its slot and incarnation."""

_WAITER: Final = "crossover-turn-wait"


class _Shared(NamedTuple):
    """An event that siblings can open by its handle.

    To use an opened event after its owner has destroyed it is undefined, so it lives as long as the process; the next
    mutex on the device takes it over.
    """

    event: torch.cuda.Event
    handle: bytes


_unused: Final[dict[torch.device, list[_Shared]]] = {}


def _take_event(device: torch.device) -> _Shared:
    """Return an unused event. Raises ``RuntimeError`` where CUDA IPC does not work."""
    if _unused.get(device):
        return _unused[device].pop()
    with torch.cuda.device(device):
        event = torch.cuda.Event(interprocess=True, enable_timing=False)
        event.record()  # without a record it has no handle on some drivers
        return _Shared(event, bytes(event.ipc_handle()))


def order_on(device: torch.device) -> "DeviceOrder | None":
    """Return the order on a device, as this process numbers it; None for a CPU, which is done when the host is.

    On failure: ``ValueError`` if ``CROSSOVER_DEVICE_ORDER`` names no order.
    """
    wanted = os.environ.get(environment.DEVICE_ORDER) or environment.DEVICE_ORDERS[0]
    if wanted == "semaphores":
        words = "CROSSOVER_DEVICE_ORDER=semaphores is no more: turns are ordered on the host; unset it"
        warnings.warn(words, FutureWarning, stacklevel=2)
        wanted = "host"
    if wanted not in environment.DEVICE_ORDERS:
        raise ValueError(
            f"expected {environment.DEVICE_ORDER} to be one of {', '.join(environment.DEVICE_ORDERS)}, "
            f"got {wanted!r}; unset it"
        )
    return DeviceOrder(device, wanted) if device.type == "cuda" else None


class DeviceOrder:
    """Mark the ends of the own turns on a GPU, and wait for those of siblings.

    Where CUDA IPC does not work (WSL 2) the order ``events`` becomes ``host``, with a warning.
    """

    def __init__(self, gpu: torch.device, wanted: str = "host") -> None:
        self._gpu = gpu
        self._own: _Shared | None = None
        self._opened: dict[Process, torch.cuda.Event] = {}
        self._waiter = Worker(_WAITER)
        self._end_stream: torch.cuda.Stream | None = None
        if wanted == "events":
            try:
                self._own = _take_event(gpu)
            except RuntimeError as error:
                words = "CUDA IPC events do not work on %s (%s): turns are ordered on the host"
                logger.warning(words, gpu, error)
        self.kind = "host" if self._own is None else "events"
        """The order in force, for people to read."""
        self.handle = b"" if self._own is None else self._own.handle
        """What siblings need in order to wait for this process; published in its slot."""

    def check_usable(self) -> None:
        """Raise ``UnsupportedConfigurationError`` while the current stream captures a CUDA graph."""
        if torch.cuda.is_current_stream_capturing():
            raise UnsupportedConfigurationError(
                "expected turns to begin and end outside of a CUDA graph, got a stream that is capturing: a replay "
                "would take no turn; acquire before replay() and release after it"
            )

    # --- own turns -----------------------------------------------------------------------------------------

    def streams(self) -> Sequence[torch.cuda.Stream]:
        """Return the streams on which a turn that begins now may compute: the current and the default one."""
        return torch.cuda.current_stream(self._gpu), torch.cuda.default_stream(self._gpu)

    def mark(self, streams: Sequence[torch.cuda.Stream] = ()) -> torch.cuda.Event | None:
        """Mark the end of a turn behind what the current stream, and ``streams``, have queued.

        Returns the event for which to `wait` before the turn is published; None where it may be published at once.
        """
        stream = torch.cuda.current_stream(self._gpu)
        if streams:
            self._end_stream = self._end_stream or torch.cuda.Stream(self._gpu)
            for each in (stream, *streams):
                self._end_stream.wait_stream(each)
            stream = self._end_stream
        if self._own is not None:
            self._own.event.record(stream)
            return None
        end = torch.cuda.Event(blocking=True)
        end.record(stream)
        return end

    def wait(self, end: torch.cuda.Event) -> None:
        """Block until the device has reached ``end``. On a thread of the package's own."""
        torch.cuda.set_device(self._gpu)
        adopt_thread()
        try:
            end.synchronize()
        except RuntimeError as error:  # nothing of a broken context runs any more; training will see it too
            logger.debug("a turn on %s ended with an error of the device: %s", self._gpu, error)

    def is_done(self, streams: Sequence[torch.cuda.Stream]) -> bool:
        """Say whether the device has done all that these streams were given. On a thread of the package's own."""
        torch.cuda.set_device(self._gpu)
        adopt_thread()
        for stream in streams:
            with torch.cuda.stream(stream):
                # To ask a stream that captures a graph would break the capture.
                if torch.cuda.is_current_stream_capturing() or not stream.query():
                    return False
        return True

    # --- siblings' turns -----------------------------------------------------------------------------------

    def follow(self, process: Process, handle: bytes, wake: Callable[[], None]) -> threading.Event:
        """Let a thread wait for the end of a sibling's turn; the result is set then, and ``wake`` called.

        Raises ``RuntimeError`` if its event cannot be opened here.
        """
        over = threading.Event()
        event = self._event_of(process, handle)
        if event.query():
            over.set()
            return over

        def wait() -> None:
            self.wait(event)
            over.set()
            wake()

        self._waiter.put(wait)
        return over

    def _event_of(self, process: Process, handle: bytes) -> torch.cuda.Event:
        if process not in self._opened:
            slot, _ = process
            self._opened = {known: event for known, event in self._opened.items() if known[0] != slot}
            self._opened[process] = torch.cuda.Event.from_ipc_handle(self._gpu, handle)
        return self._opened[process]

    def leave_behind(self) -> None:
        """Give the wait of `follow` up: its thread may never come back, the next wait has another one."""
        self._waiter.stop()
        self._waiter = Worker(_WAITER)

    def close(self) -> None:
        """Wait for the end of the own last turn. May be called again."""
        own, self._own = self._own, None
        self._opened.clear()
        self._waiter.stop()
        if own is not None:
            self.wait(own.event)
            _unused.setdefault(self._gpu, []).append(own)

"""Device buffers on a ring: gloo's point-to-point takes host memory only, so copies go through pinned memory.

Copies run on two streams of our own, one for each direction (PCIe carries both at once), ordered after the
compute stream by events. No thread but the two workers of the engine ever blocks on them.
"""

import contextlib
from collections.abc import Callable
from typing import Final, Protocol

import torch

from crossover_ddp._system.cuda_driver import adopt_thread

from .collectives import HostBuffer
from .layout import Layout, Span

_AS_IT_IS: Final = contextlib.nullcontext()


class Mark(Protocol):
    """A point in a stream of copies; ``torch.cuda.Event`` is one."""

    def synchronize(self) -> None:
        """Block until everything before it is done."""


class Copier(Protocol):
    """The asynchronous copies of one device. Tests replace it by one that copies as late as it may."""

    def begin(self) -> None:
        """Order what follows in direction ``down`` after everything that the current stream was given."""

    def down(self, host: torch.Tensor, device: torch.Tensor) -> Mark:
        """Begin to copy to the host; the mark says when ``host`` may be read."""

    def up(self, device: torch.Tensor, host: torch.Tensor) -> None:
        """Begin to copy to the device."""

    def step(
        self, device: torch.Tensor, host: torch.Tensor, owner_step: Callable[[torch.Tensor], None]
    ) -> Mark:
        """Copy up, run ``owner_step`` on the device, copy down, all in order."""

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Lend pinned host memory that no copy uses any more: the ring may write to it at once."""

    def trim(self) -> None:
        """Give back what is not lent."""


class CudaCopier:
    """Copies of one CUDA device; ``up_stream`` is the engine's side stream, on which buckets complete."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.up_stream = torch.cuda.Stream(device)
        self._down_stream = torch.cuda.Stream(device)

    def begin(self) -> None:
        """See :class:`Copier`."""
        self._down_stream.wait_stream(torch.cuda.current_stream(self.device))

    def down(self, host: torch.Tensor, device: torch.Tensor) -> Mark:
        """See :class:`Copier`."""
        return _copy_down(host, device, self._down_stream)

    def up(self, device: torch.Tensor, host: torch.Tensor) -> None:
        """See :class:`Copier`."""
        with torch.cuda.stream(self.up_stream):
            device.copy_(host, non_blocking=True)

    def step(
        self, device: torch.Tensor, host: torch.Tensor, owner_step: Callable[[torch.Tensor], None]
    ) -> Mark:
        """See :class:`Copier`."""
        self.up(device, host)
        with torch.cuda.stream(self.up_stream):
            owner_step(device)
        return _copy_down(host, device, self.up_stream)

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """See :class:`Copier`. Torch lends what nobody holds again, when the copies that used it are over."""
        return torch.empty(numel, dtype=dtype, pin_memory=True)

    def trim(self) -> None:
        """Unpin what no bucket needs at the moment. The host waits."""
        self.up_stream.synchronize()
        torch._C._host_emptyCache()


def _copy_down(host: torch.Tensor, device: torch.Tensor, stream: torch.cuda.Stream) -> Mark:
    with torch.cuda.stream(stream):
        host.copy_(device, non_blocking=True)
        # Blocking: the waiting thread sleeps instead of spinning on a core.
        done = torch.cuda.Event(blocking=True)
        done.record(stream)
    return done


class Side:
    """Where the buckets of one device complete: nowhere special on a CPU, a side stream on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.copier = CudaCopier(device) if device.type == "cuda" else None

    def current(self) -> contextlib.AbstractContextManager[object]:
        """Make the side stream the current one."""
        return _AS_IT_IS if self.copier is None else torch.cuda.stream(self.copier.up_stream)

    def adopt_thread(self) -> None:
        """Make the device the calling thread's own; a worker calls it before anything else.

        A new thread's device is number 0, and leaving a stream's ``with`` block goes back to it: on another device
        every rank would so make a context, half a gigabyte, on device 0.
        """
        if self.copier is not None:
            torch.cuda.set_device(self.device)
            adopt_thread()

    def follow_compute(self) -> None:
        """Order what the side stream gets from now on after everything the current stream was given."""
        if self.copier is not None:
            self.copier.up_stream.wait_stream(torch.cuda.current_stream(self.device))

    def mark(self) -> Callable[[], None]:
        """Return a function that blocks until the side stream has done what it was given so far."""
        if self.copier is None:
            return _nothing
        # Blocking: the worker sleeps instead of spinning on a core.
        event = torch.cuda.Event(blocking=True)
        event.record(self.copier.up_stream)
        return event.synchronize

    def future(self) -> torch.futures.Future[torch.Tensor]:
        """Make a Future whose waiters are ordered after the side stream."""
        return torch.futures.Future(devices=None if self.copier is None else [self.device])


def _nothing() -> None:
    return None


class StagedBuffer(HostBuffer):
    """A device buffer with a pinned copy on the host that the ring works on.

    Construct it with the producing stream current: the copies down are enqueued at once, in the order in
    which rank ``rank`` of a ring needs the parts, and each part is awaited only when it is needed.
    ``own_only`` copies nothing but the own part down: for a gather without a reduce-scatter.
    """

    def __init__(
        self, device: torch.Tensor, layout: Layout, rank: int, copier: Copier, *, own_only: bool = False
    ) -> None:
        super().__init__(copier.take(device.numel(), device.dtype))
        self._device = device
        self._copier = copier
        self._marks: dict[Span, Mark] = {}
        copier.begin()
        # The own part is needed last.
        for step in range(layout.parts - 1 if own_only else 0, layout.parts):
            part = layout.part((rank - 1 - step) % layout.parts)
            if part.numel:
                self._marks[part] = copier.down(self.piece(part), device[part.start : part.stop])

    def ready(self, part: Span) -> None:
        """Block until ``part`` has been copied to the host."""
        mark = self._marks.pop(part, None)
        if mark is not None:
            mark.synchronize()

    def landed(self, span: Span) -> None:
        """Begin to copy ``span`` to the device."""
        self._copier.up(self._device[span.start : span.stop], self.piece(span))

    def step(self, part: Span, owner_step: Callable[[torch.Tensor], None]) -> None:
        """Run ``owner_step`` on the device and fetch what it made of the part."""
        piece = self._device[part.start : part.stop]
        self._copier.step(piece, self.piece(part), owner_step).synchronize()

    def release(self) -> None:
        """Let go of the pinned memory, all copies up having been enqueued."""
        del self.tensor

"""What orders the work of journeys on a device: nothing on a CPU, a side stream on a GPU.

[Note: the side stream] All that journeys issue on a device, they issue on one stream of ours. It follows the stream of
whoever starts a journey, and whoever waits for a journey has his stream follow it. `Journey` makes it current around
each piece of the way, so that memory which a journey allocates belongs to it, too.

[Note: who waits for the compute stream] Where the host drives journeys (gloo), one of our threads waits for the compute
stream before a journey begins. If the side stream waited instead, the copies of an earlier journey, enqueued behind
that, would wait for gradients that are not theirs. Where the device drives them (NCCL), the side stream waits.
"""

import contextlib
from collections.abc import Awaitable, Callable
from typing import Protocol

import torch

from crossover_ddp._system.cuda_driver import adopt_thread

from .endings import stop_workers
from .journeys import Station

GradientFuture = torch.futures.Future[torch.Tensor]
Begin = Callable[[], Awaitable[None]]


class Place(Protocol):
    """Where the tensors of journeys are."""

    def follow(self) -> Begin:
        """Note, on the thread that starts a journey, what it comes after; it awaits what the result returns."""

    def side(self) -> contextlib.AbstractContextManager[object]:
        """Be where a journey's work is issued."""

    def mark(self) -> Callable[[], None]:
        """Return what orders its caller's work behind all that journeys have issued until now."""

    def reached(self) -> Callable[[], None]:
        """Return what blocks until all that journeys have issued until now is done."""

    def future(self) -> GradientFuture:
        """Make a Future; who waits for it is ordered behind what the stream that completes it has been given."""

    def adopt_thread(self) -> None:
        """Make the calling thread, which is ours, fit for journeys."""

    def close(self, timeout_s: float) -> bool:
        """End threads; return whether they did in time."""


class Host:
    """A CPU: what has been called has been done."""

    def follow(self) -> Begin:
        """See `Place`."""
        return _at_once

    def side(self) -> contextlib.AbstractContextManager[object]:
        """See `Place`."""
        return _AS_IT_IS

    def mark(self) -> Callable[[], None]:
        """See `Place`."""
        return _nothing

    def reached(self) -> Callable[[], None]:
        """See `Place`."""
        return _nothing

    def future(self) -> GradientFuture:
        """See `Place`."""
        return GradientFuture()

    def adopt_thread(self) -> None:
        """See `Place`: gradients are not recorded there."""
        torch.set_grad_enabled(False)

    def close(self, timeout_s: float) -> bool:
        """See `Place`."""
        return True


class Device:
    """A CUDA device, see [Note: the side stream].

    Args:
        device: its number is known.
        by_host: whether the host drives journeys, see [Note: who waits for the compute stream].
    """

    def __init__(self, device: torch.device, *, by_host: bool) -> None:
        self.device, self.stream, self._by_host = device, torch.cuda.Stream(device), by_host
        self._following = Station("crossover-follow", self.adopt_thread)

    def follow(self) -> Begin:
        """See `Place`."""
        current = torch.cuda.current_stream(self.device)
        if not self._by_host:
            self.stream.wait_stream(current)
            return _at_once
        there = current.record_event(sleeping_event())

        async def reached() -> None:
            await self._following
            there.synchronize()

        return reached

    def side(self) -> contextlib.AbstractContextManager[object]:
        """See `Place`."""
        return torch.cuda.stream(self.stream)

    def mark(self) -> Callable[[], None]:
        """See `Place`."""
        event = self.stream.record_event()
        return lambda: torch.cuda.current_stream(self.device).wait_event(event)

    def reached(self) -> Callable[[], None]:
        """See `Place`."""
        event = self.stream.record_event(sleeping_event())
        return lambda: event.synchronize()

    def future(self) -> GradientFuture:
        """See `Place`."""
        return GradientFuture(devices=[self.device])

    def adopt_thread(self) -> None:
        """See `Place`.

        A new thread's device is number 0, and leaving a stream's ``with`` block goes back to it: each rank would make
        a context there, half a gigabyte.
        """
        torch.set_grad_enabled(False)
        torch.cuda.set_device(self.device)
        adopt_thread()

    def close(self, timeout_s: float) -> bool:
        """See `Place`."""
        return stop_workers([self._following], timeout_s)


def sleeping_event() -> torch.cuda.Event:
    """Make an event whose waiter sleeps instead of spinning on a core."""
    return torch.cuda.Event(blocking=True)


_AS_IT_IS = contextlib.nullcontext()


async def _at_once() -> None:
    return None


def _nothing() -> None:
    return None

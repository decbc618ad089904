"""Work on a CUDA device, and a backend's own collectives.

[Note: the side stream] All that journeys issue on a device, they issue on one stream of ours. It follows the stream of
whoever starts a journey, and whoever waits for a journey has his stream follow it. `Trip` makes it current around
each piece of the way, so that memory which a journey allocates belongs to it, too.

[Note: who waits for the compute stream] Where the host drives journeys (gloo), one of our threads waits for the compute
stream before a journey begins. If the side stream waited instead, the copies of an earlier journey, enqueued behind
that, would wait for gradients that are not theirs. Where the device drives them (NCCL), the side stream waits.

[Note: one order] Ranks that issue a backend's own collectives in different orders wait for each other for ever. So all
are issued by the thread that starts the journey, among the model's own: nothing there is awaited.

[Note: staging] A collective copies what it sends to pinned memory, on a stream for copies down, which follows the side
stream. A thread sleeps until the copy is there, and hands it to the network. What arrives is copied back on a stream
for copies up, which the side stream follows; PCIe carries both directions at once.

No memory waits for an event of ours. Pinned memory is simply dropped: torch lends it again only after the copies that
read or fill it, and gloo holds what it uses. Device memory that is copied into is free of earlier kernels: the copy
down followed the side stream, and the thread has waited for it; so it does even if there is nothing to copy.
What a journey was begun with may be let go of by whoever began it without waiting: a journey that nobody has waited for
has the stream that it was begun on follow when it goes, before what it holds does.
"""

import copy
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from crossover_ddp._system.cuda_driver import adopt_thread

from .journeys import Begin, GradientFuture, Place, Station, at_once, living, stop_all
from .links import Alone, Gloo, Halfway, Layout, Link, LinkAround, nothing_halfway, parts

Pair = tuple[Tensor, Tensor]  # where to, where from
# Torch 2.14 gave them new names, and warns of the old ones.
_REDUCE_SCATTER: Final = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_ALL_GATHER: Final = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Device(Place):
    """A CUDA device whose number is known, see [Note: the side stream].

    ``by_host``: whether the host drives journeys, see [Note: who waits for the compute stream].
    """

    def __init__(self, device: torch.device, *, by_host: bool) -> None:
        self.device, self.stream, self._by_host = device, torch.cuda.Stream(device), by_host
        self._following = Station("crossover-follow", self.adopt_thread)

    def follow(self) -> Begin:
        current = torch.cuda.current_stream(self.device)
        if not self._by_host:
            self.stream.wait_stream(current)
            return at_once
        there = current.record_event(sleeping_event())

        async def reached() -> None:
            await self._following
            there.synchronize()

        return reached

    def here(self) -> Callable[[Callable[[], None]], None]:
        current = torch.cuda.current_stream(self.device)

        def order(follow: Callable[[], None]) -> None:
            # The device, too: a thread of the user's own goes back to number 0, see `adopt_thread`.
            with torch.cuda.device(self.device), torch.cuda.stream(current):
                if (
                    not torch.cuda.is_current_stream_capturing()
                ):  # an event of no capture would break it
                    follow()

        return order

    def side(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self.stream)

    def mark(self) -> Callable[[], None]:
        event = self.stream.record_event()
        return lambda: torch.cuda.current_stream(self.device).wait_event(event)

    def reached(self) -> Callable[[], None]:
        event = self.stream.record_event(sleeping_event())
        return lambda: event.synchronize()

    def future(self) -> GradientFuture:
        return GradientFuture(devices=[self.device])

    def adopt_thread(self) -> None:
        """Choose the device, too.

        A new thread's device is number 0, and leaving a stream's ``with`` block goes back to it: each rank would make
        a context there, half a gigabyte.
        """
        super().adopt_thread()
        torch.cuda.set_device(self.device)
        adopt_thread()

    def close(self, timeout_s: float) -> bool:
        return stop_all([self._following], timeout_s)


def sleeping_event() -> torch.cuda.Event:
    """Make an event whose waiter sleeps instead of spinning on a core."""
    return torch.cuda.Event(blocking=True)


class Native(Alone):
    """A backend's own collectives, NCCL's and its like: a network, and copies of it as links, see [Note: one order].

    On a device all goes to the stream that is current, which `Trip` has chosen. The group is held weakly. Bytes are
    those of an exchange around a ring.
    """

    in_program_order = True
    alignment_bytes = (
        128  # NCCL is much slower on parts that begin elsewhere (pytorch#195450, nccl#413)
    )

    def __init__(self, group: dist.ProcessGroup, place: Place) -> None:
        super().__init__(place)
        self._group = weakref.ref(group)
        self.rank, self.size = group.rank(), group.size()

    def link(self) -> Link:
        return copy.copy(self)

    async def reduce_scatter(self, flat: Tensor, layout: Layout) -> Tensor:
        """Send an equal front in one collective, each longer part's rest by itself."""
        group, (front, rest) = living(self._group), self._front_and_rest(flat, layout)
        flat.div_(self.size)
        self._sent_bytes += (sum(layout) - layout[self.rank]) * flat.itemsize
        if front.numel():
            _wait(
                _REDUCE_SCATTER(
                    front.chunk(self.size)[self.rank], front, group=group, async_op=True
                )
            )
        for owner, part in rest:
            _wait(dist.reduce(part, group=group, group_dst=owner, async_op=True))
        return parts(flat, layout)[self.rank]

    async def all_gather(self, flat: Tensor, layout: Layout) -> None:
        group, (front, rest) = living(self._group), self._front_and_rest(flat, layout)
        self._sent_bytes += (sum(layout) - layout[(self.rank + 1) % self.size]) * flat.itemsize
        if front.numel():
            _wait(_ALL_GATHER(front, front.chunk(self.size)[self.rank], group=group, async_op=True))
        for owner, part in rest:
            _wait(dist.broadcast(part, group=group, group_src=owner, async_op=True))

    async def all_to_all(self, outgoing: Tensor, to: Layout, incoming: Tensor, of: Layout) -> None:
        sizes = {"output_split_sizes": [*of], "input_split_sizes": [*to]}
        self._sent_bytes += (sum(to) - to[self.rank]) * outgoing.itemsize
        _wait(
            dist.all_to_all_single(
                incoming, outgoing, **sizes, group=living(self._group), async_op=True
            )
        )

    def _front_and_rest(
        self, flat: Tensor, layout: Layout
    ) -> tuple[Tensor, list[tuple[int, Tensor]]]:
        """Return what is cut equally, but for the last rank's rest; or nothing, and all parts that are not empty."""
        share = layout[0]
        if all(length == share for length in layout[:-1]) and layout[-1] >= share:
            front, last = flat[: share * self.size], flat[share * self.size :]
            return front, [(self.size - 1, last)] if last.numel() else []
        return flat[:0], [
            (owner, part) for owner, part in enumerate(parts(flat, layout)) if part.numel()
        ]


def _wait(work: Any) -> None:
    """Have the current stream (on a CPU this thread) wait for a ``dist.Work``."""
    work.wait()


class Staged(Gloo):
    """A network by messages, for the tensors of a device, which are divided there."""

    divides = False

    def __init__(self, group: dist.ProcessGroup, place: Device) -> None:
        super().__init__(group, place)
        self.device, self._copying = place, Station("crossover-copy", place.adopt_thread)
        self._down, self._up = torch.cuda.Stream(place.device), torch.cuda.Stream(place.device)

    def link(self) -> Link:
        return _StagedLink(self, super().link())

    def close(self, timeout_s: float) -> bool:
        """End the threads, in the order in which journeys come by."""
        closed = [self.place.close(timeout_s), stop_all([self._copying], timeout_s)]
        return all([*closed, super().close(timeout_s)])

    async def down(self, pairs: Sequence[Pair]) -> None:
        """Copy to the host, and go on when all is there."""
        self._down.wait_stream(self.device.stream)
        with torch.cuda.stream(self._down):
            for host, device in pairs:
                host.copy_(device, non_blocking=True)
        there = self._down.record_event(sleeping_event())
        await self._copying
        there.synchronize()

    def up(self, pairs: Sequence[Pair]) -> None:
        """Begin to copy to the device, before what the journey issues from now on."""
        with torch.cuda.stream(self._up):
            for device, host in pairs:
                device.copy_(host, non_blocking=True)
        self.device.stream.wait_stream(self._up)


class _StagedLink(LinkAround):
    """One journey's collectives; owners compute on the thread of the host's link: to launch kernels takes time, too."""

    def __init__(self, net: Staged, link: Link) -> None:
        super().__init__(link)
        self._net = net

    async def reduce_scatter(self, flat: Tensor, layout: Layout) -> Tensor:
        own, host = parts(flat, layout)[self.rank], await self._addend(flat)
        self._net.up([(own, await self._link.reduce_scatter(host, layout))])
        return own

    async def all_gather(self, flat: Tensor, layout: Layout) -> None:
        host = _pinned(flat)
        pairs = list(zip(parts(flat, layout), parts(host, layout), strict=True))
        own, own_host = pairs.pop(self.rank)
        await self._net.down([(own_host, own)])
        await self._link.all_gather(host, layout)
        self._net.up(pairs)

    async def all_reduce(
        self, flat: Tensor, layout: Layout, halfway: Halfway = nothing_halfway
    ) -> None:
        """Copy down and up once."""
        host = await self._addend(flat)
        await self._link.all_reduce(host, layout, halfway)
        self._net.up([(flat, host)])

    async def _addend(self, flat: Tensor) -> Tensor:
        host = _pinned(flat)
        await self._net.down([(host, flat.div_(self.size))])
        return host

    async def all_to_all(self, outgoing: Tensor, to: Layout, incoming: Tensor, of: Layout) -> None:
        leaving, coming = _pinned(outgoing), _pinned(incoming)
        await self._net.down([(leaving, outgoing)])
        await self._link.all_to_all(leaving, to, coming, of)
        self._net.up([(incoming, coming)])


def _pinned(like: Tensor) -> Tensor:
    return torch.empty(like.numel(), dtype=like.dtype, pin_memory=True)

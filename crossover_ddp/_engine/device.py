"""CUDA devices of journeys, and networks for their tensors.

[Note: the side stream] On a device, journeys issue all their work on one stream of ours, the side
stream. It follows the stream of the thread that starts a journey. The stream of a thread that waits
for a journey follows the side stream. `Journey` makes the side stream current around each segment,
so that memory allocated by a journey belongs to that stream as well.

[Note: who waits for the compute stream] Where the host drives journeys (gloo), one of our threads
waits for the compute stream before a journey begins. If the side stream waited instead, and an
earlier journey then enqueued copies on it, these copies would wait for the gradients of another
bucket. Where the device drives journeys (NCCL), the side stream waits.

[Note: one order] Ranks that issue a backend's own collectives in different orders deadlock. So all
collectives are issued on the thread that starts the journey, among the model's own. Journeys do not
suspend there.

[Note: staging] A collective copies its input to pinned memory, on a stream for copies down, which
follows the side stream. A thread sleeps until the copy has ended, and hands the data to the
network. Received data is copied back on a stream for copies up, which the side stream follows. PCIe
carries both directions at once.

Memory needs no further events. Pinned memory is simply dropped: torch reuses it only after the
copies that read or fill it, and gloo holds a reference to memory in use. No earlier kernel still
uses device memory that is copied into: the copy down followed the side stream, and the thread has
waited for the copy, even where there was nothing to copy. The program may drop a journey's tensor
without waiting for the journey. Then the journey's own deletion, which comes before that of its
tensors, makes the stream that started the journey follow the side stream.
"""

import copy
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from crossover_ddp._system.cuda_driver import adopt_thread
from crossover_ddp._system.torch_private import group_timeout_s

from .journeys import (
    Begin,
    GradientFuture,
    JourneyThread,
    Place,
    at_once,
    living,
    nothing,
    stop_all,
)
from .links import Alone, Gloo, GlooLink, Halfway, Layout, Link, LinkAround, parts

Pair = tuple[Tensor, Tensor]  # destination, source
# Torch 2.14 renamed them, and warns about the old names.
_REDUCE_SCATTER: Final = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_ALL_GATHER: Final = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Device(Place):
    """A CUDA device and its side stream, see [Note: the side stream].

    Args:
        device: a CUDA device with an index.
        by_host: whether the host drives journeys, see [Note: who waits for the compute stream].
    """

    def __init__(self, device: torch.device, *, by_host: bool) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self._by_host = by_host
        self._following = JourneyThread("crossover-follow", self.adopt_thread)

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
            # Set the device too: a thread of user code returns to device 0, see `adopt_thread`.
            with torch.cuda.device(self.device), torch.cuda.stream(current):
                # An event from outside of a CUDA graph's capture would break the capture.
                if not torch.cuda.is_current_stream_capturing():
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
        """Prepare the calling thread, and make this device its current one.

        A new thread's current device is number 0, and the thread returns to it when it leaves the
        ``with`` block of a stream. Each rank would then create a context on that device, which
        takes half a gigabyte.
        """
        super().adopt_thread()
        torch.cuda.set_device(self.device)
        adopt_thread()

    def close(self, timeout_s: float) -> bool:
        return stop_all([self._following], timeout_s)


def sleeping_event() -> torch.cuda.Event:
    """Return an event whose waiters sleep, rather than spin on a core."""
    return torch.cuda.Event(blocking=True)


class Native(Alone):
    """A network that uses a backend's own collectives, such as NCCL's, see [Note: one order].

    Its links are copies of the network. On a device all work goes to the current stream, which
    `Journey` has chosen. The process group is held by a weak reference. Sent bytes are counted as
    if the backend used a ring.

    Args:
        group: the process group.
        place: the device that journeys compute on.
        divides: whether `Link.reduce_scatter` returns the mean. Otherwise it returns the sum.
    """

    in_program_order = True
    alignment_bytes = 128  # NCCL is much slower on unaligned parts (pytorch#195450, nccl#413)

    def __init__(self, group: dist.ProcessGroup, place: Place, *, divides: bool = True) -> None:
        super().__init__(place)
        self._divides = divides
        self._group = weakref.ref(group)
        self.rank = group.rank()
        self.size = group.size()

    def among(self, ranks: Sequence[int]) -> "Native":
        """Return a network of some of the ranks, of which this rank is one. It does not divide.

        It has a process group of its own, with the same backends and timeout, which ends with the
        default group. **Collective** for these ranks.
        """
        group = living(self._group)
        members = [dist.get_global_rank(group, rank) for rank in ranks]
        made = dist.new_group(
            members,
            # As long as the user's own: a rank may evaluate alone meanwhile.
            timedelta(seconds=group_timeout_s(group)),
            str(dist.get_backend_config(group)),
            use_local_synchronization=True,
        )
        assert isinstance(made, dist.ProcessGroup), "this rank is a member"
        return Native(made, self.place, divides=False)

    def link(self, *, divides: bool = True) -> Link:
        link = copy.copy(self)
        link._divides = divides and self._divides
        return link

    async def reduce_scatter(self, flat: Tensor, layout: Layout) -> Tensor:
        """Reduce equal shards in one collective, and the rest of a longer last shard in another.

        Shards of other lengths take one collective each.
        """
        group = living(self._group)
        front, rest = self._front_and_rest(flat, layout)
        if self._divides:
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
        group = living(self._group)
        front, rest = self._front_and_rest(flat, layout)
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
        """Split ``flat`` into a front that is cut into equal shards, and the rest.

        The rest is a list of parts with their owners: at most one, the last rank's. If the layout
        has no such front, the front is empty and the list has all parts that are not empty.
        """
        share = layout[0]
        if all(length == share for length in layout[:-1]) and layout[-1] >= share:
            front, last = flat[: share * self.size], flat[share * self.size :]
            return front, [(self.size - 1, last)] if last.numel() else []
        return flat[:0], [
            (owner, part) for owner, part in enumerate(parts(flat, layout)) if part.numel()
        ]


def _wait(work: Any) -> None:
    """Make the current stream wait for a ``dist.Work``; on a CPU, the calling thread waits."""
    work.wait()


class Staged(Gloo):
    """A network over gloo for tensors on a device, see [Note: staging]."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        place: Device,
        whole: Gloo | None = None,
        ranks: Sequence[int] | None = None,
    ) -> None:
        super().__init__(group, place, whole, ranks)
        self.device = place
        self._copying = JourneyThread("crossover-copy", place.adopt_thread)
        self._down = torch.cuda.Stream(place.device)
        self._up = torch.cuda.Stream(place.device)

    def link(self, *, divides: bool = True) -> Link:
        # The device divides the addends, and another thread than the starting one posts them.
        host = GlooLink(self, divides=False, may_leave_sums=False)
        return _StagedLink(self, host, divides=divides and self.is_whole)

    def close(self, timeout_s: float) -> bool:
        """Stop the threads, in the order in which journeys pass through them."""
        closed = [self.place.close(timeout_s), stop_all([self._copying], timeout_s)]
        return all([*closed, super().close(timeout_s)])

    async def down(self, pairs: Sequence[Pair]) -> None:
        """Copy tensors to the host, and resume when the copies have ended."""
        self._down.wait_stream(self.device.stream)
        with torch.cuda.stream(self._down):
            for host, device in pairs:
                host.copy_(device, non_blocking=True)
        there = self._down.record_event(sleeping_event())
        await self._copying
        there.synchronize()

    def up(self, pairs: Sequence[Pair]) -> None:
        """Start copying tensors to the device. Order the journey's later work behind the copies."""
        with torch.cuda.stream(self._up):
            for device, host in pairs:
                device.copy_(host, non_blocking=True)
        self.device.stream.wait_stream(self._up)


class _StagedLink(LinkAround):
    """The collectives of one journey, for tensors on a device.

    Owners compute on the same thread as with the host's link, since launching kernels takes time
    too.
    """

    def __init__(self, net: Staged, link: Link, *, divides: bool) -> None:
        super().__init__(link)
        self._net = net
        self._divides = divides

    async def reduce_scatter(self, flat: Tensor, layout: Layout) -> Tensor:
        own = parts(flat, layout)[self.rank]
        host = await self._addend(flat)
        own_host = await self._link.reduce_scatter(host, layout)
        self._net.up([(own, own_host)])
        return own

    async def all_gather(self, flat: Tensor, layout: Layout) -> None:
        host = _pinned(flat)
        pairs = list(zip(parts(flat, layout), parts(host, layout), strict=True))
        own, own_host = pairs.pop(self.rank)
        await self._net.down([(own_host, own)])
        await self._link.all_gather(host, layout)
        self._net.up(pairs)

    async def all_reduce(self, flat: Tensor, layout: Layout, halfway: Halfway = nothing) -> None:
        """Average ``flat`` on all ranks, with only one copy down and one copy up."""
        host = await self._addend(flat)
        await self._link.all_reduce(host, layout, halfway)
        self._net.up([(flat, host)])

    async def _addend(self, flat: Tensor) -> Tensor:
        host = _pinned(flat)
        await self._net.down([(host, flat.div_(self.size) if self._divides else flat)])
        return host

    async def all_to_all(self, outgoing: Tensor, to: Layout, incoming: Tensor, of: Layout) -> None:
        leaving, coming = _pinned(outgoing), _pinned(incoming)
        await self._net.down([(leaving, outgoing)])
        await self._link.all_to_all(leaving, to, coming, of)
        self._net.up([(incoming, coming)])


def _pinned(like: Tensor) -> Tensor:
    return torch.empty(like.numel(), dtype=like.dtype, pin_memory=True)

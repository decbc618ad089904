"""CUDA tensors over a network that takes host memory only.

[Note: staging] A collective copies what it sends to pinned memory, on a stream for copies down, which follows the side
stream. A thread sleeps until the copy is there, and hands it to the network. What arrives is copied back on a stream
for copies up, which the side stream follows; PCIe carries both directions at once.

No memory waits for an event of ours. Pinned memory is simply dropped: torch lends it again only after the copies that
read or fill it, and gloo holds what it uses. Device memory that is copied into is free of earlier kernels: the copy
down followed the side stream, and the thread has waited for it; so it does even if there is nothing to copy.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .journeys import Device, Station, sleeping_event, stop_all
from .links import Layout, Link, LinkAround, Network, parts

Pair = tuple[Tensor, Tensor]
"""Where to, where from."""


class Staged:
    """A network around one of host memory, for the tensors of a device.

    Args:
        inner: whose journeys' threads are the device's, and which divides nothing.
        place: the device.
    """

    def __init__(self, inner: Network, place: Device) -> None:
        self.rank, self.size, self.alignment_bytes = inner.rank, inner.size, inner.alignment_bytes
        self.place, self._inner = place, inner
        self._down, self._up = torch.cuda.Stream(place.device), torch.cuda.Stream(place.device)
        self._copying = Station("crossover-copy", place.adopt_thread)

    def link(self) -> Link:
        return _StagedLink(self, self._inner.link())

    def interrupt(self) -> None:
        self._inner.interrupt()

    def close(self, timeout_s: float) -> bool:
        """End the threads, in the order in which journeys come by."""
        closed = [self.place.close(timeout_s), stop_all([self._copying], timeout_s)]
        return all([*closed, self._inner.close(timeout_s)])

    async def down(self, pairs: Sequence[Pair]) -> None:
        """Copy to the host, and go on when all is there."""
        self._down.wait_stream(self.place.stream)
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
        self.place.stream.wait_stream(self._up)


class _StagedLink(LinkAround):
    """One journey's collectives; owners compute where those of the host do: launching kernels takes time, too."""

    def __init__(self, net: Staged, link: Link) -> None:
        super().__init__(link)
        self._net = net

    async def reduce_scatter(self, flat: Tensor, layout: Layout) -> Tensor:
        host, own = _pinned(flat), parts(flat, layout)[self.rank]
        flat.div_(self.size)
        await self._net.down([(host, flat)])
        self._net.up([(own, await self._link.reduce_scatter(host, layout))])
        return own

    async def all_gather(self, flat: Tensor, layout: Layout) -> None:
        host = _pinned(flat)
        pairs = list(zip(parts(flat, layout), parts(host, layout), strict=True))
        own, own_host = pairs.pop(self.rank)
        await self._net.down([(own_host, own)])
        await self._link.all_gather(host, layout)
        self._net.up(pairs)

    async def all_to_all(self, outgoing: Tensor, to: Layout, incoming: Tensor, of: Layout) -> None:
        leaving, coming = _pinned(outgoing), _pinned(incoming)
        await self._net.down([(leaving, outgoing)])
        await self._link.all_to_all(leaving, to, coming, of)
        self._net.up([(incoming, coming)])


def _pinned(like: Tensor) -> Tensor:
    return torch.empty(like.numel(), dtype=like.dtype, pin_memory=True)

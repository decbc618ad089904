"""How the ranks of one process group exchange flat tensors: a few collectives, the same whatever carries them.

A link is the ranks for one journey; a network makes links.

[Note: one order] Ranks that issue a backend's own collectives in different orders wait for each other for ever. So all
are issued by the thread that starts the journey, among the model's own: nothing there is awaited.
"""

import copy
import functools
import math
import weakref
from collections.abc import Sequence
from typing import Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .journeys import Place, Station, living, stop_all

Layout = Sequence[int]
"""Number of elements of each rank's part of a flat tensor, in rank order."""
# Torch 2.14 gave them new names, and warns of the old ones.
_REDUCE_SCATTER: Final = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_ALL_GATHER: Final = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Link(Protocol):
    """The ranks of one process group, for the collectives of one journey.

    Collective: all ranks make the same calls in the same order, on links that were drawn in the same order. What comes
    back is for work that is issued where the journey is; on a device it need not be there yet.

    ``in_program_order``: all ranks must issue all collectives in one order, on the thread that starts journeys.
    """

    rank: int
    size: int
    in_program_order: bool

    async def reduce_scatter(self, flat: Tensor, layout: Layout) -> Tensor:
        """Average ``flat`` over the ranks into each part's owner; return the own part, in place.

        It is divided before it is added, so that half precision does not overflow. What stands in the other parts
        afterwards is nobody's.
        """

    async def all_gather(self, flat: Tensor, layout: Layout) -> None:
        """Copy each owner's part to all."""

    async def all_reduce(self, flat: Tensor, layout: Layout) -> None:
        """Do both, where nothing happens in between; the bits are the same."""
        await self.reduce_scatter(flat, layout)
        await self.all_gather(flat, layout)

    async def all_to_all(self, outgoing: Tensor, to: Layout, incoming: Tensor, of: Layout) -> None:
        """Send each other rank its part of ``outgoing``, and receive its part of ``incoming`` from each.

        Nothing is sent to this rank.
        """

    async def compute(self) -> None:
        """Go on where an owner may compute for long."""

    async def settle(self) -> None:
        """Go on where a journey may block for somebody else; it issues nothing afterwards."""

    def sent_bytes(self, kind: str, flat: Tensor) -> tuple[int, int] | None:
        """Return what this rank sent in the half of this kind, and would have as it is; None: ``flat`` itself."""
        return None

    def sent(self) -> int:
        """Return how many bytes this rank has sent since this was called before, those of its parts of sums."""


class Network(Protocol):
    """Makes links, in the same order on all ranks.

    ``alignment_bytes``: where an equal part should begin.
    """

    rank: int
    size: int
    alignment_bytes: int

    @property
    def place(self) -> Place:
        """Return what orders the work on its tensors."""

    def link(self) -> Link:
        """Return the next journey's."""

    def interrupt(self) -> None:
        """End every wait of this rank with an error, and of those that wait for it, if that can be done."""

    def close(self, timeout_s: float) -> bool:
        """End the threads after what they have; return whether they did in time. May be called again."""


def parts(flat: Tensor, layout: Layout) -> list[Tensor]:
    """Return each rank's part of ``flat``, not copies."""
    return list(flat.split(list(layout)))


@functools.cache
def equal_lengths(numel: int, parts: int, multiple: int = 1) -> tuple[int, ...]:
    """Return the elements of each part if all are equal, and multiples; the last one has what is left over, too."""
    share = numel // parts // multiple * multiple
    return (*(share,) * (parts - 1), numel - share * (parts - 1))


def all_finite(values: Tensor) -> bool | Tensor:
    """Tell whether no value is infinite or NaN; of a device's values by a tensor, so that the host need not wait."""
    if values.device.type != "cpu":
        return torch.isfinite(values).all()
    # isfinite takes 8 ms for a million elements. Of finite ones the sum may overflow: a second look decides.
    return math.isfinite(values.sum()) or bool(torch.isfinite(values).all())


class LinkAround(Link):
    """A link around a link, which does all that a subclass leaves to it."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.rank, self.size, self.in_program_order = link.rank, link.size, link.in_program_order

    async def reduce_scatter(self, flat: Tensor, layout: Layout) -> Tensor:
        return await self._link.reduce_scatter(flat, layout)

    async def all_gather(self, flat: Tensor, layout: Layout) -> None:
        await self._link.all_gather(flat, layout)

    async def all_to_all(self, outgoing: Tensor, to: Layout, incoming: Tensor, of: Layout) -> None:
        await self._link.all_to_all(outgoing, to, incoming, of)

    async def compute(self) -> None:
        await self._link.compute()

    async def settle(self) -> None:
        await self._link.settle()

    def sent(self) -> int:
        return self._link.sent()


class Alone(Link):
    """One rank, whose own values are the mean, and what it has is there: a network, and its own link."""

    rank, size, alignment_bytes, in_program_order = 0, 1, 1, False

    def __init__(self, place: Place) -> None:
        self.place = place
        self._settling = Station("crossover-settle", place.adopt_thread)

    def link(self) -> Link:
        return self

    def interrupt(self) -> None:
        """See `Network`: there are no waits."""

    def close(self, timeout_s: float) -> bool:
        return all([self.place.close(timeout_s), stop_all([self._settling], timeout_s)])

    async def reduce_scatter(self, flat: Tensor, layout: Layout) -> Tensor:
        return flat

    async def all_gather(self, flat: Tensor, layout: Layout) -> None:
        pass

    async def all_to_all(self, outgoing: Tensor, to: Layout, incoming: Tensor, of: Layout) -> None:
        pass

    async def compute(self) -> None:
        pass

    async def settle(self) -> None:
        await self._settling

    def sent(self) -> int:
        """See `Link`."""
        return 0


class Native(Alone):
    """A backend's own collectives, NCCL's and its like: a network, and copies of it as links, see [Note: one order].

    On a device all goes to the stream that is current, which `Journey` has chosen. The group is held weakly. Bytes are
    those of an exchange around a ring.
    """

    in_program_order = True
    alignment_bytes = 128  # NCCL is much slower on parts that begin elsewhere (pytorch#195450, nccl#413)

    def __init__(self, group: dist.ProcessGroup, place: Place) -> None:
        super().__init__(place)
        self._group, self._sent_bytes = weakref.ref(group), 0
        self.rank, self.size = group.rank(), group.size()

    def link(self) -> Link:
        """See `Network`."""
        return copy.copy(self)

    def sent(self) -> int:
        """See `Link`."""
        sent, self._sent_bytes = self._sent_bytes, 0
        return sent

    async def reduce_scatter(self, flat: Tensor, layout: Layout) -> Tensor:
        """See `Link`: an equal front in one collective, each longer part's rest by itself."""
        group, (front, rest) = living(self._group), self._front_and_rest(flat, layout)
        flat.div_(self.size)
        self._sent_bytes += (sum(layout) - layout[self.rank]) * flat.itemsize
        if front.numel():
            _wait(_REDUCE_SCATTER(front.chunk(self.size)[self.rank], front, group=group, async_op=True))
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
        _wait(dist.all_to_all_single(incoming, outgoing, **sizes, group=living(self._group), async_op=True))

    def _front_and_rest(self, flat: Tensor, layout: Layout) -> tuple[Tensor, list[tuple[int, Tensor]]]:
        """Return what is cut equally, but for the last rank's rest; or nothing, and all parts that are not empty."""
        share = layout[0]
        if all(length == share for length in layout[:-1]) and layout[-1] >= share:
            front, last = flat[: share * self.size], flat[share * self.size :]
            return front, [(self.size - 1, last)] if last.numel() else []
        return flat[:0], [(owner, part) for owner, part in enumerate(parts(flat, layout)) if part.numel()]


def _wait(work: dist.Work | None) -> None:
    """Have the current stream (on a CPU this thread) wait."""
    if work is None:
        raise RuntimeError("this process is not a rank of the process group")
    work.wait()

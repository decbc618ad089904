"""How K-FAC's factors are packed for the way, and payloads of factors alone."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from crossover_ddp._exchange.layout import Layout
from crossover_ddp._exchange.transfer import Payload, Sharded

from .columns import triangle_numel
from .factors import BatchFactor, Gram, pack_triangle, unpack_triangle


class FactorPacking(NamedTuple):
    """How one factor travels: its triangle, or ``room`` columns of each rank; and behind it whether there is one.

    Columns are put in a place of each rank's own, so that their sum over the ranks holds those of all.
    """

    groups: int
    dim: int
    room: int
    world_size: int

    @property
    def numel(self) -> int:
        """Elements in the buffer that is summed."""
        if self.room:
            return self.world_size * self.groups * self.dim * self.room + 1
        return triangle_numel(self.groups, self.dim) + 1

    def pack(self, factor: Tensor | None, out: Tensor, rank: int) -> None:
        """Write this rank's factor, [groups, dim, dim], or its columns, [groups, dim, count]; None: it has none."""
        if factor is None:
            out.zero_()
            return
        out[-1] = 1.0
        if not self.room:
            pack_triangle(factor.to(out.dtype), out[:-1])
            return
        out[:-1].zero_()
        own = out[:-1].view(self.world_size, self.groups, self.dim, self.room)[rank]
        own[..., : factor.shape[-1]].copy_(factor)

    def unpack(self, mean: Tensor) -> BatchFactor:
        """Return the mean over the ranks that had a factor, [groups, dim, dim]; not a number if none had."""
        body, weight = mean[:-1], mean[-1]
        if not self.room:
            return unpack_triangle(body, self.groups, self.dim) / weight
        columns = body.view(self.world_size, self.groups, self.dim, self.room).permute(1, 2, 0, 3)
        # The buffer was divided by the number of ranks, the columns' squares so by its square.
        return Gram(columns.reshape(self.groups, self.dim, -1) * (self.world_size / weight).sqrt())


class TravellingFactors(NamedTuple):
    """Factors of one layer that travel apart from its gradient: how each is packed, and this rank's, None for none."""

    layer: int
    owner: int
    packings: tuple[FactorPacking, ...]
    own: tuple[Tensor | None, ...]

    @property
    def numel(self) -> int:
        """Elements in the buffer that is summed."""
        return sum(packing.numel for packing in self.packings)

    @property
    def nbytes(self) -> int:
        """Memory of this rank's."""
        return sum(factor.nbytes for factor in self.own if factor is not None)


def in_turn(packings: Sequence[FactorPacking], start: int) -> Iterator[slice]:
    """Yield where each of these factors lies if the first begins at ``start``."""
    for packing in packings:
        yield slice(start, start + packing.numel)
        start += packing.numel


def factors_payload(
    travelling: Sequence[TravellingFactors],
    *,
    like: Tensor,
    rank: int,
    world_size: int,
    take: Callable[[int, list[BatchFactor]], None],
) -> Payload:
    """Return a payload that sums factors into their layers' owners; nothing comes back.

    Args:
        travelling: the same layers in the same order on all ranks.
        like: a parameter on their device; sums are at least float32.
        rank: of this process.
        world_size: number of ranks.
        take: called on the owner with a layer and the means of its factors.
    """
    lengths, offsets = [0] * world_size, []
    for each in travelling:
        offsets.append(lengths[each.owner])
        lengths[each.owner] += each.numel
    layout = Layout.of_lengths(lengths)
    there = like.new_empty(layout.numel, dtype=torch.promote_types(like.dtype, torch.float32))
    owned = []  # without the factors themselves, which are packed now
    for each, offset in zip(travelling, offsets, strict=True):
        places = in_turn(each.packings, layout.part(each.owner).start + offset)
        for packing, factor, place in zip(each.packings, each.own, places, strict=True):
            packing.pack(factor, there[place], rank)
        if each.owner == rank:
            owned.append((each.layer, each.packings, list(in_turn(each.packings, offset))))

    def step(part: Tensor) -> None:
        if part.is_cuda:  # the host lets go of it before the device has read it
            part.record_stream(torch.cuda.current_stream(part.device))
        with torch.autocast(part.device.type, enabled=False):
            for layer, packings, places in owned:
                pairs = zip(packings, places, strict=True)
                take(layer, [packing.unpack(part[place]) for packing, place in pairs])

    return Payload(Sharded(there, layout), None, step, _nothing)


def _nothing() -> None:
    """Nothing comes back."""

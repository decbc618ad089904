"""How K-FAC's factors are packed for the way, and payloads of factors alone."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from crossover_ddp._exchange.transfer import Payload, Sharded
from crossover_ddp._owners.packing import Item, packing

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
    made = packing(world_size, tuple([Item(each.owner, each.numel, 0) for each in travelling]))
    there = like.new_empty(made.there.numel, dtype=torch.promote_types(like.dtype, torch.float32))
    owned = []  # without the factors themselves, which are packed now
    for each, place in zip(travelling, made.items, strict=True):
        parts = there[place.there.start : place.there.stop].split([form.numel for form in each.packings])
        for form, factor, part in zip(each.packings, each.own, parts, strict=True):
            form.pack(factor, part, rank)
        if each.owner == rank:
            owned.append((each.layer, list(zip(each.packings, parts, strict=True))))

    def step(part: Tensor) -> None:
        if part.is_cuda:  # the host lets go of it before the device has read it
            part.record_stream(torch.cuda.current_stream(part.device))
        with torch.autocast(part.device.type, enabled=False):
            for layer, arrived in owned:
                take(layer, [form.unpack(mean) for form, mean in arrived])

    return Payload(Sharded(there, made.there), None, step, _nothing)


def _nothing() -> None:
    """Nothing comes back."""

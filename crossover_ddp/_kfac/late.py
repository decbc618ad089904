"""Factors that nobody needs yet travel behind the gradients, when the wire has nothing else to do.

[Note: late factors] The running factors matter when solvers are made of them, and in most steps none are. In such
steps the factors wait until the step's gradients are gathered, and then leave in groups, one behind the gradients
of each following step, while the ranks compute. All of them have left before the next step that takes factors or makes
solvers begins its exchange, so the running means are the same as if they had come at once. kfac-pytorch lets factors
trail, too; the groups are our design. All ranks send the same groups in the same order, a rank without factors zeros.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from crossover_ddp._exchange.step import GradientFuture
from crossover_ddp._exchange.transfer import Cargo, Freight

from .factor_sums import Room
from .factors import BatchFactor
from .layers import Layer
from .manifest import Load, manifest
from .payload import Parcel

Add = Callable[[int, BatchFactor, BatchFactor], None]


class HeldFactors(NamedTuple):
    """One layer's factors of this rank, or None, and the room that their columns have on all ranks."""

    layer: int
    a: Tensor | None
    g: Tensor | None
    room: Room

    @property
    def nbytes(self) -> int:
        """Memory."""
        return sum(factor.nbytes for factor in (self.a, self.g) if factor is not None)


class LateFactors:
    """Sends one step's factors in groups.

    Args:
        layers: of the model.
        owners: of each layer.
        rank, world_size: of this process.
        reduce: begins to sum a cargo into its owners, behind all that was handed out before.
    """

    def __init__(
        self,
        *,
        layers: Sequence[Layer],
        owners: Sequence[int],
        rank: int,
        world_size: int,
        reduce: Callable[[Cargo], GradientFuture],
    ) -> None:
        self._layers = layers
        self._owners = owners
        self._rank = rank
        self._world_size = world_size
        self._reduce = reduce
        self._groups: list[list[HeldFactors]] = []
        self._under_way: list[GradientFuture] = []
        self._add: Add = _nobody

    def hold(self, factors: Iterable[HeldFactors], steps: int, add: Add) -> None:
        """Take the factors of a step.

        Args:
            factors: of all layers, in the same order on all ranks.
            steps: in how many groups they leave at most.
            add: told, on the owner, of each layer's mean factors, on a thread of the engine.
        """
        held = list(factors)
        sizes = [sum(parcel.numel for parcel in self._parcels(each)) for each in held]
        self._groups = [[held[place] for place in group] for group in in_equal_groups(sizes, steps)]
        self._add = add

    def leave(self, *, all_groups: bool = False) -> None:
        """Send the next group, or all that are left."""
        self._under_way = [each for each in self._under_way if not each.done()]
        while self._groups:
            self._under_way.append(self._reduce(self._cargo(self._groups.pop(0))))
            if not all_groups:
                return

    def settle(self) -> None:
        """Send what is left, and wait until all has arrived. Collective. Raises what made it impossible."""
        self.leave(all_groups=True)
        for future in self._under_way:
            future.wait()
        self._under_way.clear()

    @property
    def nbytes(self) -> int:
        """Memory of what is held."""
        return sum(each.nbytes for group in self._groups for each in group)

    def _parcels(self, held: HeldFactors) -> tuple[Parcel, Parcel]:
        shape, room = self._layers[held.layer].shape, held.room
        return (
            Parcel(shape.groups, shape.g_dim, room.g, self._world_size),
            Parcel(shape.groups, shape.a_dim, room.a, self._world_size),
        )

    def _cargo(self, group: Sequence[HeldFactors]) -> Cargo:
        parcels = [self._parcels(each) for each in group]
        loads = [
            Load(self._owners[each.layer], 0, sum(parcel.numel for parcel in pair))
            for each, pair in zip(group, parcels, strict=True)
        ]
        made = manifest(self._world_size, tuple(loads), ())
        weight = self._layers[group[0].layer].weight
        dtype = torch.promote_types(weight.dtype, torch.float32)
        there = weight.new_empty(made.there.numel, dtype=dtype)
        for each, (g, a), offset in zip(group, parcels, made.factors, strict=True):
            start = made.there.part(self._owners[each.layer]).start + offset
            g.pack(each.g, there[start : start + g.numel], self._rank)
            a.pack(each.a, there[start + g.numel : start + g.numel + a.numel], self._rank)
        own = [
            (each.layer, pair, offset)
            for each, pair, offset in zip(group, parcels, made.factors, strict=True)
            if self._owners[each.layer] == self._rank
        ]
        add = self._add

        def take(part: Tensor, final: Callable[[int], None]) -> None:
            with torch.autocast(part.device.type, enabled=False):
                for index, (g, a), offset in own:
                    middle = offset + g.numel
                    add(index, a.unpack(part[middle : middle + a.numel]), g.unpack(part[offset:middle]))

        return Cargo(Freight(there, made.there), None, take, _nothing)


def in_equal_groups(sizes: Sequence[int], count: int) -> Iterator[range]:
    """Cut into at most ``count`` consecutive groups of about the same sum; none is empty."""
    total, done, start, first = max(1, sum(sizes)), 0, 0, 0.0
    for place, size in enumerate(sizes):
        middle = done + size / 2
        # What lies by its middle in the next share of the whole begins the next group.
        if place > start and int(middle * count / total) > int(first * count / total):
            yield range(start, place)
            start = place
        if place == start:
            first = middle
        done += size
    if start < len(sizes):
        yield range(start, len(sizes))


def _nobody(index: int, a: BatchFactor, g: BatchFactor) -> None:
    """Before anything is held."""


def _nothing() -> None:
    """Nothing comes back."""

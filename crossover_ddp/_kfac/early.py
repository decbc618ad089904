"""Input factors that leave during forward, in groups, while the wire has nothing else to do.

[Note: one order of groups] All ranks send the same groups in the same order, before the step's buckets. A group leaves
when its last layer has been called and all groups before it have left. What has not left when backward hands out its
first bucket leaves then, with zeros for factors that this rank does not have. So a rank whose forward takes another
path, or that has run out of inputs, sends what the others send.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from crossover_ddp._exchange.transfer import Cargo, Freight

from .capture import FactorCapture
from .layers import Layer
from .manifest import Load, manifest
from .payload import Parcel

Groups = Sequence[Sequence[int]]


class EarlyFactors:
    """Sends the groups of one step, and keeps what arrives of them on the owners.

    Args:
        groups: of indices of layers, in the order in which they leave; may be empty.
        layers: of the model.
        owners: of each layer.
        rank, world_size: of this process.
        capture: where the factors are.
        reduce: begins to sum a cargo into its owners.
    """

    def __init__(
        self,
        groups: Groups,
        *,
        layers: Sequence[Layer],
        owners: Sequence[int],
        rank: int,
        world_size: int,
        capture: FactorCapture,
        reduce: Callable[[Cargo], object],
    ) -> None:
        self.groups = groups
        self.layers = frozenset(index for group in groups for index in group)
        self._all_layers = layers
        self._owners = owners
        self._rank = rank
        self._world_size = world_size
        self._capture = capture
        self._reduce = reduce
        self.begin_step()

    def begin_step(self) -> None:
        """Forget what came in the last step."""
        self.arrived: dict[int, tuple[Parcel, Tensor]] = {}
        self._called: set[int] = set()
        self._left = 0

    def input_came(self, index: int) -> None:
        """Note that a layer's factor is complete; send the groups that are."""
        self._called.add(index)
        while self._left < len(self.groups) and self._called.issuperset(self.groups[self._left]):
            self._send()

    def send_rest(self) -> None:
        """Send all groups that have not left yet."""
        while self._left < len(self.groups):
            self._send()

    def _send(self) -> None:
        group = self.groups[self._left]
        self._left += 1
        parcels = [self._parcel(index) for index in group]
        loads = tuple(
            [Load(self._owners[index], 0, parcel.numel) for index, parcel in zip(group, parcels, strict=True)]
        )
        made = manifest(self._world_size, loads, ())
        weight = self._all_layers[group[0]].weight
        dtype = torch.promote_types(weight.dtype, torch.float32)  # a factor's own
        there = weight.new_empty(made.there.numel, dtype=dtype)
        for index, parcel, load, offset in zip(group, parcels, loads, made.factors, strict=True):
            start = made.there.part(load.owner).start + offset
            factor = self._capture.take_input_ahead(index)
            parcel.pack(factor, there[start : start + parcel.numel], self._rank)
        arrived = self.arrived

        def keep(part: Tensor, final: Callable[[int], None]) -> None:
            for index, parcel, offset in zip(group, parcels, made.factors, strict=True):
                if self._owners[index] == self._rank:
                    arrived[index] = parcel, part[offset : offset + parcel.numel]

        self._reduce(Cargo(Freight(there, made.there), None, keep, _nothing))

    def _parcel(self, index: int) -> Parcel:
        shape = self._all_layers[index].shape
        return Parcel(shape.groups, shape.a_dim, self._capture.room(index).a, self._world_size)


def _nothing() -> None:
    return None

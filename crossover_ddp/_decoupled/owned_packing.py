"""The buffers that travel for a bucket whose parameters have owners.

[Note: two buffers] The gradients of a bucket are packed by owner into one buffer, which is summed. What owners send
back has places of its own where it is not as large: a direction of torch's Muon takes two bytes a number, in a second
buffer of the bucket's type. Without directions the same buffer goes both ways.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist

from crossover_ddp._exchange.contents import contents_of
from crossover_ddp._exchange.layout import Span
from crossover_ddp._exchange.transfer import Deferred, Sharded
from crossover_ddp._owners.packing import Item, packing
from crossover_ddp.errors import UnsupportedConfigurationError

from .owned_optimizers import OwnedOptimizers
from .owned_share import Packed
from .shares import view_of
from .withheld import withhold

Key = tuple[object, ...]


class _Lent(NamedTuple):
    there: torch.Tensor
    back: torch.Tensor
    deferred: Deferred


class Packing:
    """Packs buckets by owner, and keeps the memory that travels from step to step.

    Args:
        owned: the optimizers, which say who owns a parameter and what comes back of it.
        world_size: of the job.
    """

    def __init__(self, owned: OwnedOptimizers, world_size: int) -> None:
        self._owned = owned
        self._world_size = world_size
        self._lent: dict[Key, _Lent] = {}

    @property
    def nbytes(self) -> int:
        """Memory of all buffers that travel."""
        distinct = {id(buffer): buffer for lent in self._lent.values() for buffer in (lent.there, lent.back)}
        return sum(buffer.nbytes for buffer in distinct.values())

    @torch.no_grad()
    def pack(self, bucket: dist.GradBucket) -> tuple[Packed, Key]:
        """Return the bucket's gradients by owner, and withhold them in the bucket; ``Key`` is for `travels`."""
        buffer = bucket.buffer()
        contents = contents_of(bucket, buffer)
        if any(each.parameter.dtype != buffer.dtype for each in contents):
            raise UnsupportedConfigurationError(
                f"expected gradients of the parameters' own type, got {buffer.dtype} ones; updated parameters travel "
                "in their place: use owners=None"
            )
        parameters = [each.parameter for each in contents]
        items = [
            Item(
                self._owned.owner_of[id(parameter)],
                span.numel,
                self._owned.of(parameter).returning_numel(span.numel, buffer.itemsize),
            )
            for parameter, _, span in contents
        ]
        plan = packing(self._world_size, tuple(items))
        key = (bucket.index(), buffer.dtype, buffer.device)
        there, back = self._lend(key, buffer, plan.there.numel, plan.back.numel)
        for each, place in zip(contents, plan.items, strict=True):
            _part(there, place.there).copy_(_part(buffer, each.span))
        withhold(buffer)
        placed = [*zip(parameters, plan.items, strict=True)]
        gradients = [view_of(there, p, place.there.start) for p, place in placed]
        pieces = [self._owned.of(p).piece(_part(back, place.back), p) for p, place in placed]
        return Packed(Sharded(there, plan.there), Sharded(back, plan.back), gradients, pieces), key

    def travels(self, packed: Packed, key: Key, deferred: Deferred) -> None:
        """Note which exchange has the buffers of a bucket."""
        self._lent[key] = _Lent(packed.there.tensor, packed.back.tensor, deferred)

    def _lend(
        self, key: Key, like: torch.Tensor, numel: int, back_numel: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the buffers that travel for a bucket, once their last way has ended."""
        lent = self._lent.get(key)
        if lent is not None and (lent.there.numel(), lent.back.numel()) == (numel, back_numel):
            lent.deferred.wait()
            return lent.there, lent.back
        there = like.new_empty(numel)
        # No piece is larger than its gradient: as many elements in all means as many of each.
        return there, there if back_numel == numel else like.new_empty(back_numel)


def _part(flat: torch.Tensor, span: Span) -> torch.Tensor:
    return flat[span.start : span.stop]

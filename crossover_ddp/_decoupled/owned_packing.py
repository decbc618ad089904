"""The buffers that travel for a bucket whose parameters have owners.

[Note: two buffers] The gradients of a bucket are packed by owner into one buffer, which is summed. What owners send
back has places of its own where it is not as large: a direction of torch's Muon takes two bytes a number, in a second
buffer of the bucket's type. Without directions the same buffer goes both ways.
"""

import torch
import torch.distributed as dist

from crossover_ddp._exchange.contents import contents_of
from crossover_ddp._exchange.layout import Span
from crossover_ddp._exchange.transfer import Sharded
from crossover_ddp._owners.packing import Item, packing
from crossover_ddp.errors import UnsupportedConfigurationError

from .owned_optimizers import OwnedOptimizers
from .owned_share import Packed
from .shares import view_of
from .withheld import withhold


@torch.no_grad()
def pack(bucket: dist.GradBucket, owned: OwnedOptimizers, world_size: int) -> Packed:
    """Return the bucket's gradients by owner, and withhold them in the bucket."""
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
            owned.owner_of[id(parameter)],
            span.numel,
            owned.of(parameter).returning_numel(span.numel, buffer.itemsize),
        )
        for parameter, _, span in contents
    ]
    plan = packing(world_size, tuple(items))
    there = buffer.new_empty(plan.there.numel)
    # No piece is larger than its gradient: as many elements in all means as many of each.
    back = there if plan.back.numel == plan.there.numel else buffer.new_empty(plan.back.numel)
    for each, place in zip(contents, plan.items, strict=True):
        _part(there, place.there).copy_(_part(buffer, each.span))
    withhold(buffer)
    placed = [*zip(parameters, plan.items, strict=True)]
    gradients = {id(p): view_of(there, p, place.there.start) for p, place in placed}
    pieces = {id(p): owned.of(p).piece(_part(back, place.back), p) for p, place in placed}
    return Packed(Sharded(there, plan.there), Sharded(back, plan.back), gradients, pieces)


def _part(flat: torch.Tensor, span: Span) -> torch.Tensor:
    return flat[span.start : span.stop]

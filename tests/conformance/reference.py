"""Plain DDP with its additions in the order in which owners add."""

import functools
from typing import Any

import torch
import torch.distributed as dist

from tests.harness.oracles import tree_sum


class Additions:
    """Add the ranks' gradients as owners do.

    Divided first, as torch's hook does, and added as a tree over ranks. Of messages of a codec: in the order of ranks,
    divided last; but a codec's first step is exact.
    """

    def __init__(self, order: str) -> None:
        self._order, _, self._later = order.partition(", then ")
        self._is_first = True

    def mean(self, bucket: dist.GradBucket) -> torch.Tensor:
        flat, world_size = bucket.buffer(), dist.get_world_size()
        everyone = [torch.empty_like(flat) for _ in range(world_size)]
        dist.all_gather(everyone, flat)
        order = self._order if self._is_first or not self._later else self._later
        if order == "tree":
            flat.copy_(tree_sum([each / world_size for each in everyone]))
        else:
            flat.copy_(functools.reduce(torch.add, [each.float() for each in everyone]) / world_size)
        self._is_first &= not bucket.is_last()
        return flat


def adding(order: str) -> tuple[Any, Any]:
    """Return the state and the hook."""
    return Additions(order), _add_in_order


def _add_in_order(state: Additions, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(state.mean(bucket))
    return future

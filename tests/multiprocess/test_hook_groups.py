"""The groups that a hook may be registered with."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp.comm_hooks import reduce_scatter_all_gather_hook
from crossover_ddp.errors import UnsupportedConfigurationError
from tests.harness import in_ranks


@in_ranks(3)
def test_a_hook_on_a_group_of_other_ranks_is_refused_everywhere(rank: int) -> None:
    half = dist.new_group([0, 1])
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    model.register_comm_hook(half, reduce_scatter_all_gather_hook)
    inside = r"of ranks \[0, 1, 2\], got a process_group of ranks \[0, 1\]"
    outside = "expected a process group that this process belongs to"
    with pytest.raises(UnsupportedConfigurationError, match=outside if rank == 2 else inside):
        model(torch.ones(1, 2)).sum().backward()


@in_ranks(2)
def test_a_hook_on_a_twin_group_is_right(rank: int) -> None:
    """A group of the same ranks is as good as the model's own, in whatever order it names them."""
    twin = dist.new_group([1, 0])
    model = DistributedDataParallel(torch.nn.Linear(2, 2, bias=False))
    model.register_comm_hook(twin, reduce_scatter_all_gather_hook)
    model(torch.full((1, 2), float(rank))).sum().backward()
    assert model.module.weight.grad.eq(0.5).all()

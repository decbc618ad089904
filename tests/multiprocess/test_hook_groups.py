"""The groups that a hook may be registered with."""

import pytest
import torch
import torch.distributed as dist

from crossover_ddp.comm_hooks import reduce_scatter_all_gather_hook
from crossover_ddp.errors import UnsupportedConfigurationError
from tests.harness import in_ranks
from tests.harness.training import hooked


@in_ranks(3)
def test_a_group_of_the_same_ranks_in_whatever_order_is_right_and_another_refused_everywhere(
    rank: int,
) -> None:
    twin, half = dist.new_group([2, 1, 0]), dist.new_group([0, 1])
    model = hooked(torch.nn.Linear(2, 2, bias=False), reduce_scatter_all_gather_hook, twin)
    model(torch.full((1, 2), float(rank))).sum().backward()
    assert model.module.weight.grad.eq(1.0).all()
    model = hooked(torch.nn.Linear(2, 2), reduce_scatter_all_gather_hook, half)
    inside = r"of ranks \[0, 1, 2\], got a process_group of ranks \[0, 1\]"
    outside = "expected a process group that this process belongs to"
    with pytest.raises(UnsupportedConfigurationError, match=outside if rank == 2 else inside):
        model(torch.ones(1, 2)).sum().backward()

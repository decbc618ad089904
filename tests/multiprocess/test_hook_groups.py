"""The groups that a hook may be registered with."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp.comm_hooks import reduce_scatter_all_gather_hook
from crossover_ddp.errors import UnsupportedConfigurationError
from tests.harness import run_ranks


def hook_on_another_group(rank: int, world_size: int) -> str:
    """Register the hook with a group of some of the ranks only."""
    half = dist.new_group([0, 1])
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    model.register_comm_hook(half, reduce_scatter_all_gather_hook)
    with pytest.raises(UnsupportedConfigurationError) as caught:
        model(torch.ones(1, 2)).sum().backward()
    return str(caught.value)


def test_a_hook_on_a_group_of_other_ranks_is_refused_everywhere() -> None:
    first, second, outside = run_ranks(hook_on_another_group, 3)
    assert first == second
    assert "of ranks [0, 1, 2], got a process_group of ranks [0, 1]" in first
    assert "expected a process group that this process belongs to" in outside


def hook_on_a_twin_group(rank: int, world_size: int) -> bool:
    """A group of the same ranks is as good as the model's own, in whatever order it names them."""
    twin = dist.new_group([1, 0])
    model = DistributedDataParallel(torch.nn.Linear(2, 2, bias=False))
    model.register_comm_hook(twin, reduce_scatter_all_gather_hook)
    model(torch.full((1, 2), float(rank))).sum().backward()
    assert isinstance(model.module.weight, torch.Tensor)
    return bool(model.module.weight.grad.eq(0.5).all()) if model.module.weight.grad is not None else False


def test_a_hook_on_a_twin_group_is_right() -> None:
    assert run_ranks(hook_on_a_twin_group, 2) == [True, True]


@pytest.mark.torch_version
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("group", [-100, "world", object()])
def test_what_is_no_group_of_ours_raises_after_backward(group: object) -> None:
    model = DistributedDataParallel(torch.nn.Linear(3, 3))
    model.register_comm_hook(group, reduce_scatter_all_gather_hook)
    with pytest.raises(
        UnsupportedConfigurationError, match="expected a process group that this process belongs"
    ):
        model(torch.ones(2, 3)).sum().backward()

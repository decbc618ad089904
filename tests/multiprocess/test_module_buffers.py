"""Buffers travel behind the gradients: DDP broadcasts nothing in forward, on all ranks or on none."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp import (
    CrossoverState,
    DecoupledState,
    KFACState,
    crossover_hook,
    crossover_wrapper,
    decoupled_hook,
    kfac_hook,
    reduce_scatter_all_gather_hook,
)
from tests.harness import run_ranks

STEPS = 5
HOOKS = ("split", "crossover", "decoupled", "kfac", "wrapped split", "wrapped all-reduce")
TIMEOUT_S = 60.0


class Counted(DistributedDataParallel):
    """Counts what DDP broadcasts by itself."""

    def __init__(self, network: nn.Module, **options: Any) -> None:
        self.broadcasts = 0
        super().__init__(network, gradient_as_bucket_view=True, bucket_cap_mb=0.0004, **options)

    def _default_broadcast_coalesced(self, *args: Any, **options: Any) -> None:
        self.broadcasts += 1
        super()._default_broadcast_coalesced(*args, **options)


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4), nn.BatchNorm1d(4))


@contextlib.contextmanager
def hooked(model: Counted, optimizer: torch.optim.Optimizer, hook: str) -> Iterator[None]:
    state: Any = None
    if hook == "split":
        model.register_comm_hook(None, reduce_scatter_all_gather_hook)
    elif hook == "crossover":
        model.register_comm_hook(state := CrossoverState(), crossover_hook)
    elif hook == "decoupled":
        model.register_comm_hook(state := DecoupledState(optimizer), decoupled_hook)
    elif hook == "kfac":
        model.register_comm_hook(state := KFACState(model, optimizer), kfac_hook)
    elif hook.startswith("wrapped"):
        inner = reduce_scatter_all_gather_hook if hook == "wrapped split" else allreduce_hook
        model.register_comm_hook(state := CrossoverState(), crossover_wrapper(inner))
    yield
    if state is not None:
        state.close()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def train(model: Counted, optimizer: torch.optim.Optimizer, rank: int, steps: int = STEPS) -> None:
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        model(torch.randn(7, 6, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def numbers(model: nn.Module) -> torch.Tensor:
    return torch.cat([value.detach().double().flatten() for value in model.state_dict().values()])


def count_broadcasts(rank: int, world_size: int, hook: str) -> tuple[int, torch.Tensor]:
    model = Counted(network())
    optimizer = sgd(model)
    with hooked(model, optimizer, hook):
        train(model, optimizer, rank)
    return model.broadcasts, numbers(model)


@pytest.mark.torch_version
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ddp_broadcasts_only_before_the_first_step(hook: str, world_size: int) -> None:
    found = run_ranks(count_broadcasts, world_size, args=(hook,), timeout_s=TIMEOUT_S)
    by_ddp = STEPS if hook == "wrapped all-reduce" or world_size == 1 else 1
    assert [broadcasts for broadcasts, _ in found] == [by_ddp] * world_size
    if hook != "wrapped all-reduce":  # there each rank keeps its own until the next forward
        assert all(torch.equal(each, found[0][1]) for _, each in found)


def train_wrapped_anew(rank: int, world_size: int) -> list[int]:
    """The old model lives on on rank 0 only."""
    net = network()
    kept, broadcasts = [], []
    for _ in range(3):
        model = Counted(net)
        model.register_comm_hook(None, reduce_scatter_all_gather_hook)
        train(model, sgd(model), rank)
        broadcasts.append(model.broadcasts)
        if rank == 0:
            kept.append(model)
    return broadcasts


def test_a_network_that_is_wrapped_anew_is_served_by_ddp_on_all_ranks_or_none() -> None:
    one, *others = run_ranks(train_wrapped_anew, 3, timeout_s=TIMEOUT_S)
    assert one[0] == 1
    assert all(other == one for other in others)


def train_with_changes(rank: int, world_size: int, hook: str) -> list[float]:
    """All ranks load other statistics between two steps, and rank 0's must not come back."""
    model = Counted(network())
    optimizer = sgd(model)
    seen = []
    with hooked(model, optimizer, hook):
        train(model, optimizer, rank)
        for norm in (model.module[1], model.module[4]):
            norm.running_mean.fill_(1000.0)
        train(model, optimizer, rank, steps=1)
        seen.append(float(model.module[1].running_mean.mean()))
        model.eval()
        model(torch.zeros(1, 6))
        seen.append(float(model.module[1].running_mean.mean()))
    return seen


@pytest.mark.parametrize("hook", ["crossover", "decoupled"])
def test_buffers_changed_on_all_ranks_between_two_steps_stay_changed(hook: str) -> None:
    found = run_ranks(train_with_changes, 2, args=(hook,), timeout_s=TIMEOUT_S)
    assert all(mean > 800 for seen in found for mean in seen)
    assert found[0][1] == found[1][1]


def join_without_inputs(rank: int, world_size: int, hook: str) -> torch.Tensor:
    model = Counted(network())
    optimizer = sgd(model)
    with hooked(model, optimizer, hook):
        train(model, optimizer, rank)
        with Join([model]):
            train(model, optimizer, rank, steps=STEPS if rank else 0)
        train(model, optimizer, rank)
        model.eval()
        model(torch.zeros(1, 6))
    dist.barrier()
    return numbers(model)


@pytest.mark.parametrize("hook", ["crossover", "decoupled"])
def test_a_rank_may_join_without_any_input(hook: str) -> None:
    found = run_ranks(join_without_inputs, 3, args=(hook,), timeout_s=TIMEOUT_S)
    assert all(torch.equal(each, found[0]) for each in found)


def train_with_a_buffer_hook(rank: int, world_size: int) -> tuple[int, int]:
    model = Counted(network())
    calls: list[int] = []
    model._register_buffer_comm_hook(calls, lambda state, buffers: state.append(len(buffers)))
    optimizer = sgd(model)
    with hooked(model, optimizer, "crossover"):
        train(model, optimizer, rank)
    return len(calls), model.broadcasts


def test_a_buffer_hook_of_the_users_is_called_as_ever() -> None:
    assert run_ranks(train_with_a_buffer_hook, 2, timeout_s=TIMEOUT_S) == [(STEPS, 0)] * 2


def train_twice_through_one_graph(rank: int, world_size: int) -> float:
    """Autograd has saved the statistics, and looks whether they have changed."""
    model = Counted(network())
    model.register_comm_hook(None, reduce_scatter_all_gather_hook)
    train(model, sgd(model), rank)
    loss = model(torch.randn(7, 6)).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    return float(loss)


def test_a_graph_that_is_kept_can_be_gone_through_again() -> None:
    run_ranks(train_twice_through_one_graph, 2, timeout_s=TIMEOUT_S)

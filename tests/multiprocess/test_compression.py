"""Codecs between real ranks: same parameters everywhere, nothing lost, and what DDP can do.

Longer runs, and the long tests with each number of ranks, are for the campaign.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp.codecs import (
    CompressedState,
    Int8,
    SIDCo,
    compressed_hook,
)
from crossover_ddp.comm_hooks import CrossoverState, crossover_hook
from tests.harness import run_ranks
from tests.harness.campaign import IN_CAMPAIGN
from tests.harness.turn import RecordingTurn
from tests.multiprocess.compressed_training import (
    CODECS,
    backward,
    batch,
    digest,
    gradients,
    network,
    wrapped,
)

WORLD_SIZES = (2, 3, 4)
TWO_AND_THREE = WORLD_SIZES if IN_CAMPAIGN else (2, 3)


KEPT_STEPS = 12 if IN_CAMPAIGN else 7


# --- nothing is lost -----------------------------------------------------------------------------------------


def conservation(rank: int, world_size: int, name: str, drained: bool) -> float:
    """Return by how much the sum of all applied differs from that of all gradients less what is kept."""
    model, alone = wrapped(), network()
    state = CompressedState(codec=CODECS[name])
    model.register_comm_hook(state, compressed_hook)
    names = [parameter_name for parameter_name, _ in alone.named_parameters()]
    applied = [torch.zeros_like(p, dtype=torch.float64) for p in alone.parameters()]
    given = [torch.zeros_like(p, dtype=torch.float64) for p in alone.parameters()]
    for step in range(KEPT_STEPS):
        if drained and step == KEPT_STEPS - 1:
            state.drain()
        model.zero_grad()
        alone.zero_grad()
        backward(model, rank, step)
        backward(alone, rank, step)
        for total, gradient in zip(applied, gradients(model), strict=True):
            total += gradient
        for total, gradient in zip(given, gradients(alone), strict=True):
            total += gradient / world_size
    kept = state.state_dict()["residuals"]
    assert not drained or not any(residual.any() for residual in kept.values())
    if not drained and name != "identity":
        assert max(float(residual.abs().max()) for residual in kept.values()) > 1e-5
    for each, total in zip(names, given, strict=True):
        if each in kept:
            total -= kept[each].view_as(total).double() / world_size
        dist.all_reduce(total)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(applied, given, strict=True))


def conservations(rank: int, world_size: int) -> dict[str, float]:
    return {name: conservation(rank, world_size, name, False) for name in CODECS}


@pytest.mark.parametrize("world_size", TWO_AND_THREE)
def test_what_is_applied_and_what_is_kept_are_all_gradients(world_size: int) -> None:
    for errors in run_ranks(conservations, world_size):
        assert errors.keys() == CODECS.keys()
        assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize("name", ["int8", "sidco"])
def test_a_drained_step_applies_all_that_was_kept(name: str) -> None:
    assert max(run_ranks(conservation, 3, args=(name, True))) < 1e-5


# --- the same parameters on all ranks ------------------------------------------------------------------------


class Branches(nn.Module):
    """The second branch is used in some steps, on rank 0 alone in others, or nowhere."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(20, 30), nn.Linear(20, 30)

    def forward(self, inputs: torch.Tensor, both: bool) -> torch.Tensor:
        return (self.first(inputs) + (self.second(inputs) if both else 0)).square().mean()


def branches(rank: int, world_size: int) -> tuple[float, list[bool], str]:
    network, alone = Branches(), Branches()
    model = DistributedDataParallel(network, find_unused_parameters=True)
    state = CompressedState(Int8())
    model.register_comm_hook(state, compressed_hook)
    applied, given, is_none = torch.zeros(30, 20).double(), torch.zeros(30, 20).double(), []
    for step in range(8):
        both = step % 4 in (0, 1) or (step % 4 == 2 and rank == 0)
        inputs = torch.randn(8, 20, generator=torch.Generator().manual_seed(100 * step + rank))
        model.zero_grad()
        alone.zero_grad()
        model(inputs, both).backward()
        alone(inputs, both).backward()
        is_none.append(network.second.weight.grad is None)
        for total, weight in ((applied, network.second.weight), (given, alone.second.weight)):
            if weight.grad is not None:
                total += weight.grad
    kept = state.state_dict()["residuals"]["second.weight"].view(30, 20)
    given = (given - kept.double()) / world_size
    dist.all_reduce(given)
    return float((applied - given).abs().max() / given.abs().max()), is_none, digest([applied])


def test_a_parameter_that_nobody_uses_keeps_its_residual_for_later() -> None:
    results = run_ranks(branches, 2)
    for error, is_none, _ in results:
        assert error < 1e-5
        assert is_none == [False, False, False, True] * 2
    assert len({last for *_, last in results}) == 1


# --- Inf and NaN ---------------------------------------------------------------------------------------------


def scales(rank: int, world_size: int) -> float:
    """Return by how much gradients of a loss whose scale changes differ from those of a constant one."""
    results = []
    for factors in ([1.0] * 4, [1.0, 1.0, 4.0, 0.5]):
        factor = iter(factors)
        current = [1.0]
        model = wrapped()
        model.register_comm_hook(
            CompressedState(SIDCo(0.05), loss_scale=lambda current=current: current[0]), compressed_hook
        )
        for step, current[0] in enumerate(factor):
            model.zero_grad()
            inputs, labels = batch(rank, step)
            (nn.functional.cross_entropy(model(inputs), labels) * current[0]).backward()
        results.append(torch.cat([gradient.flatten() for gradient in gradients(model)]) / current[0])
    assert float(results[0].abs().max()) > 1e-3
    return float((results[0] - results[1]).abs().max())


def test_residuals_follow_the_scale_of_the_loss() -> None:
    assert max(run_ranks(scales, 2)) < 1e-6


# --- around the state ----------------------------------------------------------------------------------------


def turns(rank: int, world_size: int) -> tuple[list[list[str]], list[str]]:
    orders, digests = [], []
    for make, hook in ((CompressedState, compressed_hook), (CrossoverState, crossover_hook)):
        model, mutex = wrapped(), RecordingTurn()
        state = make(codec=(SIDCo(0.05), Int8()), mutex=mutex)
        model.register_comm_hook(state, hook)
        for step in range(4):
            if step == 3:
                state.drain()
            backward(model, rank, step)
        assert not any(residual.any() for residual in state.state_dict()["residuals"].values())
        found = state.stats()["codec"] if hook is crossover_hook else state.stats()
        assert 0.1 < found["rate"] < 0.4
        orders.append(mutex.order)
        digests.append(digest(gradients(model)))
    return orders, digests


def test_the_turn_is_given_away_while_messages_travel() -> None:
    for orders, digests in run_ranks(turns, 2):
        assert orders == [["release", "request", "acquire"] * 4] * 2
        assert digests[0] == digests[1]

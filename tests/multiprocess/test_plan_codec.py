"""`plan_codec` between real ranks: rank 0's choice on all, and an error on all where nothing was recorded."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp import UnsupportedConfigurationError
from crossover_ddp.codecs import CodecPlan, CompressedState, Int8, PerPair, compressed_hook
from crossover_ddp.comm_hooks import CrossoverState, DecoupledState, crossover_hook, decoupled_hook
from tests.harness import run_ranks
from tests.harness.campaign import IN_CAMPAIGN
from tests.multiprocess.compressed_training import backward, wrapped
from tests.multiprocess.identity_codec import Identity

CANDIDATES = (None, Int8())


def plans(rank: int, world_size: int) -> list[CodecPlan]:
    found = []
    with pytest.raises(UnsupportedConfigurationError, match="expected recorded steps on all ranks"):
        CompressedState(None).plan_codec(CANDIDATES)
    for state, hook in (
        (CompressedState(None), compressed_hook),
        (CompressedState(Int8()), compressed_hook),
        (CrossoverState(), crossover_hook),
    ):
        model = wrapped()
        model.register_comm_hook(state, hook)
        for step in range(4):
            model.zero_grad()
            backward(model, rank, step)
        found.append(state.plan_codec(CANDIDATES))
    with pytest.raises(ValueError, match="got a PerPair among them"):
        state.plan_codec([(PerPair.by_node(range(world_size), far=Int8()), Int8())])
    with pytest.raises(UnsupportedConfigurationError, match="whose processor time is not known"):
        state.plan_codec([None, Identity()])
    return found


def decoupled_plan(rank: int, world_size: int) -> list[CodecPlan]:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    model = DistributedDataParallel(network, bucket_cap_mb=0.01, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    state = DecoupledState(optimizer, defer="always")
    model.register_comm_hook(state, decoupled_hook)
    with pytest.raises(UnsupportedConfigurationError, match="expected recorded steps on all ranks"):
        state.plan_codec(CANDIDATES)
    for step in range(6):
        optimizer.zero_grad()
        inputs = torch.randn(16, 64, generator=torch.Generator().manual_seed(step + rank))
        model(inputs).square().mean().backward()
        optimizer.step()
    return [state.plan_codec(CANDIDATES)]


CELLS: list[tuple[object, int]] = [(plans, 3), (decoupled_plan, 2)]
if IN_CAMPAIGN:
    CELLS = [*itertools.product((plans, decoupled_plan), (2, 3))]


@pytest.mark.parametrize(("function", "world_size"), CELLS)
def test_all_ranks_have_the_plan_of_rank_0(function: object, world_size: int) -> None:
    first, *others = run_ranks(function, world_size)
    assert others == [first] * (world_size - 1)
    for plan in first:
        codec = plan.codec
        assert codec in CANDIDATES
        assert [codec for codec, _, _ in plan.options] == list(CANDIDATES)
        assert [rate for _, rate, _ in plan.options] == pytest.approx([1.0, 0.254], abs=0.002)
        assert plan.step_s == next(step_s for each, _, step_s in plan.options if each == codec)
        assert min(step_s for *_, step_s in plan.options) > 0


def alone(rank: int, world_size: int) -> None:
    model, state = wrapped(), CompressedState(None)
    model.register_comm_hook(state, compressed_hook)
    for step in range(4):
        backward(model, rank, step)
    with pytest.raises(UnsupportedConfigurationError, match="expected at least two ranks"):
        state.plan_codec()


def test_one_rank_has_nothing_to_plan() -> None:
    run_ranks(alone, 1)

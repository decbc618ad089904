"""A codec for each pair of ranks between real ranks: the same bits everywhere."""

from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp import UnsupportedConfigurationError
from crossover_ddp.codecs import CompressedState, Half, Int8, PerPair, SIDCo, compressed_hook
from crossover_ddp.comm_hooks import CrossoverState, DecoupledState, crossover_hook, decoupled_hook
from crossover_ddp.kfac_hooks import KFACState, kfac_hook
from tests.harness import run_ranks
from tests.harness.campaign import IN_CAMPAIGN
from tests.multiprocess.compressed_training import (
    added_in_order,
    backward,
    digest,
    gradients,
    network,
    wrapped,
)
from tests.multiprocess.identity_codec import Identity

STEPS = 8 if IN_CAMPAIGN else 5


def on_two_nodes(world_size: int) -> list[int]:
    return [0] * 2 + [1] * (world_size - 2)


def whole_near_ones(rank: int, world_size: int) -> None:
    """All ranks on one node send float32, so their gradients are the sums in the order of ranks."""
    model, alone = wrapped(), network()
    pairs = PerPair.by_node([0] * world_size, far=Int8())
    model.register_comm_hook(CompressedState((pairs, Identity())), compressed_hook)
    for step in range(3):
        model.zero_grad()
        backward(model, rank, step)
        if step:  # the first one travels on the ring
            for got, mean in zip(gradients(model), added_in_order(alone, world_size, step), strict=True):
                assert torch.equal(got, mean)


def test_near_ranks_lose_nothing_on_the_way_to_owners() -> None:
    run_ranks(whole_near_ones, 3)


def registered(model: DistributedDataParallel, kind: str, codec: Any) -> tuple[Any, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    state: Any
    if kind == "crossover":
        state, hook = CrossoverState(codec=codec), crossover_hook
    elif kind == "decoupled":
        state, hook = DecoupledState(optimizer, codec=codec, defer="always"), decoupled_hook
    elif kind == "kfac":
        state, hook = KFACState(model, optimizer, codec=codec), kfac_hook
    else:
        state, hook = CompressedState(codec), compressed_hook
    model.register_comm_hook(state, hook)
    return state, optimizer


def train(rank: int, world_size: int) -> dict[str, str]:
    digests = {}
    codec = (PerPair.by_node(on_two_nodes(world_size), far=SIDCo(0.1), near=Half()), Int8(64))
    for kind in ("compressed", "crossover", "decoupled", "kfac"):
        torch.manual_seed(0)
        model = wrapped(gradient_as_bucket_view=True)
        state, optimizer = registered(model, kind, codec)
        for step in range(STEPS):
            optimizer.zero_grad()
            with model.no_sync():
                backward(model, rank, 100 + step)
            backward(model, rank, step)
            optimizer.step()
        digests[kind] = digest(list(model.parameters()))
        if hasattr(state, "close"):
            state.close()
    return digests


@pytest.mark.parametrize("world_size", [3, 4] if IN_CAMPAIGN else [4])
def test_parameters_are_the_same_on_all_ranks_under_every_state(world_size: int) -> None:
    first, *others = run_ranks(train, world_size)
    assert first["compressed"] == first["crossover"] == first["decoupled"]
    assert first["kfac"] != first["compressed"]
    assert others == [first] * (world_size - 1)


def of_another_size(rank: int, world_size: int) -> None:
    model = wrapped()
    model.register_comm_hook(
        CompressedState((PerPair.by_node([0, 0, 1], far=Int8()), Int8())), compressed_hook
    )
    with pytest.raises(UnsupportedConfigurationError, match="a row for each of 2 ranks, got 3 rows"):
        backward(model, rank, 0)


def test_a_table_for_another_number_of_ranks_is_refused() -> None:
    run_ranks(of_another_size, 2)

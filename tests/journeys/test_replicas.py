"""Parameters that must be the same on all ranks are compared in some steps; who differs is named."""

import os
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from tests.harness import in_ranks
from tests.harness.networks import Branches, mlp
from tests.harness.oracles import error_of
from tests.harness.training import WIDTH, Training, decoupled

OFF = "CROSSOVER_COMPARE_REPLICAS"
KINDS = (torch.uint8, torch.bfloat16, torch.float32, torch.complex64)  # that gloo broadcasts


def part_from(training: Training, name: str) -> None:
    with torch.no_grad():
        training.model.module.get_parameter(name).flatten()[0] += 1


@pytest.mark.defect("strangers-0", "kfac-S10")
@pytest.mark.parametrize("way", ["split", "crossover", "wrapped", "int8", "decoupled", "kfac", "muon"])
@in_ranks(3)
def test_a_difference_is_one_error_that_names_parameter_ranks_and_step(rank: int, way: str) -> None:
    training = Training(way, rank)
    training.run(5)
    if rank == 2:
        part_from(training, "2.weight")
    told = error_of(lambda: training.run(4))
    assert told.startswith("expected the same parameters on all ranks, got 2.weight")
    assert " differ in step 8, 2.weight between ranks [0, 1] and [2]; " in told
    assert training.model.module[0].bias.grad.isfinite().all(), "the error has cost the mean"
    training.drop()
    training.run(3)  # step 16 is the next that is compared


class Kinds(nn.Module):
    """Parameters of many kinds, none of them with a gradient but one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 3)
        kinds = [torch.ones(3, 5).to(kind).t() for kind in KINDS]
        kinds += [torch.full((3,), torch.nan), torch.empty(0)]
        self.kinds = nn.ParameterList(nn.Parameter(each, requires_grad=False) for each in kinds)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.kinds[-1].sum()  # type: ignore[no-any-return]


@pytest.mark.parametrize("place", [None, *range(len(KINDS))])
@in_ranks(2)
def test_parameters_of_any_kind_are_compared_by_their_bits(rank: int, place: int | None) -> None:
    training = Training("crossover", rank, module=Kinds())
    if rank and place is not None:
        training.model.module.kinds[place].data = torch.zeros(5, 3).to(KINDS[place])

    def train() -> None:
        with training.model.no_sync():
            training.backward()
        training.run(2)

    expected = "no error" if place is None else f"got kinds.{place} that differ in step 1, "
    assert expected in error_of(train)


@pytest.mark.parametrize("how", ["ignored", "argument", "argument on one rank", "environment", "nothing"])
@in_ranks(2)
def test_replicas_may_differ_on_purpose(rank: int, how: str) -> None:
    module = mlp(WIDTH, WIDTH, WIDTH, seed=3)
    if how == "ignored":
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["2.weight"])
    training = Training("crossover" if how.startswith("argument") else "split", rank, module=module)
    if how == "argument" or (how == "argument on one rank" and rank):
        training.state.compare_replicas = False
    with torch.no_grad():
        module[2].weight += rank
    with mock.patch.dict(os.environ, {OFF: "0"} if how == "environment" else {}):
        assert (error_of(lambda: training.run(4)) == "no error") == (how != "nothing")


@in_ranks(2)
def test_ranks_that_have_joined_are_not_compared(rank: int) -> None:
    """Rank 0 runs out of data: its parameters stay behind until Join's end."""
    training = Training("split", rank)
    with Join([training.model]):
        training.run(3 + 6 * rank)


@pytest.mark.parametrize("way", ["split", "owned"])  # owners' parameters take the place of others' behind the step
@in_ranks(2)
def test_each_model_of_a_group_has_steps_of_its_own(rank: int, way: str) -> None:
    """Two models take turns on one group, the second one twice as often; rank 1 has another second one."""
    first, second = Training(way, rank), Training(way, rank, module=mlp(WIDTH, 4, WIDTH, seed=1))
    if rank:
        part_from(second, "2.bias")

    def round_of_steps() -> None:
        first.step()
        second.run(2)

    assert "2.bias that differ in step 1" in error_of(round_of_steps)


@pytest.mark.parametrize("owners", [None, "layers"])
@in_ranks(2)
def test_updates_that_one_rank_has_read_and_another_has_not_are_no_difference(rank: int, owners: Any) -> None:
    way = decoupled(owners=owners) if owners else "decoupled"
    training = Training(way, rank, module=Branches(rank), find_unused_parameters=True).run(18)
    training.state.consolidate()
    training.close()

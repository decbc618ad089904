"""Parameters that must be the same on all ranks are compared in some steps; who differs is named."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp import (
    CrossoverState,
    DecoupledState,
    crossover_hook,
    decoupled_hook,
    reduce_scatter_all_gather_hook,
)
from crossover_ddp.errors import ReplicasDifferError
from tests.harness import run_ranks
from tests.harness.networks import mlp
from tests.harness.training import WIDTH, Training, hooked

OFF = "CROSSOVER_COMPARE_REPLICAS"
KINDS = (torch.uint8, torch.bfloat16, torch.float32, torch.complex64)  # that gloo broadcasts


def error_of(train: Callable[[], object]) -> str:
    try:
        train()
    except ReplicasDifferError as error:
        return str(error)
    return "none"


def part_from(training: Training, name: str) -> None:
    with torch.no_grad():
        training.model.module.get_parameter(name).flatten()[0] += 1


def late_difference(rank: int, world_size: int, way: str) -> tuple[str, str, bool]:
    """One rank's parameter changes after five steps; return what is told, and whether the error cost the mean."""
    training = Training(way, rank)
    training.run(5)
    if rank == 2:
        part_from(training, "2.weight")
    told = error_of(lambda: training.run(4))
    mean = training.model.module[0].bias.grad.clone()
    for optimizer in training.optimizers:
        optimizer.zero_grad()
    return told, error_of(lambda: training.run(3)), bool(mean.isfinite().all())


@pytest.mark.parametrize("way", ["split", "crossover", "wrapped", "int8"])
def test_a_difference_is_one_error_on_all_ranks_that_names_parameter_ranks_and_step(way: str) -> None:
    for told, later, is_mean in run_ranks(late_difference, 3, args=(way,)):
        assert told.startswith("expected the same parameters on all ranks, got 2.weight")
        assert " differ in step 8, 2.weight between ranks [0, 1] and [2]; " in told
        assert later == "none", "step 16 is the next that is compared"
        assert is_mean


class Kinds(nn.Module):
    """Parameters of many kinds, none of them with a gradient but one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.kinds = nn.ParameterList(
            [nn.Parameter(torch.ones(3, 5).to(kind).t(), requires_grad=False) for kind in KINDS]
            + [nn.Parameter(torch.full((3,), torch.nan), requires_grad=False), nn.Parameter(torch.empty(0))]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.kinds[-1].sum()  # type: ignore[no-any-return]


def frozen_difference(rank: int, world_size: int, place: int | None) -> str:
    model = hooked(Kinds(), crossover_hook, CrossoverState())
    if rank and place is not None:
        model.module.kinds[place].data = torch.zeros(5, 3).to(KINDS[place])

    def train() -> None:
        for _ in range(3):
            with model.no_sync():
                model(torch.ones(2, 3)).sum().backward()
            model(torch.ones(2, 3)).sum().backward()

    return error_of(train)


@pytest.mark.parametrize("place", [None, *range(len(KINDS))])
def test_parameters_of_any_kind_without_gradients_are_compared_by_their_bits(place: int | None) -> None:
    expected = "none" if place is None else f"got kinds.{place} that differ in step 1, "
    assert all(expected in told for told in run_ranks(frozen_difference, 2, args=(place,)))


def on_purpose(rank: int, world_size: int, how: str) -> str:
    module = mlp(WIDTH, WIDTH, WIDTH, seed=3)
    if how == "ignored":
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["2.weight"])
    wanted = how != "argument" and not (how == "argument on one rank" and rank)
    hook: Any = crossover_hook if how.startswith("argument") else reduce_scatter_all_gather_hook
    state = CrossoverState(compare_replicas=wanted) if hook is crossover_hook else None
    model = hooked(module, hook, state)
    with torch.no_grad():
        model.module[2].weight += rank

    def train() -> None:
        for _ in range(4):
            model(torch.ones(2, WIDTH)).sum().backward()

    return error_of(train)


@pytest.mark.parametrize("how", ["ignored", "argument", "argument on one rank", "environment", "nothing"])
def test_replicas_may_differ_on_purpose(how: str) -> None:
    environment = {OFF: "0"} if how == "environment" else {}
    told = run_ranks(on_purpose, 2, args=(how,), environment=environment)
    assert all((each == "none") == (how != "nothing") for each in told)


def uneven(rank: int, world_size: int) -> str:
    """Rank 0 runs out of data: its parameters stay behind until Join's end."""
    training = Training("split", rank)
    with Join([training.model]):
        told = error_of(lambda: training.run(3 + 6 * rank))
    return told


def test_ranks_that_have_joined_are_not_compared() -> None:
    assert run_ranks(uneven, 2) == ["none"] * 2


def two_models(rank: int, world_size: int) -> list[str]:
    """Two models take turns on one group, the second one twice as often; rank 1 has another second one."""
    first, second = Training("split", rank), Training("split", rank, module=mlp(WIDTH, 4, WIDTH, seed=1))
    if rank:
        part_from(second, "2.bias")

    def round_of_steps() -> None:
        first.step()
        second.run(2)

    return [error_of(round_of_steps) for _ in range(3)]


def test_each_model_of_a_group_has_steps_of_its_own() -> None:
    for first, *_ in run_ranks(two_models, 2):
        assert "2.bias that differ in step 1" in first


class Branches(nn.Module):
    """Uses one of two layers, another one on each rank and in each step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.last = nn.Linear(WIDTH, 2)
        self.place = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.layers[self.place % 2](x))  # type: ignore[no-any-return]


def other_branches(rank: int, world_size: int, owners: Any) -> str:
    model = DistributedDataParallel(
        Branches(), find_unused_parameters=True, gradient_as_bucket_view=True, bucket_cap_mb=1e-4
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = DecoupledState(optimizer, defer="always", owners=owners)
    model.register_comm_hook(state, decoupled_hook)

    def train() -> None:
        for step in range(18):
            model.module.place = rank + step
            model(torch.ones(2, WIDTH)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    told = error_of(train)
    state.consolidate()
    state.close()
    return told


@pytest.mark.parametrize("owners", [None, "layers"])
def test_updates_that_one_rank_has_read_and_another_has_not_are_no_difference(owners: Any) -> None:
    assert run_ranks(other_branches, 2, args=(owners,)) == ["none"] * 2

"""K-FAC in real ranks: the directions of an independent float64 computation, in every setting."""

import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp.kfac_hooks import KFACState, kfac_hook
from tests.harness import run_ranks
from tests.harness.campaign import IN_CAMPAIGN
from tests.multiprocess.kfac_oracle import Oracle, Settings, step_for_all

TINY_MB = 0.0015
LR = 0.05
STEPS = 4
RELATIVE = 1e-4

SETTINGS: dict[str, Settings] = {
    "inverse": Settings(),
    "eigen": Settings(solver="eigen"),
    "no clip": Settings(kl_clip=None),
    "seldom": Settings(factor_update_steps=2, inv_update_steps=3),
    "local": Settings(factors="local"),
    "reduce": Settings(weight_sharing="reduce"),
    "early": Settings(),
    "spread": Settings(factor_update_steps=2, inv_update_steps=3),
}
PLANNED_AFTER = 2  # the first step has another bucket


def is_short(name: str, cap_mb: float, world_size: int) -> bool:
    """Two ranks do all; of the others' settings one arrangement of buckets each is for the campaign alone."""
    if name == "spread":
        return cap_mb != TINY_MB and world_size == 2
    if world_size == 4:
        return cap_mb == TINY_MB or name in ("inverse", "early")
    return world_size == 2 or cap_mb != TINY_MB


CELLS = [
    (name, cap_mb, world_size)
    for name, cap_mb, world_size in itertools.product(SETTINGS, (TINY_MB, 25.0), (1, 2, 4))
    if IN_CAMPAIGN or is_short(name, cap_mb, world_size)
]


class Everything(nn.Module):
    """Every kind of layer that is preconditioned, and some that pass through."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 3)
        self.first = nn.Conv2d(2, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.grouped = nn.Conv2d(6, 4, (3, 2), groups=2, bias=False)
        self.spread = nn.Conv2d(4, 6, 3, stride=2, dilation=2, padding=2)
        self.depthwise = nn.Conv2d(6, 6, 3, groups=6, padding=1)
        self.point = nn.Conv2d(6, 3, 1, bias=False)
        self.tokens = nn.Linear(3, 3, bias=False)
        self.twice = nn.Linear(3, 3)
        self.head = nn.Linear(48, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.first(x)))
        x = self.depthwise(torch.tanh(self.spread(torch.tanh(self.grouped(x)))))
        x = self.point(torch.tanh(x)).flatten(2).mT
        x = torch.tanh(self.tokens(x)) + self.embedding(torch.arange(x.shape[1]) % 7)
        x = self.twice(torch.tanh(self.twice(x)))
        return self.head(x.flatten(1))  # type: ignore[no-any-return]


def dominated() -> nn.Sequential:
    """Return a network with a layer that costs more than all others."""
    wide = (nn.Linear(6, 230), nn.Tanh(), nn.Linear(230, 300), nn.Tanh(), nn.Linear(300, 5))
    return nn.Sequential(nn.Flatten(), nn.Linear(144, 6), nn.Tanh(), *wide)


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(6, 2, 9, 8, generator=generator), torch.randint(0, 5, (6,), generator=generator)


def model_and_state(
    settings: Settings, cap_mb: float, network: Callable[[], nn.Module] = Everything
) -> tuple[DistributedDataParallel, KFACState, torch.optim.SGD]:
    torch.manual_seed(3)
    model = DistributedDataParallel(network(), bucket_cap_mb=cap_mb)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    state = KFACState(model, optimizer, **asdict(settings))
    model.register_comm_hook(state, kfac_hook)
    return model, state, optimizer


def errors_of_rank(rank: int, world_size: int) -> dict[tuple[str, float], list[float]]:
    """Return the greatest relative error of each step, by setting and bucket cap."""
    return {
        (name, cap_mb): list(errors(name, cap_mb, rank, world_size))
        for name, cap_mb, of_size in CELLS
        if of_size == world_size
    }


def errors(name: str, cap_mb: float, rank: int, world_size: int) -> Iterator[float]:
    settings = SETTINGS[name]
    model, state, optimizer = model_and_state(settings, cap_mb, dominated if name == "spread" else Everything)
    oracle = Oracle(settings, LR, state.owners)
    for step in range(STEPS):
        if name == "early" and step == PLANNED_AFTER:
            assert state.plan_factors(early=True).early
        batches = [batch(each, step) for each in range(world_size)]
        replicas = [copy.deepcopy(model.module).double() for _ in range(0 if rank else world_size)]
        optimizer.zero_grad()
        inputs, targets = batches[rank]
        nn.functional.cross_entropy(model(inputs), targets).backward()
        wide = [(inputs.double(), targets) for inputs, targets in batches]
        expected = step_for_all(oracle, replicas, wide, model.module)
        yield relative_error(model.module, expected)
        optimizer.step()
    assert ("spread over all ranks" in state.report()) == (name == "spread")
    state.close()
    assert (oracle.least_scale < 1) == (settings.kl_clip is not None), "the clip is to be seen at work"


def relative_error(network: nn.Module, expected: dict[str, Tensor]) -> float:
    """Return the greatest error of a layer; of a bias alone it says little: one before a BatchNorm has no gradient."""
    errors: dict[str, float] = {}
    scales: dict[str, float] = {}
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None
        layer = name.rpartition(".")[0]
        error = float((parameter.grad.double() - expected[name]).abs().max())
        errors[layer] = max(errors.get(layer, 0.0), error)
        scales[layer] = max(scales.get(layer, 0.0), float(expected[name].abs().max()))
    return max(error / scales[layer] for layer, error in errors.items())


def uneven_ranks(rank: int, world_size: int) -> list[float]:
    """Rank 1 never calls the second layer; input factors leave early. Return its running mean's greatest error."""

    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return x if rank == 1 else self.second(x)  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model = DistributedDataParallel(Branch(), find_unused_parameters=True)
    state = KFACState(model, kl_clip=None, factor_decay=0.5, inv_update_steps=1)
    model.register_comm_hook(state, kfac_hook)
    means: dict[str, Tensor] = {}
    for step in range(4):
        if step == PLANNED_AFTER:
            assert {layer for group in state.plan_factors(early=True).early for layer in group} == {0, 1}
        inputs = [torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + r)) for r in range(2)]
        model.zero_grad()
        model(inputs[rank]).square().mean().backward()
        second = nn.functional.linear(inputs[0], *model.module.first.parameters()).detach()
        for name, factor in (("first", second_moment(*inputs)), ("second", second_moment(second))):
            means[name] = factor if step == 0 else (means[name] + factor) / 2
    layers = state.state_dict()["layers"]
    return [float((layers[name]["a"][0] - mean).abs().max()) for name, mean in means.items()]


def second_moment(*inputs: Tensor) -> Tensor:
    """Return A of a Linear with a bias, the mean over the ranks that have inputs."""
    rows = torch.cat([torch.cat([x, torch.ones(len(x), 1)], dim=1) for x in inputs])
    return rows.T @ rows / max(1, len(rows))


def test_a_rank_without_a_layer_sends_as_others_do_and_changes_no_mean() -> None:
    found = run_ranks(uneven_ranks, 2)
    assert all(error < 1e-5 for of_rank in found for error in of_rank), found


def columns_of(rank: int, world_size: int) -> list[float]:
    """Train with few samples and with many, which travel as columns and as triangles; return the errors of A's mean."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(30, 20))
    state = KFACState(model, kl_clip=None, inv_update_steps=1)
    model.register_comm_hook(state, kfac_hook)
    errors: list[float] = []
    mean = torch.zeros(31, 31)
    for step, samples in enumerate([(3, 3), (2, 2), (3, 20), (40, 6), (30, 30), (0, 2), (6, 6)]):
        inputs = [
            torch.randn(samples[each], 30, generator=torch.Generator().manual_seed(10 * step + each))
            for each in range(world_size)
        ]
        model.zero_grad()
        model(inputs[rank]).square().sum().backward()
        (layer,) = state.state_dict()["layers"].values()
        factor = torch.stack([second_moment(each) for each in inputs]).mean(0)
        mean = factor if step == 0 else 0.95 * mean + 0.05 * factor
        errors.append(float((layer["a"][0] - mean).abs().max()))
    assert state.stats()["dropped"] == 0
    return errors


def test_few_samples_travel_as_columns_and_many_as_triangles_to_one_mean() -> None:
    for of_rank in run_ranks(columns_of, 2):
        assert max(of_rank) < 1e-5


@cache
def findings(world_size: int) -> list[dict[tuple[str, float], list[float]]]:
    return run_ranks(errors_of_rank, world_size, timeout_s=240)


@pytest.mark.parametrize(("name", "cap_mb", "world_size"), CELLS)
def test_gradients_are_those_of_an_independent_computation(name: str, cap_mb: float, world_size: int) -> None:
    for rank, of_rank in enumerate(findings(world_size)):
        assert max(of_rank[name, cap_mb]) < RELATIVE, (rank, of_rank[name, cap_mb])

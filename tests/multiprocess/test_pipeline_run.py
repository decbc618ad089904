"""Plans run in real ranks: losses and gradients are those of the model that was not cut."""

import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from crossover_ddp.gpu_mutex import GPUMutex
from crossover_ddp.pipeline import Cluster, Plan, Profile, Runner, Stage
from crossover_ddp.pipeline.model import StagedChain
from crossover_ddp.pipeline.schedule import best_order, gpipe, interleaved, one_forward_one_backward
from crossover_ddp.pipeline.simulate import simulate
from tests.harness import run_ranks

TOLERANCE = 1e-5
STEPS = 3
WIDTH, MICRO, M = 12, 2, 8


def chain() -> list[nn.Module]:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return [*layers, nn.Linear(WIDTH, 5)]


def batch(step: int, size: int = MICRO * M) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(size, WIDTH, generator=generator), torch.randint(0, 5, (size,), generator=generator)


def plan_of(stages: Sequence[Stage], ranks: int, order: str = "search", microbatches: int = M) -> Plan:
    """Return a plan of given stages."""
    profile = Profile.measure(chain(), batch(0)[0][:MICRO], repeats=1)
    cluster = Cluster(((1e8,) * ranks,) * ranks)
    staged = StagedChain(profile, cluster, stages, microbatches)
    if order == "search":
        step = best_order(staged)
        assert step is not None
    else:
        orders = {
            "gpipe": gpipe,
            "1f1b": one_forward_one_backward,
            "interleaved": lambda each: interleaved(each, ranks),
        }[order](staged)
        assert orders is not None
        step = simulate(staged, orders)
    return Plan(
        tuple(stages), step.orders, microbatches, step.step_s, order, {}, cluster.names,
        tuple(layer.name for layer in profile.layers),
        tuple((profile.layers[s.stop - 1].shape, profile.layers[s.stop - 1].dtype) for s in stages),
        step.spans,
    )  # fmt: skip


def whole_model() -> tuple[list[float], list[torch.Tensor], list[torch.Tensor]]:
    """Return losses, the last step's gradients, and the parameters after training, of the model that was not cut."""
    model = nn.Sequential(*chain())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = batch(step)
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return (
        losses,
        [p.grad for p in model.parameters() if p.grad is not None],
        [p.detach() for p in model.parameters()],
    )


def train(rank: int, world_size: int, document: Any, turns: bool = False) -> Any:
    """Train by the plan and return for each stage its gradients and parameters, and the losses."""
    plan = Plan.from_json(document)
    mutex = GPUMutex(device=f"{os.environ['PIPELINE_DEVICES']}-{rank}") if turns else None
    runner = Runner(plan, chain(), nn.functional.cross_entropy, mutex=mutex)
    parameters = list(runner.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9) if parameters else None
    losses = []
    for step in range(STEPS):
        for parameter in parameters:
            parameter.grad = None
        loss = runner.step(*batch(step))
        if optimizer:
            optimizer.step()
        losses.append(None if loss is None else float(loss))
    found = {
        stage: [(p.grad, p.detach()) for p in module.parameters()] for stage, module in runner.modules.items()
    }
    stats = mutex.stats() if mutex else {}
    dist.barrier()
    return losses, found, stats


def assert_equal(results: Sequence[Any], plan: Plan) -> None:
    losses, gradients, parameters = whole_model()
    counts = [sum(1 for _ in layer.parameters()) for layer in chain()]
    seen = 0
    for rank, (found_losses, found, _) in enumerate(results):
        for number, tensors in found.items():
            stage = plan.stages[number]
            assert rank in stage.devices
            first = sum(counts[: stage.start])
            assert len(tensors) == sum(counts[stage.start : stage.stop])
            for place, (gradient, parameter) in enumerate(tensors, first):
                torch.testing.assert_close(gradient, gradients[place], rtol=TOLERANCE, atol=TOLERANCE)
                torch.testing.assert_close(parameter, parameters[place], rtol=TOLERANCE, atol=TOLERANCE)
                seen += 1
            if number == len(plan.stages) - 1:
                assert found_losses == pytest.approx(losses, rel=TOLERANCE)
    assert seen == sum(sum(counts[s.start : s.stop]) * len(s.devices) for s in plan.stages)


PLANS = {
    "two stages": ([Stage(0, 4, (0,)), Stage(4, 9, (1,))], 2),
    "data parallel": ([Stage(0, 9, (1, 0))], 2),
    "four stages": ([Stage(0, 2, (2,)), Stage(2, 5, (0,)), Stage(5, 6, (3,)), Stage(6, 9, (1,))], 4),
    "three and one": ([Stage(0, 5, (0, 1, 2)), Stage(5, 9, (3,))], 4),
    "one and three": ([Stage(0, 3, (3,)), Stage(3, 9, (2, 1, 0))], 4),
    "two and two": ([Stage(0, 5, (0, 3)), Stage(5, 9, (1, 2))], 4),
    "an idle rank, a stage without parameters": (
        [Stage(0, 3, (0,)), Stage(3, 4, (1, 2)), Stage(4, 9, (0,))],
        4,
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_losses_and_gradients_are_those_of_the_whole_model(name: str) -> None:
    stages, ranks = PLANS[name]
    plan = plan_of(stages, ranks)
    assert_equal(run_ranks(train, ranks, args=[plan.to_json()]), plan)


@pytest.mark.parametrize("order", ["gpipe", "1f1b", "interleaved"])
def test_known_orders_give_the_same(order: str) -> None:
    stages = [Stage(0, 4, (0,)), Stage(4, 9, (1,))]
    if order == "interleaved":
        stages = [Stage(0, 2, (0,)), Stage(2, 4, (1,)), Stage(4, 7, (0,)), Stage(7, 9, (1,))]
    plan = plan_of(stages, 2, order)
    assert_equal(run_ranks(train, 2, args=[plan.to_json()]), plan)

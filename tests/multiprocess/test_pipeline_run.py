"""Plans run in real ranks: losses and gradients are those of the model that was not cut."""

import dataclasses
import itertools
import os
import signal
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from crossover_ddp.errors import UnsupportedConfigurationError
from crossover_ddp.gpu_mutex import GPUMutex
from crossover_ddp.pipeline import Cluster, Plan, Profile, Runner, Stage
from crossover_ddp.pipeline.model import BACKWARD, FORWARD, Action, Orders, StagedChain
from crossover_ddp.pipeline.schedule import best_order, interleaved, one_forward_one_backward
from crossover_ddp.pipeline.simulate import simulate
from tests.harness import Job, in_ranks, run_jobs, run_ranks
from tests.harness.campaign import IN_CAMPAIGN

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


def plan_of(
    stages: Sequence[Stage], ranks: int, order: str = "search", microbatches: int = M, split: bool = False
) -> Plan:
    """Return a plan of given stages."""
    profile = Profile.measure(chain(), batch(0)[0][:MICRO], repeats=1)
    cluster = Cluster(((1e8,) * ranks,) * ranks)
    staged = StagedChain(profile, cluster, stages, microbatches, split=split)
    if order == "search":
        step = best_order(staged)
        assert step is not None
    else:
        orders = {
            "1f1b": one_forward_one_backward,
            "interleaved": lambda each: interleaved(each, ranks),
            "one by one": one_by_one,
        }[order](staged)
        assert orders is not None
        step = simulate(staged, orders)
    return Plan(
        tuple(stages), step.orders, microbatches, step.step_s, order, {}, cluster.names,
        tuple(layer.name for layer in profile.layers),
        tuple((profile.layers[s.stop - 1].shape, profile.layers[s.stop - 1].dtype) for s in stages),
        step.spans, split,
    )  # fmt: skip


def one_by_one(staged: StagedChain) -> Orders:
    """Let each micro-batch go all the way before the next one begins."""
    orders: dict[int, list[Action]] = {}
    for micro in range(M):
        forward = [Action(stage, FORWARD, micro) for stage in range(len(staged.stages))]
        for action in [*forward, *(each._replace(kind=BACKWARD) for each in reversed(forward))]:
            devices = staged.stages[action.stage].devices
            orders.setdefault(devices[micro % len(devices)], []).append(action)
    return orders


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


def train(rank: int, world_size: int, document: Any, turns: bool = False, steps: int = STEPS) -> Any:
    """Train by the plan and return for each stage its gradients and parameters, and the losses."""
    plan = Plan.from_json(document)
    mutex = GPUMutex(device=f"{os.environ['PIPELINE_DEVICES']}-{rank}") if turns else None
    runner = Runner(plan, chain(), nn.functional.cross_entropy, mutex=mutex)
    parameters = list(runner.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9) if parameters else None
    losses = []
    for step in range(steps):
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


PLANS: dict[str, Any] = {
    "data parallel": ([Stage(0, 9, (1, 0))], 2),
    "interleaved": (
        [Stage(0, 2, (0,)), Stage(2, 4, (1,)), Stage(4, 7, (0,)), Stage(7, 9, (1,))],
        2,
        "interleaved",
    ),
    "four stages": ([Stage(0, 2, (2,)), Stage(2, 5, (0,)), Stage(5, 6, (3,)), Stage(6, 9, (1,))], 4),
    "three and one": ([Stage(0, 5, (0, 1, 2)), Stage(5, 9, (3,))], 4),
    "one and three": ([Stage(0, 3, (3,)), Stage(3, 9, (2, 1, 0))], 4),
    "an idle rank, a stage without parameters": (
        [Stage(0, 3, (0,)), Stage(3, 4, (1, 2)), Stage(4, 9, (0,))],
        4,
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_losses_and_gradients_are_those_of_the_whole_model(name: str) -> None:
    plan = plan_of(*PLANS[name])
    assert_equal(run_ranks(train, PLANS[name][1], args=[plan.to_json()]), plan)


def test_a_replica_that_is_done_keeps_back_no_gradient_that_another_one_needs() -> None:
    """The first stage computes nothing for the second replica before it has the first one's last gradient."""
    plan = plan_of([Stage(0, 5, (0,)), Stage(5, 9, (1, 2))], 3, "one by one")
    assert_equal(run_ranks(train, 3, args=[plan.to_json()]), plan)


def accumulate(rank: int, world_size: int, document: Any) -> Any:
    runner = Runner(Plan.from_json(document), chain(), nn.functional.cross_entropy)
    for step in range(2):
        runner.step(*batch(step))
    dist.barrier()
    return {stage: [p.grad for p in module.parameters()] for stage, module in runner.modules.items()}


def test_gradients_are_added_to_those_of_the_step_before() -> None:
    stages, ranks = PLANS["three and one"]
    plan = plan_of(stages, ranks)
    layers = chain()
    for step in range(2):
        x, y = batch(step)
        nn.functional.cross_entropy(nn.Sequential(*layers)(x), y).backward()
    for found in run_ranks(accumulate, ranks, args=[plan.to_json()]):
        for number, gradients in found.items():
            stage = plan.stages[number]
            expected = [p.grad for layer in layers[stage.start : stage.stop] for p in layer.parameters()]
            torch.testing.assert_close(gradients, expected, rtol=TOLERANCE, atol=TOLERANCE)


# --- torch's own runtime ---------------------------------------------------------------------------------------------


def cross_check(rank: int, world_size: int, document: Any, path: str) -> Any:
    """Train one step by torch's `_PipelineScheduleRuntime` and return the losses and this stage's gradients."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    plan = Plan.from_json(document)
    (number,) = [k for k, stage in enumerate(plan.stages) if stage.devices == (rank,)]
    stage = plan.stages[number]
    module = nn.Sequential(*chain()[stage.start : stage.stop])
    x, y = batch(0)
    inputs = x[:MICRO] if number == 0 else torch.empty(plan.outputs[number - 1][0], requires_grad=True)
    output = torch.empty(plan.outputs[number][0], requires_grad=True)
    part = PipelineStage(
        module, number, world_size, torch.device("cpu"), input_args=inputs, output_args=output
    )
    runtime = _PipelineScheduleRuntime([part], plan.microbatches, loss_fn=nn.functional.cross_entropy)
    runtime._load_csv(path, format="compute_only")
    losses: list[torch.Tensor] = []
    is_last = number == world_size - 1
    runtime.step(*([x] if number == 0 else []), **({"target": y, "losses": losses} if is_last else {}))
    dist.barrier()
    return [float(loss) for loss in losses], [p.grad for p in module.parameters()]


@pytest.mark.parametrize(("ranks", "split"), [(2, True), *([(4, False), (2, False)] if IN_CAMPAIGN else [])])
def test_torch_runs_the_same_plan_with_the_same_gradients(ranks: int, split: bool, tmp_path: Path) -> None:
    edges = {2: [0, 4, 9], 4: [0, 2, 4, 7, 9]}[ranks]
    # torch's stage k is on rank k.
    stages = [Stage(a, b, (k,)) for k, (a, b) in enumerate(itertools.pairwise(edges))]
    plan = plan_of(stages, ranks, "1f1b")
    exported = plan_of(stages, ranks, split=True) if split else plan
    path = tmp_path / "schedule.csv"
    path.write_text(exported.csv())
    assert ("I" in exported.csv()) == split
    theirs = run_ranks(cross_check, ranks, args=[plan.to_json(), str(path)])
    ours = run_ranks(train, ranks, args=[plan.to_json(), False, 1])
    assert sum(theirs[-1][0]) / M == pytest.approx(ours[-1][0][0], rel=TOLERANCE)
    for (_, expected), (_, stages_of_rank, _) in zip(theirs, ours, strict=True):
        found = [gradient for tensors in stages_of_rank.values() for gradient, _ in tensors]
        assert found
        torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


# --- two jobs --------------------------------------------------------------------------------------------------------


def test_two_jobs_in_bands_have_the_losses_that_they_have_alone() -> None:
    stages, ranks = PLANS["four stages"]
    plan = plan_of(stages, ranks)
    group = {"PIPELINE_DEVICES": uuid.uuid4().hex, "CROSSOVER_GROUP": uuid.uuid4().hex}
    jobs = [Job(train, ranks, [plan.to_json(), True], environment=group, name=name) for name in "ab"]
    for results in run_jobs(jobs):
        assert_equal(results, plan)
        bands = len(next(iter(plan.bands().values())))
        for _, _, stats in results:
            assert stats["disabled_because"] is None
            assert STEPS * bands <= stats["turns"] < 2 * STEPS * bands, (
                "one for each band, and some left to the other"
            )
        assert len({stats["turns"] for _, _, stats in results}) == 1, (
            "ranks of one job took turns of different number"
        )


# --- what cannot work ------------------------------------------------------------------------------------------------


def refusals(rank: int, world_size: int, document: Any) -> None:
    plan, tied, loss_fn = Plan.from_json(document), chain(), nn.functional.cross_entropy
    tied[6].weight = tied[0].weight
    on_meta = [layer.to("meta") for layer in chain()]
    for change, layers, message in (
        ({}, chain()[1:], "expected the 9 layers of the plan, got 8"),
        ({"split": True}, chain(), "expected a plan with whole backwards"),
        ({"devices": ("a", "b", "c")}, chain(), "expected a rank for each of the plan's 3 devices, got 2"),
        ({"step_s": float(rank)}, chain(), "expected the same plan on all ranks"),
        ({}, on_meta, "expected layers on the CPU"),
        ({}, tied, "expected parameters of one stage each, got one of stages 0 and 1"),
    ):
        with pytest.raises((ValueError, UnsupportedConfigurationError), match=message):
            Runner(dataclasses.replace(plan, **change), layers, loss_fn)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"divided into 8 micro-batches, got len\(x\)=9"):
        Runner(plan, chain(), loss_fn).step(*batch(0, 9))


def test_what_cannot_work_is_refused() -> None:
    plan = plan_of([Stage(0, 4, (0,)), Stage(4, 9, (1,))], 2)
    run_ranks(refusals, 2, args=[plan.to_json()])


def another_size(rank: int, world_size: int, document: Any) -> str:
    runner = Runner(Plan.from_json(document), chain(), nn.functional.cross_entropy)
    with pytest.raises((ValueError, RuntimeError)) as caught:
        runner.step(*batch(0, M))
    if "an output of float32[2, 12] of stage 0, got float32[1, 12]" in str(caught.value):
        os.kill(os.getpid(), signal.SIGKILL)
    return str(caught.value)


def test_micro_batches_of_another_size_are_refused() -> None:
    """The first stage finds it; its rank ends, which is an error for the others and no hang."""
    plan = plan_of([Stage(0, 4, (0,)), Stage(4, 9, (1,))], 2)
    _, second = run_ranks(another_size, 2, args=[plan.to_json()], deaths={0: signal.SIGKILL})
    assert second


# --- a cluster is measured -------------------------------------------------------------------------------------------


@in_ranks(3)
def test_all_ranks_measure_the_same_cluster(rank: int) -> Cluster:
    found = Cluster.measure(size_bytes=1 << 18, names=tuple("abc"))
    assert found.names == ("a", "b", "c")
    pairs = list(itertools.permutations(range(3), 2))
    assert all(found.rate(a, b) == found.rate(b, a) > 1e5 for a, b in pairs)
    assert all(0 <= found.latency(a, b) < 1 for a, b in pairs)
    return found

"""Plans in real ranks: losses and gradients are those of the model that was not cut."""

import dataclasses
import itertools
import os
import signal
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
from tests.harness.groups import new_group

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
    return torch.randn(size, WIDTH, generator=generator), torch.randint(
        0, 5, (size,), generator=generator
    )


def plan_of(
    places: Sequence[tuple[int, ...]],
    ranks: int,
    order: str = "search",
    microbatches: int = M,
    split: bool = False,
) -> Plan:
    stages = [Stage(start, stop, tuple(devices)) for start, stop, *devices in places]
    profile = Profile.measure(chain(), batch(0)[0][:MICRO], repeats=1)
    cluster = Cluster(((1e8,) * ranks,) * ranks)
    staged = StagedChain(profile, cluster, stages, microbatches, split=split)
    known = {
        "1f1b": one_forward_one_backward,
        "interleaved": lambda each: interleaved(each, ranks),
        "one by one": one_by_one,
    }
    step = simulate(staged, known[order](staged)) if order in known else best_order(staged)
    return Plan(
        tuple(stages), step.orders, microbatches, step.step_s, order, {}, cluster.names,
        tuple(layer.name for layer in profile.layers),
        tuple((profile.layers[s.stop - 1].shape, profile.layers[s.stop - 1].dtype) for s in stages),
        step.spans, split,
    )  # fmt: skip


def one_by_one(staged: StagedChain) -> Orders:
    """Let each micro-batch finish all stages before the next one begins."""
    orders: dict[int, list[Action]] = {}
    for micro in range(M):
        forward = [Action(stage, FORWARD, micro) for stage in range(len(staged.stages))]
        for action in [*forward, *(each._replace(kind=BACKWARD) for each in reversed(forward))]:
            devices = staged.stages[action.stage].devices
            orders.setdefault(devices[micro % len(devices)], []).append(action)
    return orders


# For each stage: its first layer, the one behind its last, its devices. Then the number of ranks,
# and the order.
PLANS: dict[str, Any] = {
    "data parallel": ([(0, 9, 1, 0)], 2),
    "interleaved": ([(0, 2, 0), (2, 4, 1), (4, 7, 0), (7, 9, 1)], 2, "interleaved"),
    "four stages": ([(0, 2, 2), (2, 5, 0), (5, 6, 3), (6, 9, 1)], 4),
    "three and one": ([(0, 5, 0, 1, 2), (5, 9, 3)], 4),
    "one and three": ([(0, 3, 3), (3, 9, 2, 1, 0)], 4),
    "an idle rank, a stage without parameters": ([(0, 3, 0), (3, 4, 1, 2), (4, 9, 0)], 4),
    # The first stage computes nothing for the second replica before it has received the last
    # gradient of the first one. A replica that has finished must not delay that gradient.
    "done before another replica": ([(0, 5, 0), (5, 9, 1, 2)], 3, "one by one"),
}
TWO_STAGES = [(0, 4, 0), (4, 9, 1)]


def train(
    rank: int, world_size: int, document: Any, turns: bool = False, updates: bool = True
) -> dict[str, Any]:
    """Train by the plan, and compare with the whole model. Return the mutex's stats.

    Without ``updates`` gradients accumulate.
    """
    plan, whole = Plan.from_json(document), nn.Sequential(*chain())
    mutex = GPUMutex(device=f"device{rank}") if turns else None
    runner = Runner(plan, chain(), nn.functional.cross_entropy, mutex=mutex)
    own = {number: stage for number, stage in enumerate(plan.stages) if rank in stage.devices}
    assert runner.modules.keys() == own.keys()
    trained = [*filter(None, ([*runner.parameters()], [*whole.parameters()]))]
    optimizers = [torch.optim.SGD(each, lr=0.1, momentum=0.9) for each in trained]
    for step in range(STEPS):
        loss, expected = runner.step(*batch(step)), loss_of(whole, step)
        assert (loss is not None) == (len(plan.stages) - 1 in own)
        assert loss is None or float(loss) == pytest.approx(float(expected), rel=TOLERANCE)
        for optimizer in optimizers if updates else ():
            optimizer.step()
        for number, stage in own.items():
            assert_same(runner.modules[number], whole[stage.start : stage.stop])
        for optimizer in optimizers if updates else ():
            optimizer.zero_grad()
    dist.barrier()
    return dict(mutex.stats()) if mutex else {}


def loss_of(whole: nn.Sequential, step: int) -> torch.Tensor:
    x, y = batch(step)
    loss = nn.functional.cross_entropy(whole(x), y)
    loss.backward()
    return loss.detach()


def assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    found, expected = ([(p.detach(), p.grad) for p in each.parameters()] for each in (ours, theirs))
    torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("name", PLANS)
def test_losses_and_gradients_are_those_of_the_whole_model(name: str) -> None:
    run_ranks(train, PLANS[name][1], args=[plan_of(*PLANS[name]).to_json()])


def test_gradients_are_added_to_those_of_the_step_before() -> None:
    run_ranks(train, 4, args=[plan_of(*PLANS["three and one"]).to_json(), False, False])


def run_by_torch(rank: int, world_size: int, document: Any, path: str) -> None:
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    plan, whole = Plan.from_json(document), nn.Sequential(*chain())
    stage = plan.stages[rank]  # torch's stage k is on rank k
    module = nn.Sequential(*chain()[stage.start : stage.stop])
    x, y = batch(0)
    inputs = torch.empty(plan.outputs[rank - 1][0], requires_grad=True) if rank else x[:MICRO]
    output = torch.empty(plan.outputs[rank][0], requires_grad=True)
    part = PipelineStage(
        module, rank, world_size, torch.device("cpu"), input_args=inputs, output_args=output
    )
    runtime = _PipelineScheduleRuntime(
        [part], plan.microbatches, loss_fn=nn.functional.cross_entropy
    )
    runtime._load_csv(path, format="compute_only")
    losses: list[torch.Tensor] = []
    last = {"target": y, "losses": losses} if rank == world_size - 1 else {}
    runtime.step(*([] if rank else [x]), **last)
    dist.barrier()
    expected = loss_of(whole, 0)
    assert_same(module, whole[stage.start : stage.stop])
    assert not last or float(sum(losses)) / M == pytest.approx(float(expected), rel=TOLERANCE)


@pytest.mark.parametrize(
    ("ranks", "split"), [(2, True), *([(4, False), (2, False)] if IN_CAMPAIGN else [])]
)
def test_torch_runs_the_same_plan_with_the_same_gradients(
    ranks: int, split: bool, tmp_path: Path
) -> None:
    edges = {2: [0, 4, 9], 4: [0, 2, 4, 7, 9]}[ranks]
    stages = [(a, b, k) for k, (a, b) in enumerate(itertools.pairwise(edges))]
    plan = plan_of(stages, ranks, "1f1b")
    exported = plan_of(stages, ranks, split=True) if split else plan
    path = tmp_path / "schedule.csv"
    path.write_text(exported.csv())
    assert ("I" in exported.csv()) == split
    run_ranks(run_by_torch, ranks, args=[plan.to_json(), str(path)])
    run_ranks(train, ranks, args=[plan.to_json()])


def test_two_jobs_in_bands_have_the_losses_that_they_have_alone() -> None:
    plan = plan_of(*PLANS["four stages"])
    group = {"CROSSOVER_GROUP": new_group()}
    jobs = [Job(train, 4, [plan.to_json(), True], environment=group, name=name) for name in "ab"]
    bands = len(next(iter(plan.bands().values())))
    for results in run_jobs(jobs):
        (turns,) = {stats["turns"] for stats in results}
        assert STEPS * bands <= turns < 2 * STEPS * bands, "one for each band, and some skipped"
        assert {stats["disabled_because"] for stats in results} == {None}


def refusals(rank: int, world_size: int, document: Any) -> None:
    plan, tied, loss_fn = Plan.from_json(document), chain(), nn.functional.cross_entropy
    tied[6].weight = tied[0].weight
    on_meta = [layer.to("meta") for layer in chain()]
    for change, layers, message in (
        ({}, chain()[1:], "expected the 9 layers of the plan, got 8"),
        ({"split": True}, chain(), "expected a plan with whole backwards"),
        (
            {"devices": ("a", "b", "c")},
            chain(),
            "expected a rank for each of the plan's 3 devices, got 2",
        ),
        ({"step_s": float(rank)}, chain(), "expected the same plan on all ranks"),
        ({}, on_meta, "expected layers on the CPU"),
        ({}, tied, "expected parameters of one stage each, got one of stages 0 and 1"),
    ):
        with pytest.raises((ValueError, UnsupportedConfigurationError), match=message):
            Runner(dataclasses.replace(plan, **change), layers, loss_fn)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"divided into 8 micro-batches, got len\(x\)=9"):
        Runner(plan, chain(), loss_fn).step(*batch(0, 9))


def test_wrong_plans_layers_and_batches_are_refused() -> None:
    run_ranks(refusals, 2, args=[plan_of(TWO_STAGES, 2).to_json()])


def another_size(rank: int, world_size: int, document: Any) -> str:
    runner = Runner(Plan.from_json(document), chain(), nn.functional.cross_entropy)
    with pytest.raises((ValueError, RuntimeError)) as caught:
        runner.step(*batch(0, M))
    if "an output of float32[2, 12] of stage 0, got float32[1, 12]" in str(caught.value):
        os.kill(os.getpid(), signal.SIGKILL)
    return str(caught.value)


def test_micro_batches_of_another_size_are_refused() -> None:
    """The first stage finds the error. When its rank ends the others fail, and do not hang."""
    document = plan_of(TWO_STAGES, 2).to_json()
    assert run_ranks(another_size, 2, args=[document], deaths={0: signal.SIGKILL})[1]


@in_ranks(3)
def test_all_ranks_measure_the_same_cluster(rank: int) -> Cluster:
    found = Cluster.measure(size_bytes=1 << 18, names=tuple("abc"))
    assert found.names == ("a", "b", "c")
    pairs = list(itertools.permutations(range(3), 2))
    assert all(found.rate(a, b) > 1e5 for a, b in pairs)
    assert all(0 <= found.latency(a, b) < 1 for a, b in pairs)
    return found

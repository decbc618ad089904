"""Plans in real ranks: losses and gradients are those of the model that was not cut."""

import dataclasses
import itertools
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from crossover_ddp.errors import UnsupportedConfigurationError
from crossover_ddp.gpu_mutex import GPUMutex
from crossover_ddp.pipeline import Cluster, Plan, Profile, Runner, Stage
from crossover_ddp.pipeline.model import BACKWARD, FORWARD, Action, Orders, StagedChain
from crossover_ddp.pipeline.schedule import (
    best_order,
    gpipe,
    interleaved,
    one_forward_one_backward,
)
from crossover_ddp.pipeline.simulate import simulate
from tests.harness import Job, in_ranks, run_jobs, run_ranks
from tests.harness.campaign import IN_CAMPAIGN
from tests.harness.groups import new_group

TOLERANCE = 1e-5
STEPS = 3
WIDTH, MICRO, M = 12, 2, 8
RELEASE_TIMEOUT_S = 30.0


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
    places: Sequence[Stage | tuple[int, ...]],
    ranks: int,
    order: str = "search",
    microbatches: int = M,
    split: bool = False,
) -> Plan:
    stages = [
        each if isinstance(each, Stage) else Stage(each[0], each[1], each[2:]) for each in places
    ]
    profile = Profile.measure(chain(), batch(0)[0][:MICRO], repeats=1)
    cluster = Cluster(((1e8,) * ranks,) * ranks)
    staged = StagedChain(profile, cluster, stages, microbatches, split=split)
    known: dict[str, Callable[[StagedChain], Any]] = {
        "gpipe": gpipe,
        "1f1b": one_forward_one_backward,
        "interleaved": lambda each: interleaved(each, ranks),
        "one by one": one_by_one,
    }
    step = simulate(staged, known[order](staged)) if order in known else best_order(staged)
    assert step is not None
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
            orders.setdefault(staged.device(action.stage, micro), []).append(action)
    return orders


# For each stage: its first layer, the one behind its last, its devices; or the stage itself. Then
# the number of ranks, and the order.
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
    # After its last backward on the last stage, rank 0 still computes a micro-batch of the first
    # stage for the other replica.
    "a replica with another stage": ([(0, 3, 0), (3, 5, 1), (5, 9, 0, 2)], 3, "one by one"),
    "three to one": ([Stage(0, 5, (0, 1), (0, 0, 1, 0)), (5, 9, 2)], 3),
    "one to three, last": ([(0, 5, 2), Stage(5, 9, (0, 1), (0, 1, 1, 1))], 3),
    "first replicas without a micro-batch": ([Stage(0, 5, (0, 1), (1,)), (5, 9, 2)], 3),
    "a last replica without a micro-batch": ([(0, 5, 0), Stage(5, 9, (1, 2), (0,))], 3),
}
TWO_STAGES = [(0, 4, 0), (4, 9, 1)]


def train(
    rank: int, world_size: int, document: Any, turns: bool = False, updates: bool = True
) -> dict[str, Any]:
    """Train by the plan, evaluate, and compare with the whole model. Return the mutex's stats.

    Without ``updates`` gradients accumulate.
    """
    plan, whole = Plan.from_json(document), nn.Sequential(*chain())
    mutex = GPUMutex(device=f"device{rank}") if turns else None
    runner = Runner(plan, chain(), nn.functional.cross_entropy, mutex=mutex)
    own = {number: stage for number, stage in enumerate(plan.stages) if rank in stage.devices}
    assert runner.modules.keys() == own.keys()
    trained = [*filter(None, ([*runner.parameters()], [*whole.parameters()]))]
    optimizers = [torch.optim.SGD(each, lr=0.1, momentum=0.9) for each in trained]
    is_first, is_last = 0 in own, len(plan.stages) - 1 in own
    for step in range(STEPS):
        x, y = batch(step)
        loss = runner.step(x=x if is_first else None, y=y if is_last else None)
        expected = loss_of(whole, step)
        assert (loss is not None) == is_last
        assert loss is None or float(loss) == pytest.approx(float(expected), rel=TOLERANCE)
        for optimizer in optimizers if updates else ():
            optimizer.step()
        for number, stage in own.items():
            assert_same(runner.modules[number], whole[stage.start : stage.stop])
        for optimizer in optimizers if updates else ():
            optimizer.zero_grad()
    assert_evaluated(runner, whole)
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


def assert_evaluated(runner: Runner, whole: nn.Sequential) -> None:
    """Check the loss in evaluation mode. The gradients stay as they are."""
    runner.eval()
    whole.eval()
    gradients = [(p, None if p.grad is None else p.grad.clone()) for p in runner.parameters()]
    x, y = batch(STEPS)
    loss, expected = runner.evaluate(x, y), nn.functional.cross_entropy(whole(x), y)
    assert (loss is not None) == (len(runner.plan.stages) - 1 in runner.modules)
    assert loss is None or float(loss) == pytest.approx(float(expected), rel=TOLERANCE)
    for parameter, former in gradients:
        torch.testing.assert_close(parameter.grad, former, rtol=0, atol=0)
    runner.train()
    assert all(module.training for module in runner.modules.values())


@pytest.mark.parametrize("name", PLANS)
def test_losses_and_gradients_are_those_of_the_whole_model(name: str) -> None:
    run_ranks(train, PLANS[name][1], args=[plan_of(*PLANS[name]).to_json()])


def test_gradients_are_added_to_those_of_the_step_before() -> None:
    run_ranks(train, 4, args=[plan_of(*PLANS["three and one"]).to_json(), False, False])


def test_evaluation_leaves_out_dropout() -> None:
    run_ranks(evaluate, 3, args=[plan_of(*PLANS["three to one"]).to_json()])


def evaluate(rank: int, world_size: int, document: Any) -> None:
    layers, whole = chain(), chain()
    layers[1] = whole[1] = nn.Dropout(0.9)
    runner = Runner(Plan.from_json(document), layers, nn.functional.cross_entropy)
    assert_evaluated(runner, nn.Sequential(*whole))


@pytest.mark.parametrize("name", ["one and three", "an idle rank, a stage without parameters"])
@pytest.mark.parametrize("max_norm", [0.05, 100.0])
def test_gradients_are_clipped_like_those_of_the_whole_model(name: str, max_norm: float) -> None:
    run_ranks(clip, 4, args=[plan_of(*PLANS[name]).to_json(), max_norm])


def clip(rank: int, world_size: int, document: Any, max_norm: float) -> None:
    plan, whole = Plan.from_json(document), nn.Sequential(*chain())
    runner = Runner(plan, chain(), nn.functional.cross_entropy)
    runner.step(*batch(0))
    loss_of(whole, 0)
    expected = nn.utils.clip_grad_norm_(whole.parameters(), max_norm)
    assert 0.05 < expected < 100
    assert float(runner.clip_grad_norm_(max_norm)) == pytest.approx(float(expected), rel=TOLERANCE)
    for number, module in runner.modules.items():
        stage = plan.stages[number]
        assert_same(module, whole[stage.start : stage.stop])


def test_layers_on_the_meta_device_become_those_of_one_model(tmp_path: Path) -> None:
    plans = [plan_of(*PLANS[name]).to_json() for name in ("one and three", "three and one")]
    run_ranks(save_and_load, 4, args=[*plans, str(tmp_path)])


def save_and_load(rank: int, world_size: int, document: Any, other: Any, path: str) -> None:
    """Initialize layers by one plan, and load them in the whole model and by another plan."""
    with torch.device("meta"):
        layers = chain()
    plan, whole = Plan.from_json(document), nn.Sequential(*chain())
    torch.manual_seed(rank)  # replicas would differ
    runner = Runner(plan, layers, nn.functional.cross_entropy)
    for stage in (each for each in plan.stages if rank not in each.devices):
        assert all(p.is_meta for p in nn.ModuleList(layers[stage.start : stage.stop]).parameters())
    states: list[Any] = [None] * world_size
    dist.all_gather_object(states, runner.state_dict())
    merged: dict[str, torch.Tensor] = {}
    for state in states:
        for name, value in state.items():
            torch.testing.assert_close(merged.setdefault(name, value), value, rtol=0, atol=0)
    whole.load_state_dict(merged)
    assert_evaluated(runner, whole)

    by_gathered = Runner(Plan.from_json(other), chain(), nn.functional.cross_entropy)
    by_gathered.load_state_dict(merged)
    assert_evaluated(by_gathered, whole)

    dcp.save({"model": runner.state_dict()}, checkpoint_id=path)
    by_checkpoint = Runner(Plan.from_json(other), chain(), nn.functional.cross_entropy)
    saved = {"model": by_checkpoint.state_dict()}
    dcp.load(saved, checkpoint_id=path)
    by_checkpoint.load_state_dict(saved["model"])
    assert_evaluated(by_checkpoint, whole)

    name = next(iter(by_checkpoint.state_dict()))
    with pytest.raises(RuntimeError, match=rf"Missing key\(s\) in state_dict: \"{name}\""):
        by_checkpoint.load_state_dict({key: merged[key] for key in merged if key != name})


class Watched(nn.Module):
    """A layer that waits until the tensors of its earlier calls have been released."""

    def __init__(self, layer: nn.Module, seen: Callable[[Any, Any], torch.Tensor]) -> None:
        super().__init__()
        self.layer = layer
        self.seen = seen
        self.storages: list[StorageWeakRef] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.wait()
        output: torch.Tensor = self.layer(inputs)
        self.storages.append(StorageWeakRef(self.seen(inputs, output).untyped_storage()))
        return output

    def wait(self) -> None:
        deadline_s = time.monotonic() + RELEASE_TIMEOUT_S
        while not all(storage.expired() for storage in self.storages):
            assert time.monotonic() < deadline_s, "tensors of earlier micro-batches are still there"
            time.sleep(0.001)


def release(rank: int, world_size: int, document: Any) -> None:
    layers = chain()
    sent = Watched(layers[2], lambda inputs, output: output)
    received = Watched(layers[3], lambda inputs, output: inputs)
    layers[2], layers[3] = sent, received
    runner = Runner(Plan.from_json(document), layers, nn.functional.cross_entropy)
    runner.step(*batch(0))
    watched = (sent, received)[rank]
    assert len(watched.storages) == M
    watched.wait()
    dist.barrier()


def test_tensors_are_released_when_they_have_been_sent_unless_layers_save_them() -> None:
    """The linear layer does not save its output, and Tanh does not save its input.

    All forwards come first, so the number of tensors would grow with the number of micro-batches.
    """
    run_ranks(release, 2, args=[plan_of([(0, 3, 0), (3, 9, 1)], 2, "gpipe").to_json()])


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
    last: dict[str, Any] = {"target": y, "losses": losses} if rank == world_size - 1 else {}
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


@pytest.mark.parametrize("plan_name", ["four stages", "one and three"])
def test_two_jobs_in_bands_have_the_losses_that_they_have_alone(plan_name: str) -> None:
    plan = plan_of(*PLANS[plan_name])
    group = {"CROSSOVER_GROUP": new_group()}
    jobs = [Job(train, 4, [plan.to_json(), True], environment=group, name=name) for name in "ab"]
    bands = len(next(iter(plan.bands().values())))
    for results in run_jobs(jobs):
        (turns,) = {stats["turns"] for stats in results}
        least = (STEPS + 1) * bands  # the last one evaluates
        assert least <= turns < least + bands, "one for each band, and some skipped"
        assert {stats["disabled_because"] for stats in results} == {None}


class Scale(nn.Module):
    """A layer without ``reset_parameters``."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))


def refusals(rank: int, world_size: int, document: Any) -> None:
    plan, tied, loss_fn = Plan.from_json(document), chain(), nn.functional.cross_entropy
    tied[6].weight = tied[0].weight
    on_meta = [nn.Sequential(layer, Scale()).to("meta") for layer in chain()]
    for change, layers, message in (
        ({}, chain()[1:], "expected the 9 layers of the plan, got 8"),
        ({"split": True}, chain(), "expected a plan with whole backwards"),
        (
            {"devices": ("a", "b", "c")},
            chain(),
            "expected a rank for each of the plan's 3 devices, got 2",
        ),
        ({"step_s": float(rank)}, chain(), "expected the same plan on all ranks"),
        ({}, on_meta, r"got none of 0\.1 \(Scale\), 1\.1 \(Scale\)"),
        ({}, tied, "expected parameters of one stage each, got one of stages 0 and 1"),
    ):
        with pytest.raises((ValueError, UnsupportedConfigurationError), match=message):
            Runner(dataclasses.replace(plan, **change), layers, loss_fn)
    runner = Runner(plan, chain(), loss_fn)
    x, y = batch(0)
    name = "xy"[rank]
    kept: dict[str, Any] = {"x": x, "y": y}
    for given, error, message in (
        (batch(0, 9)[rank], ValueError, rf"into 8 micro-batches, got len\({name}\)=9"),
        (x.sum(), ValueError, rf"into 8 micro-batches, got len\({name}\)=0"),
        (None, TypeError, f"expected a tensor with the whole batch, got {name} of type NoneType"),
        (
            {"images": x},
            TypeError,
            f"expected a tensor with the whole batch, got {name} of type dict",
        ),
    ):
        with pytest.raises(error, match=message):
            runner.step(**{**kept, name: given})


def test_wrong_plans_layers_and_batches_are_refused() -> None:
    run_ranks(refusals, 2, args=[plan_of(TWO_STAGES, 2).to_json()])


@in_ranks(1)
def test_losses_of_more_than_one_number_are_refused(rank: int) -> None:
    plan = plan_of([(0, 9, 0)], 1)
    cases: tuple[tuple[Callable[..., Any], str], ...] = (
        (nn.CrossEntropyLoss(reduction="none"), r"shape=\(2,\)"),
        (lambda output, target: {"loss": output.mean()}, r"\{'loss'"),
    )
    for loss_fn, found in cases:
        with pytest.raises(TypeError, match=rf"without dimensions, got {found}.*reduction='mean'"):
            Runner(plan, chain(), loss_fn).step(*batch(0))


class Lookup(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WIDTH, WIDTH, sparse=True)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.table(inputs.argmax(1))
        return found


def sparse(rank: int, world_size: int, document: Any) -> None:
    runner = Runner(Plan.from_json(document), [Lookup(), *chain()[1:]], nn.functional.cross_entropy)
    with pytest.raises(UnsupportedConfigurationError, match="got a sparse one"):
        runner.step(*batch(0))
    dist.barrier()


def test_sparse_gradients_of_replicas_are_refused() -> None:
    run_ranks(sparse, 2, args=[plan_of([(0, 9, 0, 1)], 2).to_json()])


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

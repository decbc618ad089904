"""Plans on torch's own runtime: losses and gradients are those of the model that was not cut."""

import dataclasses
import os
import signal
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel

from chains import gpt2, vit
from crossover_ddp._ddp.groups import gather_objects
from crossover_ddp._system.torch_private import (
    LOAD_SCHEDULE,
    pipeline_runtime,
    process_group_store,
)
from crossover_ddp.codecs import CompressedState, compressed_hook
from crossover_ddp.comm_hooks import reduce_scatter_all_gather_hook
from crossover_ddp.errors import UnsupportedConfigurationError
from crossover_ddp.pipeline import Cluster, Plan, Profile, Stage
from crossover_ddp.pipeline.model import StagedChain
from crossover_ddp.pipeline.schedule import best_order, interleaved
from crossover_ddp.pipeline.simulate import simulate
from tests.harness import run_ranks
from tests.multiprocess.identity_codec import Identity

TOLERANCE = 1e-5
STEPS = 3
WIDTH, MICRO, M = 12, 2, 8
TOKENS, WORDS = 6, 11
WAIT_S = 20.0


class Task(NamedTuple):
    """A chain, its data and its loss. A chain with BatchNorm needs each micro-batch by itself."""

    make: Callable[[], list[nn.Module]]
    data: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = nn.functional.cross_entropy
    parts: int = 1


def chain() -> list[nn.Module]:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return [*layers, nn.Linear(WIDTH, 5)]


def numbers(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(MICRO * M, WIDTH, generator=generator)
    return x, torch.randint(0, 5, (len(x),), generator=generator)


class Transposed(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2)


class Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1)


def awkward() -> list[nn.Module]:
    """Outputs and gradients that are no dense tensors, and layers that work in place."""
    torch.manual_seed(0)
    frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    shaped = [nn.Unflatten(1, (3, 4)), Transposed(), nn.ReLU(inplace=True), nn.Linear(3, 3)]
    return [frozen, nn.Linear(WIDTH, WIDTH), *shaped, nn.Tanh(), Mean(), nn.Linear(3, 5)]


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.norm(self.conv(x))
        return (normed + x).relu_()


def residual() -> list[nn.Module]:
    torch.manual_seed(0)
    stem = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True)]
    return [*stem, Residual(4), Residual(4), nn.Flatten(), nn.Linear(4 * 36, 5)]


def images(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(MICRO * M, 3, 8, 8, generator=generator)
    return x, torch.randint(0, 5, (len(x),), generator=generator)


def language() -> list[nn.Module]:
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": WORDS, "n_positions": TOKENS}
    return gpt2(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)


def tokens(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, WORDS, (MICRO * M, TOKENS + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def next_token(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def small_vit() -> list[nn.Module]:
    torch.manual_seed(0)
    layers = vit(
        image_size=8, patch_size=4, num_layers=2, num_heads=2, hidden_dim=8, mlp_dim=16,
        num_classes=5,
    )  # fmt: skip
    # Torchvision's head is zero at first, and so are the gradients of all other layers.
    for parameter in layers[-1].parameters():
        nn.init.normal_(parameter)
    return layers


def tied() -> list[nn.Module]:
    torch.manual_seed(0)
    embedding, head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS, bias=False)
    head.weight = embedding.weight
    return [embedding, nn.Linear(8, 8), nn.Tanh(), head]


TASKS = {
    "chain": Task(chain, numbers),
    "tied": Task(tied, tokens, next_token),
    "awkward": Task(awkward, numbers),
    "residual": Task(residual, images, parts=M),
    "gpt2": Task(language, tokens, next_token),
    "vit": Task(small_vit, images),
}


def plan_of(
    places: Sequence[tuple[int, ...]],
    ranks: int,
    order: str = "search",
    split: bool = False,
    task: str = "chain",
) -> Plan:
    stages = [Stage(start, stop, tuple(devices)) for start, stop, *devices in places]
    sample = TASKS[task].data(0)[0][:MICRO]
    profile = Profile.measure(TASKS[task].make(), sample, repeats=1)
    cluster = Cluster(((1e8,) * ranks,) * ranks)
    staged = StagedChain(profile, cluster, stages, M, split=split)
    step = best_order(staged)
    if order == "interleaved":
        orders = interleaved(staged, ranks)
        assert orders is not None
        step = simulate(staged, orders)
    assert step is not None
    return Plan(
        tuple(stages), step.orders, M, step.step_s, order, {}, cluster.names,
        tuple(layer.name for layer in profile.layers),
        tuple((profile.layers[s.stop - 1].shape, profile.layers[s.stop - 1].dtype) for s in stages),
        step.spans, split,
    )  # fmt: skip


TWO_STAGES = [(0, 4, 0), (4, 9, 1)]
TWO_BY_TWO = [(0, 5, 0, 1), (5, 9, 2, 3)]
LOOPED = [(0, 2, 0), (2, 4, 1), (4, 7, 0), (7, 9, 1)]
V = [(0, 2, 0), (2, 4, 1), (4, 7, 1), (7, 9, 0)]
TIED_APART, TIED_V = [(0, 2, 1), (2, 5, 0)], [(0, 1, 0), (1, 2, 1), (2, 3, 1), (3, 5, 0)]
# For each stage: its first layer, the one behind its last, its devices. Then the number of ranks,
# the order, whether backward is split, and the task.
PLANS: dict[str, Any] = {
    "permuted ranks": ([(0, 2, 2), (2, 5, 0), (5, 6, 3), (6, 9, 1)], 4),
    "one rank of two": ([(0, 3, 1), (3, 9, 1)], 2),
    "looped": (LOOPED, 2, "interleaved"),
    "looped, split": (LOOPED, 2, "search", True),
    "V": (V, 2),
    "V, split": (V, 2, "search", True),
    "an idle rank, a stage without parameters": ([(0, 3, 3), (3, 4, 1), (4, 9, 3)], 4),
    "two by two": (TWO_BY_TWO, 4),
    "two by two, V": ([(0, 2, 3, 1), (2, 4, 0, 2), (4, 7, 0, 2), (7, 9, 3, 1)], 4),
    "data parallel": ([(0, 9, 1, 0)], 2),
    "awkward": ([(0, 1, 0), (1, 4, 1), (4, 7, 0), (7, 9, 1)], 2, "search", False, "awkward"),
    "awkward, split": ([(0, 1, 0), (1, 4, 1), (4, 7, 0), (7, 9, 1)], 2, "search", True, "awkward"),
    "awkward, replicas": (
        [(0, 1, 0, 1), (1, 7, 2, 3), (7, 9, 0, 1)],
        4,
        "search",
        False,
        "awkward",
    ),
    "residual": ([(0, 2, 0), (2, 4, 1), (4, 7, 1)], 2, "search", False, "residual"),
    "residual, two by two": ([(0, 4, 0, 1), (4, 7, 2, 3)], 4, "search", False, "residual"),
    "tied apart": (TIED_APART, 2, "search", False, "gpt2"),
    "tied apart, split": (TIED_APART, 2, "search", True, "gpt2"),
    "tied apart, two by two": ([(0, 2, 0, 1), (2, 5, 2, 3)], 4, "search", False, "gpt2"),
    "tied on one rank": (TIED_V, 2, "search", False, "gpt2"),
    "tied on one rank, replicas": ([(0, 2, 0, 1), (2, 5, 0, 1)], 2, "search", False, "gpt2"),
    "vit": ([(0, 2, 0), (2, 6, 1)], 2, "search", False, "vit"),
}


def document_of(name: str) -> tuple[Any, str]:
    """Return a plan of `PLANS` as a document, and the name of its task."""
    places, ranks, *rest = PLANS[name]
    options = dict(zip(("order", "split", "task"), rest, strict=False))
    if options.get("task") == "gpt2":
        pytest.importorskip("transformers")
    return plan_of(places, ranks, **options).to_json(), options.get("task", "chain")


class Trained:
    """A plan on torch's runtime beside the whole model, on each rank."""

    def __init__(
        self, document: Any, task: str = "chain", device: str = "cpu", **options: Any
    ) -> None:
        self.plan, self.task = Plan.from_json(document), TASKS[task]
        self.whole = nn.Sequential(*self.task.make()).to(device)
        self.device = device
        self.stages = options.pop("stages", None)
        if self.stages is None:
            self.stages = self.plan.build_stages(self.task.make(), device, **options)
        else:
            self.whole.load_state_dict(options["values"])
        self.schedule: Any = None
        if self.stages:
            self.schedule = self.plan.schedule(self.stages, self.task.loss)
        self.parts = [part(each.submod) for each in self.stages]
        trained = [*nn.ModuleList(self.parts).parameters()], [*self.whole.parameters()]
        self.optimizers = [torch.optim.SGD(each, lr=0.1, momentum=0.9) for each in trained if each]

    def run(self, step: int, function: str = "step") -> tuple[torch.Tensor | None, list[Any]]:
        """Give this rank's pipeline its part of a batch. Return the output, and the losses."""
        if self.schedule is None:
            return None, []
        share = self.share
        losses: list[torch.Tensor] = []
        whole = [each.to(self.device) for each in self.data(step)]
        x, y = (each.chunk(share.replicas)[share.replica] for each in whole)
        inputs = [x] if self.stages[0].is_first else []
        target = {"target": y} if self.stages[-1].is_last else {}
        output = getattr(self.schedule, function)(*inputs, **target, losses=losses)
        return output, losses

    def step(self, step: int) -> None:
        """Compute the gradients, and compare them and the loss with those of the whole model."""
        _, losses = self.run(step)
        expected = self.expected_loss(step)
        if losses and self.share.replicas == 1:
            assert float(sum(losses)) / len(losses) == pytest.approx(expected, rel=TOLERANCE)
        self.compare()

    def expected_loss(self, step: int) -> float:
        loss = torch.zeros(())
        micros = [each.to(self.device).chunk(self.task.parts) for each in self.data(step)]
        for x, y in zip(*micros, strict=True):
            part_of_loss = self.task.loss(self.whole(x), y) / self.task.parts
            part_of_loss.backward()
            loss += part_of_loss.item()
        return float(loss)

    def compare(self) -> None:
        for stage, module in zip(self.stages, self.parts, strict=True):
            start, stop = self.plan.stages[stage.stage_index][:2]
            assert_same(module, self.whole[start:stop])

    def optimize(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def data(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.task.data(step)

    @property
    def share(self) -> Any:
        return self.stages[0].share


def part(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, DistributedDataParallel) else module


def assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    found, expected = ([(p.detach(), p.grad) for p in each.parameters()] for each in (ours, theirs))
    torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


def train(rank: int, world_size: int, document: Any, task: str, **options: Any) -> None:
    trained = Trained(document, task, **options)
    assert [each.stage_index for each in trained.stages] == [
        number for number, stage in enumerate(trained.plan.stages) if rank in stage.devices
    ]
    for step in range(STEPS):
        trained.step(step)
        trained.optimize()
    dist.barrier()


@pytest.mark.torch_version
@pytest.mark.parametrize("name", PLANS)
def test_losses_and_gradients_are_those_of_the_whole_model(name: str) -> None:
    run_ranks(train, PLANS[name][1], args=document_of(name))


def accumulate(rank: int, world_size: int, document: Any, task: str) -> None:
    trained = Trained(document, task)
    for step in range(STEPS):
        trained.step(step)
    dist.barrier()


@pytest.mark.torch_version
@pytest.mark.parametrize("name", ["V, split", "two by two", "tied apart", "tied on one rank"])
def test_gradients_are_added_to_those_of_the_step_before(name: str) -> None:
    run_ranks(accumulate, PLANS[name][1], args=document_of(name))


def evaluate(rank: int, world_size: int, document: Any, task: str) -> None:
    trained = Trained(document, task)
    for step in range(STEPS):
        # Evaluate before the first step as well, and with gradients of a step that must stay.
        for _ in range(2):
            with torch.no_grad():
                output, losses = trained.run(step, "eval")
                x, y = trained.data(step)
                expected = trained.whole(x)
                loss = trained.task.loss(expected, y)
            if losses:
                torch.testing.assert_close(output, expected, rtol=TOLERANCE, atol=TOLERANCE)
                mean = float(sum(losses)) / len(losses)
                assert mean == pytest.approx(float(loss), rel=TOLERANCE)
            trained.compare()
            if step == 0:
                break
        trained.step(step)
    dist.barrier()


@pytest.mark.torch_version
@pytest.mark.parametrize("name", ["permuted ranks", "V", "tied apart"])
def test_evaluations_change_no_gradient(name: str) -> None:
    run_ranks(evaluate, PLANS[name][1], args=document_of(name))


# --- hooks and replicas ---------------------------------------------------------------------------


def register_identity(model: DistributedDataParallel) -> None:
    state = CompressedState(Identity(), process_group=model.process_group)
    model.register_comm_hook(state, compressed_hook)


def train_with_hooks(rank: int, world_size: int, document: Any) -> None:
    train(rank, world_size, document, "chain", ddp=register_identity)
    buckets: list[int] = []

    def counted(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buckets.append(bucket.index())
        return reduce_scatter_all_gather_hook(group, bucket)

    train(
        rank, world_size, document, "chain",
        ddp=lambda model: model.register_comm_hook(model.process_group, counted),
    )  # fmt: skip
    assert buckets == [0] * STEPS, "each step exchanges each bucket once"


@pytest.mark.torch_version
def test_users_register_hooks() -> None:
    run_ranks(train_with_hooks, 4, args=[plan_of(TWO_BY_TWO, 4).to_json()])


def know(rank: int, world_size: int, document: Any, crossed: Any) -> None:
    share = Trained(document).share
    assert (share.replica, share.replicas, share.ranks) == (rank % 2, 2, (rank % 2, rank % 2 + 2))
    assert share.mesh.mesh.tolist() == [[0, 2], [1, 3]]
    assert share.mesh.get_local_rank("dp") == rank % 2
    assert share.mesh.get_local_rank("pp") == rank // 2
    data = torch.utils.data.TensorDataset(torch.arange(8))
    sampler: Any = torch.utils.data.DistributedSampler(
        data, num_replicas=share.replicas, rank=share.replica, shuffle=False
    )
    assert [*sampler] == [*range(rank % 2, 8, 2)]
    # No mesh has the ranks of both pipelines in ascending order.
    assert Trained(crossed).share.mesh is None
    dist.barrier()


def test_pipelines_know_their_data_and_their_mesh() -> None:
    plans = [plan_of(*PLANS[name]) for name in ("two by two", "two by two, V")]
    run_ranks(know, 4, args=[each.to_json() for each in plans])


def leave_early(rank: int, world_size: int, document: Any) -> None:
    store = process_group_store(dist.group.WORLD)  # type: ignore[arg-type]
    key = f"the first stage of pipeline {rank % 2} has its last gradient"
    threads: list[threading.Thread] = []

    def first(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        store.set(key, "")
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    def last(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        buffer = bucket.buffer()

        def wait() -> None:
            try:
                store.wait([key], timedelta(seconds=WAIT_S))
                done.set_result(buffer)
            except RuntimeError as error:
                done.set_exception(error)  # type: ignore[arg-type]

        threads.append(threading.Thread(target=wait))
        threads[-1].start()
        return done

    hook = first if rank < 2 else last
    trained = Trained(document, ddp=lambda model: model.register_comm_hook(None, hook))
    trained.run(0)
    for thread in threads:
        thread.join()
    assert bool(threads) == (rank >= 2)
    dist.barrier()


def test_gradients_leave_early() -> None:
    """The exchange of the last stage ends only after the first stage has its last gradient."""
    run_ranks(leave_early, 4, args=[plan_of(TWO_BY_TWO, 4).to_json()])


# --- orders ---------------------------------------------------------------------------------------


def renamed(plan: Plan) -> Plan:
    """Let the last stage compute the micro-batches in descending order."""
    orders = {
        device: [action._replace(micro=M - 1 - action.micro) for action in actions]
        for device, actions in plan.orders.items()
    }
    return dataclasses.replace(plan, orders=orders)


@pytest.mark.torch_version
def test_the_last_stage_may_compute_micro_batches_in_any_order() -> None:
    document = renamed(plan_of(V, 2, split=True)).to_json()
    run_ranks(train, 2, args=[document, "chain"])
    run_ranks(evaluate, 2, args=[document, "chain"])


def run_by_titan(rank: int, world_size: int, document: Any, path: str, style: str) -> None:
    """Build stages and read the file as torchtitan does."""
    plan, whole = Plan.from_json(document), nn.Sequential(*chain())
    count = len(plan.stages)
    numbers_of = {
        "loop": range(rank, count, world_size),
        "v": (rank, count - 1 - rank),
    }
    parts = {
        number: nn.Sequential(*chain()[plan.stages[number].start : plan.stages[number].stop])
        for number in numbers_of[style]
    }
    stages = [
        PipelineStage(module, number, count, torch.device("cpu"))
        for number, module in parts.items()
    ]
    # The stage of a row is on the row's rank, whatever its device is called.
    schedule = pipeline_runtime()(stages, M, loss_fn=nn.functional.cross_entropy)
    getattr(schedule, LOAD_SCHEDULE)(path, format="compute_only")
    for number in parts:
        assert schedule.stage_index_to_group_rank[number] == rank
    if style == "v" and torch.__version__ < "2.14":
        return  # torch 2.11 would send from a rank to itself, which only NCCL can
    x, y = numbers(0)
    target = {"target": y} if count - 1 in parts else {}
    schedule.step(*([] if rank else [x]), **target)
    nn.functional.cross_entropy(whole(x), y).backward()
    for number, module in parts.items():
        assert_same(module, whole[plan.stages[number].start : plan.stages[number].stop])
    dist.barrier()


@pytest.mark.torch_version
@pytest.mark.parametrize(
    ("style", "places"),
    [("loop", LOOPED), ("v", V), ("loop", [(start, stop, 1 - d) for start, stop, d in LOOPED])],
)
def test_torchtitan_reads_the_order(style: str, places: Any, tmp_path: Path) -> None:
    plan, path = plan_of(places, 2), tmp_path / "order.csv"
    path.write_text(plan.csv())
    run_ranks(run_by_titan, 2, args=[plan.to_json(), str(path), style])


# --- the meta device ------------------------------------------------------------------------------


def materialize(rank: int, world_size: int, document: Any, task: str) -> None:
    plan, make = Plan.from_json(document), TASKS[task].make
    with torch.device("meta"):
        layers = make()
    torch.manual_seed(rank)  # each rank has values of its own, which replicas and copies replace
    stages = plan.build_stages(layers, "cpu")
    own = [plan.stages[each.stage_index] for each in stages]
    for place, layer in enumerate(layers):
        mine = any(stage.start <= place < stage.stop for stage in own)
        shared = {*layers[0].parameters()} & {*layers[-1].parameters()} if mine else {*()}
        assert all(each.is_meta != mine for each in {*layer.parameters()} - shared)
    found: dict[str, torch.Tensor] = {}
    for values in gather_objects(
        dist.group.WORLD,  # type: ignore[arg-type]
        {name: v for each in stages for name, v in part(each.submod).state_dict().items()},
    ):
        for name, value in values.items():
            assert torch.equal(found.setdefault(name, value), value), name
    trained = Trained(document, task, stages=stages, values=found)
    for step in range(STEPS):
        trained.step(step)
        trained.optimize()
    dist.barrier()


@pytest.mark.torch_version
@pytest.mark.parametrize(
    ("places", "ranks", "task"),
    [
        (V, 2, "chain"),
        ([(0, 2, 0, 1), (2, 4, 2, 3)], 4, "tied"),
        ([(0, 1, 0), (1, 2, 1), (2, 3, 1), (3, 4, 0)], 2, "tied"),
        ([(0, 4, 0, 1), (4, 7, 2, 3)], 4, "residual"),
    ],
)
def test_ranks_initialize_their_own_layers(places: Any, ranks: int, task: str) -> None:
    run_ranks(materialize, ranks, args=[plan_of(places, ranks, task=task).to_json(), task])


# --- devices --------------------------------------------------------------------------------------


def train_on_device(rank: int, world_size: int, document: Any, task: str) -> None:
    torch.cuda.set_device(rank % torch.cuda.device_count())
    train(rank, world_size, document, task, device="cuda")


@pytest.mark.fake_cuda
@pytest.mark.parametrize("name", ["looped", "V, split", "two by two", "tied apart"])
def test_stages_are_on_a_cuda_device(name: str) -> None:
    run_ranks(train_on_device, PLANS[name][1], args=document_of(name), backend="nccl")


def wrong_device(rank: int, world_size: int, document: Any) -> None:
    torch.cuda.set_device(rank)
    layers = [each.cuda() for each in chain()]
    with pytest.raises(UnsupportedConfigurationError, match=r"got layer 0 on ..cuda"):
        Plan.from_json(document).build_stages(layers, "cpu")


@pytest.mark.fake_cuda
def test_layers_on_another_device_are_refused() -> None:
    run_ranks(wrong_device, 2, args=[plan_of(TWO_STAGES, 2).to_json()])


# --- errors ---------------------------------------------------------------------------------------


def refusals(rank: int, world_size: int, document: Any) -> None:
    plan = Plan.from_json(document)

    def refused(message: str, kind: type[Exception] = ValueError, **changes: Any) -> None:
        layers = changes.pop("given", None) or chain()
        device = changes.pop("device", "cpu")
        with pytest.raises(kind, match=message):
            dataclasses.replace(plan, **changes).build_stages(layers, device)

    first, second = plan.stages
    both: dict[str, Any] = {"stages": (first._replace(devices=(0, 1)),)}
    refused("the 9 layers of the plan, got 8", given=chain()[:8])
    refused("each of the plan's 3 devices, got 2 ranks", devices=("a", "b", "c"))
    refused("pipeline.Runner", stages=(first._replace(devices=(0, 1)), second))
    refused("pipeline.Runner", stages=(first._replace(devices=(0, 1), pattern=(0, 0, 1)),))
    refused("pipeline.Runner", **both, microbatches=7)
    refused(
        "devices of their own.*Runner",
        stages=(first._replace(devices=(0, 1)), second._replace(devices=(1, 0))),
    )
    refused("whole backwards.*got split=True", **both, split=True)
    refused("one layer in each stage, got layers 4 to 3", stages=(first, second._replace(stop=4)))
    refused("known shape.*of stage 1", outputs=(plan.outputs[0], ((), "float32")))
    refused("floating-point.*int64", outputs=(((2, 12), "int64"), plan.outputs[1]))
    refused(r"backends .*gloo.*got device=cuda", UnsupportedConfigurationError, device="cuda")
    refused("same plan on all ranks", UnsupportedConfigurationError, step_s=float(rank))
    with torch.device("meta"):
        lacking = [nn.PReLU(), *chain()[1:]]
        lacking[0].reset_parameters = None  # type: ignore[assignment]
    refused(r"reset_parameters.*0 \(PReLU\)", UnsupportedConfigurationError, given=lacking)
    stages = plan.build_stages(chain(), "cpu")
    other = dataclasses.replace(plan, step_s=2.0)
    for wrong_plan, wrong_stages in ((plan, []), (other, stages)):
        with pytest.raises(ValueError, match="stages from build_stages of the same plan"):
            wrong_plan.schedule(wrong_stages, nn.functional.cross_entropy)


def test_wrong_plans_and_layers_are_refused() -> None:
    run_ranks(refusals, 2, args=[plan_of(TWO_STAGES, 2).to_json()])


def another_size(rank: int, world_size: int, document: Any) -> str:
    plan = Plan.from_json(document)
    schedule = plan.schedule(plan.build_stages(chain(), "cpu"), nn.functional.cross_entropy)
    x, y = numbers(0)
    with pytest.raises(RuntimeError) as caught:
        schedule.step(*([] if rank else [x[:M]]), **({"target": y[:M]} if rank else {}))
    if "an output of float32[2, 12] of stage 0, got float32[1, 12]" in str(caught.value.__cause__):
        os.kill(os.getpid(), signal.SIGKILL)
    return str(caught.value)


def test_micro_batches_of_another_size_are_refused() -> None:
    """The first stage finds the error. When its rank ends the others fail, and do not hang."""
    document = plan_of(TWO_STAGES, 2).to_json()
    assert run_ranks(another_size, 2, args=[document], deaths={0: signal.SIGKILL})[1]


@pytest.mark.usefixtures("process_group")
def test_modules_of_transformers_need_a_cpu() -> None:
    pytest.importorskip("transformers")
    plan = plan_of([(0, 5, 0)], 1, task="gpt2")
    with torch.device("meta"):
        layers = language()
    with pytest.raises(UnsupportedConfigurationError, match=r"1.block.attn.c_attn \(Conv1D\)"):
        plan.build_stages(layers, "cpu")

"""The hooks under DDP on a GPU: losses and parameters equal those of plain DDP bit for bit.

tests/conformance has all hooks with small models, test_kfac_gpu.py has K-FAC. Ranks share a GPU if
there are fewer GPUs.
"""

import contextlib
import functools
import os
import signal
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from crossover_ddp import CrossoverState, crossover_wrapper, reduce_scatter_all_gather_hook
from tests import fake_cuda
from tests.gpu.races import meet
from tests.harness import Job, run_jobs, run_ranks
from tests.harness.groups import new_group
from tests.harness.networks import mlp
from tests.harness.oracles import error_of
from tests.harness.training import WIDTH, Training
from tests.multiprocess.compressed_training import digest

pytestmark = pytest.mark.gpu

TIMEOUT_S = 150.0
# cuBLAS is deterministic only with a workspace of fixed size. It reads this once per process.
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
BUCKET_CAP_MB = 1.0
BATCH = 4 if fake_cuda.is_here() else 16
WIDE = 500


class Plan(NamedTuple):
    """One training run."""

    hook: str = "none"
    seed: int = 0
    steps: int = 8
    amp: str = "none"
    meeting: str = ""  # a directory where sibling jobs wait for each other; empty for a job alone
    processes: int = 0


class Outcome(NamedTuple):
    losses: list[float]
    digest: str
    peak_bytes: int
    stats: dict[str, Any]


def network(seed: int) -> nn.Module:
    """Return a network of several buckets of 1 MB, with buffers that DDP broadcasts in the turn."""
    torch.manual_seed(seed)
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.BatchNorm2d(64), nn.ReLU()),
        *(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(1024, 1024), nn.ReLU()),
        *(nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10)),
    )


def fp16(*_: Any) -> tuple[Any, Any]:
    return CrossoverState(), crossover_wrapper(default_hooks.fp16_compress_hook)


@contextlib.contextmanager
def reproducible() -> Iterator[None]:
    """Use deterministic algorithms without TF32, and restore the settings for the next test."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark
    matmul.allow_tf32 = cudnn.allow_tf32 = cudnn.benchmark = False
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = before


class OnDevice(Training):
    """Trains by a plan. Losses stay on the device, so that the host runs ahead."""

    def __init__(self, rank: int, plan: Plan) -> None:
        self.scaler = torch.amp.GradScaler("cuda", enabled=plan.amp == "float16")
        self._autocast = {
            "dtype": getattr(torch, plan.amp, torch.bfloat16),
            "enabled": plan.amp != "none",
        }
        self._generator = torch.Generator().manual_seed(100 * plan.seed + rank)
        super().__init__(
            {"none": None, "fp16": fp16}.get(plan.hook, plan.hook),
            rank,
            module=network(plan.seed),
            device="cuda",
            optimizers=lambda model: [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)],
            loss=self._drawn_loss,
            bucket_cap_mb=BUCKET_CAP_MB,
        )

    def _drawn_loss(self, model: nn.Module, rank: int, step: int) -> torch.Tensor:
        inputs = torch.randn(BATCH, 3, 32, 32, generator=self._generator).pin_memory()
        targets = torch.randint(0, 10, (BATCH,), generator=self._generator).cuda()
        with torch.autocast("cuda", **self._autocast):
            return nn.functional.cross_entropy(
                model(inputs.cuda(non_blocking=True)).float(), targets
            )

    def steps_of(self, count: int) -> list[torch.Tensor]:
        losses = []
        for _ in range(count):
            loss = self.loss()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.drop()
            losses.append(loss.detach())
        return losses


def train(rank: int, world_size: int, plan: Plan) -> Outcome:
    with reproducible():
        training = OnDevice(rank, plan)
        losses = training.steps_of(2)  # buckets are rebuilt
        torch.cuda.synchronize()
        mutex = training.state.mutex if isinstance(training.state, CrossoverState) else None
        if mutex is not None:
            mutex.release()  # the siblings must not wait while this job waits for them
        if plan.meeting:
            meet(plan, "warm")  # every process of every sibling
        if mutex is not None:
            mutex.acquire()
        torch.cuda.reset_peak_memory_stats()
        before_bytes = torch.cuda.memory_allocated()
        losses += training.steps_of(plan.steps)
        torch.cuda.synchronize()
        outcome = Outcome(
            [float(loss) for loss in losses],
            # In the end the other ranks have rank 0's buffers, which follow the gradients.
            digest(training.weights() if rank == 0 else [*training.model.parameters()]),
            torch.cuda.max_memory_allocated() - before_bytes,
            training.state.stats() if mutex is not None else {},
        )
        training.close()
    return outcome


@functools.cache
def run(
    plan: Plan, world_size: int = 2, backend: str = "gloo", again: bool = False
) -> list[Outcome]:
    job = Job(train, world_size, args=(plan,), backend=backend, environment=DETERMINISTIC)
    [outcomes] = run_jobs([job], timeout_s=TIMEOUT_S)
    return outcomes


def same(some: list[Outcome], others: list[Outcome]) -> bool:
    return [one[:2] for one in some] == [one[:2] for one in others]


# A run, its ranks and its backend.
RUNS = {
    "float16": (Plan("crossover", amp="float16", steps=4), 2, "gloo"),
    "decoupled, bfloat16": (Plan("decoupled", amp="bfloat16", steps=4), 2, "gloo"),
    "split, alone on NCCL": (Plan("split", steps=4), 1, "nccl"),
}


@pytest.mark.parametrize(("plan", "world_size", "backend"), RUNS.values(), ids=[*RUNS])
def test_losses_equal_those_without_our_hook(plan: Plan, world_size: int, backend: str) -> None:
    plain = plan._replace(hook="none")
    expected = run(plain, world_size, backend)
    assert same(expected, run(plain, world_size, backend, again=True)), (
        "plain DDP is not reproducible here"
    )
    found = run(plan, world_size, backend)
    assert [one.losses for one in found] == [one.losses for one in expected]
    assert same(found, expected)


@pytest.mark.parametrize(
    ("hook", "backend"), [("crossover", "gloo"), ("fp16", "gloo"), ("crossover", "nccl")]
)
def test_siblings_train_as_if_alone(hook: str, backend: str, tmp_path: Path) -> None:
    plans = [Plan(hook, seed) for seed in (0, 1)]
    alone = [run(each, backend=backend) for each in plans]
    # Set here, so that each rank has its group before the harness counts leaks.
    environment = {**DETERMINISTIC, "CROSSOVER_GROUP": new_group()}
    meeting = {"meeting": str(tmp_path), "processes": 4}
    jobs = [
        Job(train, 2, (each._replace(**meeting),), backend, environment, name=f"job {each.seed}")
        for each in plans
    ]
    together = run_jobs(jobs, timeout_s=TIMEOUT_S)
    for mine, ours in zip(alone, together, strict=True):
        assert same(mine, ours), "a sibling changed the results"
        for outcome in ours:
            stats = outcome.stats
            assert stats["disabled_because"] is None
            assert stats["leases_expired"] == 0
            assert stats["device"].startswith("GPU-")
            assert stats["turns"] >= plans[0].steps
    # How often a job waits depends on the machine. If none ever does, nothing was shared.
    assert sum(outcome.stats["handovers"] for job in together for outcome in job) > 0


@pytest.mark.parametrize("hook", ["split", "crossover", "decoupled"])
def test_device_memory_is_that_of_plain_ddp_plus_a_bucket_and_does_not_grow(hook: str) -> None:
    bucket_bytes = 5 * 2**20  # the largest layer is one of 4 MB, and a bucket holds whole layers
    runs = [run(Plan(steps=4)), run(Plan(hook, steps=4)), run(Plan(hook, steps=10))]
    for plain, hooked, longer in zip(*runs, strict=True):
        assert hooked.peak_bytes <= plain.peak_bytes + bucket_bytes
        assert longer.peak_bytes <= hooked.peak_bytes + 2**20


def pinned_bytes(rank: int, world_size: int) -> int:
    """Return the bytes that stay pinned when DDP's large first bucket is followed by small ones."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    torch._C._host_emptyCache()
    before = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    Training("split", rank, module=mlp(WIDTH, WIDE, WIDE, WIDTH, seed=3), device="cuda").run(3)
    torch.cuda.synchronize()
    torch._C._host_emptyCache()
    return torch.cuda.host_memory_stats()["allocated_bytes.current"] - before


@pytest.mark.defect("strangers-15")
def test_pinned_memory_of_the_first_iteration_is_released() -> None:
    assert max(run_ranks(pinned_bytes, 2, timeout_s=TIMEOUT_S)) < 4 * WIDE * WIDE


def errors_of_a_dead_peer(rank: int, world_size: int) -> list[str]:
    """Kill rank 1 in its third step. Return the errors of two backwards of rank 0."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    split = group, reduce_scatter_all_gather_hook
    training = Training(lambda *_: split, rank, device="cuda", process_group=group).run(2)
    if rank:
        os.kill(os.getpid(), signal.SIGKILL)
    return [error_of(training.backward) for _ in range(2)]


def test_a_dead_nccl_peer_raises_after_the_groups_timeout_if_the_host_waits() -> None:
    environment = {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_DIST_USE_NCCL2": "0"}
    deaths = {1: signal.SIGKILL}
    errors, _ = run_ranks(
        errors_of_a_dead_peer, 2, backend="nccl", environment=environment, deaths=deaths
    )
    assert errors[0] == errors[1]
    assert "of bucket 0 failed: " in errors[0]

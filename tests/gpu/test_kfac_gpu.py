"""K-FAC on a GPU: preconditioned gradients are those of an independent float64 computation on the CPU.

Over gloo two ranks share the one GPU; NCCL takes one rank per GPU, so with one rank the native way is forced. Nothing
here waits for the device between backward and reading the gradients, so that what is not ordered is seen.
"""

import contextlib
import copy
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from tests.gpu.test_hooks_gpu import DETERMINISTIC, TIMEOUT_S, reproducible
from tests.gpu.test_hooks_gpu import Plan as HookPlan
from tests.harness import Job, run_jobs
from tests.multiprocess.kfac_oracle import Oracle, RankRun, Settings, cross_entropy, relative_error
from tests.multiprocess.kfac_training import LR, Training

pytestmark = pytest.mark.gpu

BATCH = 16
BUCKET_CAP_MB = 0.2
RELATIVE = 1e-3
GRADIENT_SCALE = 256.0
STEPS = 4


class Plan(NamedTuple):
    """One run of a few steps."""

    settings: Settings
    scaled: bool = False
    views: bool = True
    force_native: bool = False


def network() -> nn.Sequential:
    """Triangles of several blocks (513 and 289 rows), a grouped convolution, and what passes through."""
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.Tanh(),
        nn.Conv2d(32, 32, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Conv2d(32, 32, 3, stride=2, padding=1, groups=4, bias=False),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(512, 96),
        nn.Tanh(),
        nn.Linear(96, 10),
    )


@contextlib.contextmanager
def full_float32() -> Iterator[None]:
    """Multiply without TF32, which keeps ten bits of each factor."""
    matmul, cudnn = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, cudnn


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.randn(BATCH, 3, 16, 16, generator=generator)
    return inputs, torch.randint(0, 10, (BATCH,), generator=generator)


class OnDevice(Training):
    """Trains as a plan says."""

    def __init__(self, rank: int, plan: Plan) -> None:
        torch.cuda.set_device(rank % torch.cuda.device_count())
        self.plan = plan
        self.scaler = torch.amp.GradScaler("cuda", init_scale=GRADIENT_SCALE, enabled=plan.scaled)
        super().__init__(
            rank,
            network(),
            data=batch,
            ddp={"bucket_cap_mb": BUCKET_CAP_MB, "gradient_as_bucket_view": plan.views},
            device="cuda",
            loss_scale=self.scaler.get_scale if plan.scaled else 1.0,
            **vars(plan.settings),
        )

    def loss(self, part: int = 0, parts: int = 1) -> Tensor:
        inputs, targets = (each.cuda() for each in batch(self.rank, self.steps))
        return self.scaler.scale(nn.functional.cross_entropy(self.model(inputs), targets))

    def unwatched_backward(self) -> None:
        """Do not wait for the device, as whoever reads the loss does."""
        self.optimizer.zero_grad()
        self.loss().backward()


class Spectral(Oracle):
    """The same for larger layers: no matrix of a layer's whole Fisher block, but its eigenvalues in float64."""

    def _solve(self, matrix: Tensor, a: Tensor, g: Tensor) -> Tensor:
        if self.settings.solver != "eigen":
            return super()._solve(matrix, a, g)
        (a_values, a_vectors), (g_values, g_vectors) = torch.linalg.eigh(a), torch.linalg.eigh(g)
        rotated = g_vectors.mT @ matrix @ a_vectors
        rotated /= g_values.unsqueeze(-1) * a_values.unsqueeze(-2) + self.settings.damping
        return g_vectors @ rotated @ a_vectors.mT


def expected(oracle: Oracle, model: nn.Module, step: int, world_size: int) -> dict[str, Tensor]:
    """Return the gradients of this step, computed in float64 on the CPU."""
    runs = []
    for rank in range(world_size):
        replica, (inputs, targets) = copy.deepcopy(model).cpu().double(), batch(rank, step)
        runs.append(RankRun(replica, inputs.double(), cross_entropy(targets)))
    return oracle.step_of_runs(runs)


def errors(rank: int, world_size: int, plan: Plan) -> list[float]:
    """Train some steps; return the greatest relative error of a layer's gradient in each."""
    with reproducible(HookPlan(force_native=plan.force_native)), full_float32():
        training, found = OnDevice(rank, plan), []
        oracle = Spectral(plan.settings, LR, training.kfac.owners)
        for step in range(STEPS):
            wanted = expected(oracle, training.model.module, step, world_size)
            training.unwatched_backward()
            training.scaler.unscale_(training.optimizer)
            found.append(relative_error(training.gradients(), wanted))
            training.scaler.step(training.optimizer)
            training.scaler.update()
            training.steps += 1
        assert training.kfac.stats().items() >= {"strained": 0, "dropped": 0}.items()
        seen = oracle.least_scale < 1
        assert seen == (plan.settings.kl_clip is not None), "the clip is to be seen at work"
        training.close()
        return found


def check(plan: Plan, *, world_size: int = 2, backend: str = "gloo") -> None:
    job = Job(errors, world_size, args=(plan,), backend=backend, environment=DETERMINISTIC)
    [found] = run_jobs([job], timeout_s=TIMEOUT_S)
    for rank, of_rank in enumerate(found):
        assert len(of_rank) == STEPS
        assert max(of_rank) < RELATIVE, (rank, of_rank)


INVERSE, EIGEN = Settings(), Settings(solver="eigen")
PLANS = {
    "inverse": Plan(INVERSE),
    "eigen": Plan(EIGEN),
    "no clip, no views of buckets": Plan(Settings(kl_clip=None), views=False),
    "local, seldom": Plan(Settings(factors="local", inv_update_steps=2)),
    "a scaled loss": Plan(INVERSE, scaled=True),
}
PLANS_OF_NCCL = {
    "inverse": Plan(INVERSE),
    "eigen, native": Plan(EIGEN, force_native=True),
    "inverse, native": Plan(INVERSE, force_native=True),
}


@pytest.mark.parametrize("name", PLANS)
def test_gradients_over_gloo_are_those_of_the_cpu(name: str) -> None:
    check(PLANS[name])


@pytest.mark.parametrize("name", PLANS_OF_NCCL)
def test_gradients_with_one_rank_on_nccl_are_those_of_the_cpu(name: str) -> None:
    check(PLANS_OF_NCCL[name], world_size=1, backend="nccl")


@pytest.mark.gpu(count=2)
@pytest.mark.parametrize("name", ["inverse", "eigen"])
def test_gradients_over_nccl_are_those_of_the_cpu(name: str) -> None:
    check(PLANS[name], backend="nccl")


def resumed(rank: int, world_size: int, plan: Plan) -> float:
    """Return the greatest relative difference between going on and resuming."""
    with reproducible(HookPlan()), full_float32():
        going_on, taking_up = OnDevice(rank, plan), OnDevice(rank, plan)
        for step in range(3):
            going_on.steps = step
            going_on.unwatched_backward()
        saved = going_on.kfac.state_dict()
        tensors = [each for layer in saved["layers"].values() for each in (layer["a"], layer["g"])]
        assert all(each.device.type == "cpu" for each in tensors)
        taking_up.kfac.load_state_dict(saved)
        found = []
        for each in (going_on, taking_up):
            each.steps = 3
            each.unwatched_backward()
            found.append({name: gradient.double().cpu() for name, gradient in each.gradients().items()})
            each.close()
        return relative_error(*found)


def test_a_checkpoint_lies_on_the_host_and_is_taken_up() -> None:
    job = Job(resumed, 2, args=(Plan(Settings()),), environment=DETERMINISTIC)
    [found] = run_jobs([job], timeout_s=TIMEOUT_S)
    assert max(found) < 1e-5

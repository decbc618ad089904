"""K-FAC on a GPU: preconditioned gradients are those of an independent float64 computation on the CPU.

Ranks share the GPU where there are not as many; alone, the native way is forced. Nothing here waits for the device
between backward and reading the gradients, so that what is not ordered is seen.
"""

import copy
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from tests.gpu.test_hooks_gpu import DETERMINISTIC, TIMEOUT_S, reproducible
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
        *(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.Tanh()),
        *(nn.Conv2d(32, 32, 3, stride=2, padding=1), nn.Tanh()),
        *(nn.Conv2d(32, 32, 3, stride=2, padding=1, groups=4, bias=False), nn.Tanh()),
        *(nn.Flatten(), nn.Linear(512, 96), nn.Tanh(), nn.Linear(96, 10)),
    )


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

    def unwatched_backward(self) -> None:
        """Do not wait for the device, as whoever reads the loss does."""
        self.optimizer.zero_grad()
        self.scaler.scale(self.loss()).backward()


class Spectral(Oracle):
    """For larger layers: no matrix of a layer's whole Fisher block, but its eigenvalues in float64."""

    def solve(self, matrix: Tensor, a: Tensor, g: Tensor) -> Tensor:
        if self.settings.solver != "eigen":
            return super().solve(matrix, a, g)
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
    """Train some steps, and resume; return the greatest relative error of a layer's gradient in each."""
    with reproducible(plan):
        training, found = OnDevice(rank, plan), []
        oracle = Spectral(plan.settings, LR, training.kfac.owners)
        for step in range(STEPS):
            if step == 2:  # from a checkpoint, which lies on the host
                saved = training.save()
                layers = saved["state"]["layers"].values()
                factors = [each for layer in layers for each in (layer["a"], layer["g"])]
                assert all(each.device.type == "cpu" for each in factors)
                training.close()
                training = OnDevice(rank, plan).load(saved)
            wanted = expected(oracle, training.model.module, step, world_size)
            training.unwatched_backward()
            training.scaler.unscale_(training.optimizer)
            found.append(relative_error(training.gradients(), wanted))
            training.scaler.step(training.optimizer)
            training.scaler.update()
            training.steps += 1
        assert training.kfac.stats().items() >= {"strained": 0, "dropped": 0}.items()
        assert (oracle.least_scale < 1) == (plan.settings.kl_clip is not None), "the clip is to be seen"
        training.close()
        return found


INVERSE, EIGEN = Settings(), Settings(solver="eigen")


@pytest.mark.parametrize(
    ("backend", "world_size", "plan"),
    [
        pytest.param("gloo", 2, Plan(INVERSE), id="gloo, inverse"),
        pytest.param("gloo", 2, Plan(EIGEN), id="gloo, eigen"),
        pytest.param("gloo", 2, Plan(Settings(kl_clip=None), views=False), id="no clip, no views of buckets"),
        pytest.param("gloo", 2, Plan(Settings(factors="local", inv_update_steps=2)), id="local, seldom"),
        pytest.param("gloo", 2, Plan(INVERSE, scaled=True), id="a scaled loss"),
        pytest.param("nccl", 1, Plan(INVERSE), id="alone, inverse"),
        pytest.param("nccl", 1, Plan(EIGEN, force_native=True), id="alone, eigen, native"),
        pytest.param("nccl", 1, Plan(INVERSE, force_native=True), id="alone, inverse, native"),
        pytest.param("nccl", 2, Plan(INVERSE), id="nccl, inverse"),
        pytest.param("nccl", 2, Plan(EIGEN), id="nccl, eigen"),
    ],
)
def test_gradients_are_those_of_the_cpu(backend: str, world_size: int, plan: Plan) -> None:
    job = Job(errors, world_size, args=(plan,), backend=backend, environment=DETERMINISTIC)
    [found] = run_jobs([job], timeout_s=TIMEOUT_S)
    for rank, of_rank in enumerate(found):
        assert len(of_rank) == STEPS
        assert max(of_rank) < RELATIVE, (rank, of_rank)

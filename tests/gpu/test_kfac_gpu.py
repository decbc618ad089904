"""K-FAC on a GPU: preconditioned gradients are those of an independent computation on the CPU.

The oracle computes in float64. Ranks share a GPU if there are fewer GPUs. Nothing waits for the
device between backward and reading the gradients, so that missing orders on the device show.
"""

import pytest
import torch

from tests.gpu.test_hooks_gpu import DETERMINISTIC, TIMEOUT_S, reproducible
from tests.harness import run_ranks
from tests.multiprocess.kfac_oracle import Oracle, Settings, errors_beside
from tests.multiprocess.test_kfac import Called, Case

pytestmark = pytest.mark.gpu

RELATIVE = 1e-3
GRADIENT_SCALE = 256.0
VIEWS = {"gradient_as_bucket_view": True}
CASES = {
    "inverse": Case(ddp=VIEWS),
    "eigen": Case(Settings(solver="eigen"), ddp=VIEWS),
    "no clip, no views of buckets": Case(Settings(kl_clip=None)),
    "local, seldom": Case(Settings(factors="local", inv_update_steps=2), ddp=VIEWS),
    "a scaled loss": Case(ddp=VIEWS),
}


class OnDevice(Called):
    def __init__(self, rank: int, name: str) -> None:
        is_scaled = name == "a scaled loss"
        self.scaler = torch.amp.GradScaler("cuda", init_scale=GRADIENT_SCALE, enabled=is_scaled)
        super().__init__(
            rank, CASES[name], device="cuda", loss_scale=self.scaler.get_scale if is_scaled else 1.0
        )

    def backward(self, parts: int = 1) -> float:
        """Return no loss, since reading it would wait for the device."""
        self.optimizer.zero_grad()
        self.scaler.scale(self.loss()).backward()
        self.scaler.unscale_(self.optimizer)
        return 0.0

    def update(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.steps += 1


def errors(rank: int, world_size: int, name: str) -> list[float]:
    """Train some steps, resume, and train more.

    Return the greatest relative error of a layer's gradient in each step.
    """
    with reproducible():
        training, settings = OnDevice(rank, name), CASES[name].settings
        oracle = Oracle(settings, training.rate_of, training.kfac.owners)
        found = [*errors_beside(oracle, training, 2, world_size)]
        saved = training.save()
        factors = [
            each for layer in saved["state"]["layers"].values() for each in (layer["a"], layer["g"])
        ]
        assert all(each.device.type == "cpu" for each in factors), "a checkpoint lies on the host"
        training.close()
        training = OnDevice(rank, name)
        training.load(saved)
        found += errors_beside(oracle, training, 2, world_size)
        assert training.kfac.stats().items() >= {"strained": 0, "dropped": 0}.items()
        assert (oracle.least_scale < 1) == (settings.kl_clip is not None), "the clip is to be seen"
        training.close()
        return found


CELLS = [
    *(("gloo", 2, name) for name in CASES),
    ("nccl", 2, "inverse"),
    ("nccl", 2, "eigen"),
    ("nccl", 1, "inverse"),
]


@pytest.mark.parametrize(("backend", "world_size", "name"), CELLS)
def test_gradients_are_those_of_the_cpu(backend: str, world_size: int, name: str) -> None:
    options = {"backend": backend, "environment": DETERMINISTIC, "timeout_s": TIMEOUT_S}
    for of_rank in run_ranks(errors, world_size, args=(name,), **options):
        assert max(of_rank) < RELATIVE

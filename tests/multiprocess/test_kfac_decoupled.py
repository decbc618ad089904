"""K-FAC in decoupled training: the same training as with `kfac_hook`, bit for bit, in the next forward's time."""

from typing import Any

import pytest
import torch

from tests.harness import run_ranks
from tests.multiprocess.kfac_training import Training

OPTIONS: dict[str, Any] = {"damping": 0.03, "kl_clip": 1e-4}
LATE = {**OPTIONS, "factor_update_steps": 4, "inv_update_steps": 8}
STEPS = 12


def train(rank: int, steps: int = STEPS, **options: Any) -> tuple[list[float], torch.Tensor, int]:
    training = Training(rank, **options)
    losses = [training.step() for _ in range(steps)]
    deferred = 0
    if options.get("decoupled"):
        deferred = training.outer._training.updates._steps
    return losses, training.parameters(), deferred


def compare(rank: int, world_size: int, options: dict[str, Any]) -> int:
    expected, wanted, _ = train(rank, **options)
    losses, got, deferred = train(rank, decoupled=True, **options)
    assert losses == expected
    assert torch.equal(got, wanted)
    return deferred


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("options", [OPTIONS, LATE], ids=["riding", "late"])
def test_it_trains_as_kfac_hook_does(world_size: int, options: dict[str, Any]) -> None:
    for deferred in run_ranks(compare, world_size, args=(options,)):
        assert deferred == STEPS - 2

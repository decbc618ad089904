"""A layer large enough to be multiplied while it arrives, against the independent float64 computation."""

import copy

import pytest
import torch

from crossover_ddp._kfac_cargo import BucketCargo
from crossover_ddp._row_product import goes_by_rows
from tests.harness import run_ranks
from tests.multiprocess.kfac_oracle import Oracle, Settings
from tests.multiprocess.kfac_training import LR, OUTPUTS, WIDTH, Training, batch, mlp
from tests.multiprocess.test_kfac import relative_error

SETTINGS = Settings(factor_update_steps=2, inv_update_steps=3, kl_clip=1e-4)
WIDE = (WIDTH, 300, 230, OUTPUTS)
STEPS = 6
RELATIVE = 1e-4


def train(rank: int, world_size: int, cap_mb: float) -> tuple[list[float], list[int]]:
    """Return the greatest relative error of each step, and how often this rank heard of arriving rows in it."""
    heard = [0]
    arriving = BucketCargo._arriving

    def count(cargo: BucketCargo, numel: int) -> None:
        heard[-1] += 1
        arriving(cargo, numel)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BucketCargo, "_arriving", count)
        training = Training(
            rank,
            mlp(*WIDE),
            ddp={"bucket_cap_mb": cap_mb},
            damping=SETTINGS.damping,
            factor_decay=SETTINGS.factor_decay,
            kl_clip=SETTINGS.kl_clip,
            factor_update_steps=SETTINGS.factor_update_steps,
            inv_update_steps=SETTINGS.inv_update_steps,
        )
        assert sum(goes_by_rows(layer.shape) for layer in training.state._layers) == 1
        oracle = Oracle(SETTINGS, LR)
        errors = []
        for step in range(STEPS):
            replicas = [copy.deepcopy(training.model.module).double() for _ in range(world_size)]
            training.backward()
            batches = [(x.double(), y) for x, y in (batch(each, step) for each in range(world_size))]
            errors.append(relative_error(training.model.module, oracle.step(replicas, batches)))
            training.optimizer.step()
            heard.append(0)
    assert oracle.least_scale < 1, "the clip is to be seen at work"
    return errors, heard[:-1]


@pytest.mark.parametrize("cap_mb", [0.1, 25.0])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_rows_that_arrive_are_multiplied_to_the_same_direction(world_size: int, cap_mb: float) -> None:
    torch.set_num_threads(1)
    ranks = run_ranks(train, world_size, args=(cap_mb,))
    for errors, _ in ranks:
        assert max(errors) < RELATIVE, errors
    heard = [sum(of_step) for of_step in zip(*(counts for _, counts in ranks), strict=True)]
    plain = [step % SETTINGS.inv_update_steps != 0 and world_size > 1 for step in range(STEPS)]
    assert [count > 0 for count in heard] == plain, heard

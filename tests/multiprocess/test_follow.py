"""Moving averages that follow deferred updates in real ranks."""

import logging
from typing import Any

import pytest
from torch.optim import SGD

from crossover_ddp import AutoState, auto_hook
from tests.harness import in_ranks
from tests.harness.oracles import heard
from tests.harness.training import Training
from tests.multiprocess.averaging_oracle import loss_of, network
from tests.multiprocess.kfac_training import Training as WithKFAC
from tests.unit.decoupled.averages import KINDS, same_averages

STEPS = 14


def training_of(way: Any, rank: int) -> Training:
    return Training(
        way,
        rank,
        module=network(),
        optimizers=lambda model: [SGD(model.parameters(), lr=0.05, momentum=0.9)],
        loss=loss_of,
        bucket_cap_mb=0.002,
    )


@pytest.mark.torch_version
@pytest.mark.parametrize("name", ["v3 warm-up", "v2", "swa", "ema with buffers", "torch_ema"])
@in_ranks(2)
def test_an_average_has_plain_ddps_bits_and_nothing_waits(rank: int, name: str) -> None:
    """Rank 1 skips some updates, and rank 0 reads its average alone now and then."""
    kind = KINDS[name]
    runs = [training_of(way, rank) for way in ("decoupled", None)]
    averages = [kind.make(training.model.module) for training in runs]
    runs[0].state.follow(averages[0])
    with heard(logging.INFO) as messages:
        for step in range(STEPS):
            for training, average in zip(runs, averages, strict=True):
                training.step()
                if rank == 0 or step % 4:
                    kind.update(average, training.model.module, step)
            assert runs[0].is_pending is (step >= 2)
            if rank == 0 and step == 9:
                assert same_averages(*averages)
    assert runs[0].state.stats()["steps_deferred"] == STEPS - 2
    assert not [each for each in messages if "not updated in parts" in each or "are read" in each]
    assert same_averages(*averages)
    for training in runs:
        training.close()


@in_ranks(2)
def test_an_average_follows_a_race_and_owners(rank: int) -> None:
    kind = KINDS["v3"]

    def auto(model: Any, optimizers: Any, mutex: Any) -> Any:
        return AutoState(optimizers[0]), auto_hook

    runs = [training_of(way, rank) for way in (auto, "owned", None)]
    averages = [kind.make(training.model.module) for training in runs]
    for training, average in zip(runs[:2], averages[:2], strict=True):
        training.state.follow(average)
    for step in range(60):
        for training, average in zip(runs, averages, strict=True):
            training.step()
            kind.update(average, training.model.module, step)
    assert same_averages(averages[0], averages[2])
    assert same_averages(averages[1], averages[2])
    for training in runs:
        training.close()


@in_ranks(2)
def test_an_average_follows_decoupled_kfac(rank: int) -> None:
    kind = KINDS["swa"]
    runs = [WithKFAC(rank, decoupled=True) for _ in range(2)]
    averages = [kind.make(training.model.module) for training in runs]
    runs[0].state.follow(averages[0])
    for step in range(STEPS):
        for training, average in zip(runs, averages, strict=True):
            training.step()
            kind.update(average, training.model.module, step)
    assert runs[0].state.stats()["deferred"]
    assert not runs[1].state.stats()["deferred"]
    assert same_averages(*averages)
    for training in runs:
        training.close()

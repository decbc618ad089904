"""Elastic averaging in real ranks: at their own pace and together against copies in one process, and wild."""

import os
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from crossover_ddp._averaging.centre import ElasticRound
from crossover_ddp.averaging_hooks import ElasticState, elastic_hook
from crossover_ddp.errors import SegmentError
from tests.harness import in_ranks, run_ranks
from tests.harness.campaign import IN_CAMPAIGN
from tests.harness.networks import mlp
from tests.harness.training import WIDTH, Training
from tests.harness.waiting import eventually
from tests.multiprocess.averaging_oracle import OVERFLOWS, Replay, Trainer, new_scaler

EVERY = 2


def trainer_of(rank: int, optimizer: str, mode: Any) -> Trainer:
    return Trainer(rank, ElasticState(EVERY, mode), optimizer)


def assert_replayed(trainer: Trainer, optimizer: str, *steps: int) -> list[Any]:
    """Let rank 0 replay all ranks' steps and rounds; return the rounds."""
    values, log = trainer.end(), trainer.state.rounds()
    found: list[Any] = [None] * len(steps)
    dist.all_gather_object(found, (values, log))
    if trainer.rank == 0:
        of_ranks, logs = zip(*found, strict=True)
        skips = OVERFLOWS if len(steps) == 2 else ()
        replayed = Replay(optimizer, logs, 0.9 / len(steps), skips).run(steps)
        assert all(map(torch.equal, replayed, of_ranks))
    return log


OWN_STEPS = (60, 20, 45, 30)
PACES = [(2, "adamw"), (4, "momentum"), *([(2, "sgd")] if IN_CAMPAIGN else [])]


@pytest.mark.parametrize(("world_size", "optimizer"), PACES)
@in_ranks()
def test_rounds_can_be_replayed_from_their_log(rank: int, world_size: int, optimizer: str) -> None:
    """Rank 1 is slower: before its fourth step it waits for a round without it. Two ranks skip some steps."""
    trainer, scaler = trainer_of(rank, optimizer, "async"), new_scaler()
    for step in range(OWN_STEPS[rank]):
        trainer.scaled_step(scaler) if world_size == 2 else trainer.step()
        if rank == 1 and step == 2:  # after the second forward, in which DDP arranges its buckets
            assert eventually(
                lambda: any(each.offered[1] is None for each in trainer.state.rounds())
            )
        time.sleep(0.02 if rank == 1 else 0.004)
    log = assert_replayed(trainer, optimizer, *OWN_STEPS[:world_size])
    assert len(log) > 5
    assert {record.offered[1] is None for record in log} == {True, False}, (
        "rounds with the slow rank and without"
    )


STEPS = 11


@pytest.mark.defect("codecs-S12")
@pytest.mark.parametrize(("world_size", "optimizer"), PACES)
@in_ranks()
def test_ranks_that_pull_together_walk_the_path_of_copies(
    rank: int, world_size: int, optimizer: str
) -> None:
    trainer, scaler = trainer_of(rank, optimizer, "sync"), new_scaler()
    for _ in range(STEPS):
        trainer.scaled_step(scaler) if world_size == 2 else trainer.step()
    log = assert_replayed(trainer, optimizer, *[STEPS] * world_size)
    due = range(EVERY, STEPS, EVERY)
    assert log == [
        ElasticRound(number, (each,) * world_size, each) for number, each in enumerate(due)
    ]


@pytest.mark.parametrize("mode", ["async", "wild"])
@in_ranks(2)
def test_ranks_are_equal_after_average(rank: int, mode: str) -> torch.Tensor:
    trainer, scaler, steps = trainer_of(rank, "momentum", mode), new_scaler(), 12 if rank else 4
    for _ in range(steps):
        trainer.scaled_step(scaler)
    trainer.state.state_dict()  # what is due now is done
    stats, before = trainer.state.stats(), trainer.values
    assert stats["not_finite"] == 0
    with trainer.state.averaged():
        inside = trainer.values
    assert torch.equal(before, trainer.values), "averaged() has changed the training"
    if mode == "wild":  # nothing is in flight there
        assert stats["own_pulls"] == steps // EVERY, "who skips an update pulls all the same"
        mean = before / 2
        dist.all_reduce(mean)
        assert torch.equal(inside, mean)
    trainer.state.average()
    end = trainer.values
    trainer.run(1).close()
    return end


@pytest.mark.parametrize("mode", ["async", "wild"])
@in_ranks(2)
def test_a_rank_that_blows_up_spoils_nobody(rank: int, mode: str) -> None:
    trainer = trainer_of(rank, "sgd", mode).run(4)
    if rank == 1:
        with torch.no_grad():
            next(trainer.model.parameters()).fill_(float("inf"))

    def stayed_away() -> bool:
        trainer.step()
        return trainer.steps >= 14 and (rank == 0 or trainer.state.stats()["not_finite"] >= 4)

    eventually(stayed_away)
    assert all(
        each.isfinite().all() for each in trainer.state.state_dict()["kept"]["centre"].values()
    )
    counted = trainer.state.stats()["not_finite"]
    assert counted >= 4 if rank else counted == 0
    assert bool(trainer.end().isfinite().all()) == (rank == 0)


def apart(rank: int, mode: Any, device: str, **options: Any) -> Training:
    training = Training(
        lambda *_: (ElasticState(1, mode, 0.3), elastic_hook),
        rank,
        device=device,
        optimizers=lambda model: [torch.optim.SGD(model.parameters(), lr=0.0)],
        **options,
    ).run(1)
    with torch.no_grad():
        for parameter in training.held:
            parameter.add_(float(rank))
    return training


def pull_on(rank: int, world_size: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    training = apart(rank, "sync", device).run(4)
    centre = training.state.state_dict()["kept"]["centre"]["0.weight"]
    training.close()
    return training.held[0].detach().cpu(), centre


@pytest.mark.fake_cuda
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_ranks_pull_on_a_device_as_on_the_host(backend: str) -> None:
    on_host = run_ranks(pull_on, 2, args=("cpu",))
    for there, here in zip(
        run_ranks(pull_on, 2, args=("cuda",), backend=backend), on_host, strict=True
    ):
        assert all(map(torch.equal, there, here))


@in_ranks(2)
def test_the_wild_centre_gains_what_ranks_lose(rank: int) -> None:
    """Pull at the same time, from different places: of two additions at one moment one may be lost, which is rare."""
    training = apart(rank, "wild", "cpu", module=mlp(WIDTH, 1000, 60, seed=3))
    before, start = (
        training.values.double().sum(),
        training.values.double().sum() - rank * len(training.values),
    )
    training.run(40)
    centre = training.state.state_dict()["kept"]["centre"].values()
    lost = torch.stack([before - training.values.double().sum()])
    dist.all_reduce(lost)
    gained = float(sum(each.double().sum() for each in centre) - start)
    assert 10_000 < gained == pytest.approx(float(lost), rel=0.01)
    training.close()


@in_ranks(2)
def test_without_room_all_ranks_are_told(rank: int) -> None:
    full = OSError(28, "No space left on device") if rank == 0 else None
    allocate = mock.patch.object(os, "posix_fallocate", side_effect=full, wraps=os.posix_fallocate)
    why = "see there" if rank else r"\[Errno 28\] No space left on device; use mode='async'"
    with allocate, pytest.raises(SegmentError, match=rf"got none on ranks \[0\]: {why}"):
        trainer_of(rank, "sgd", "wild").run(3)

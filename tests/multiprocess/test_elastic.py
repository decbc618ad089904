"""Elastic averaging in real ranks: "sync" and "async" against copies in one process, and "wild"."""

import os
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from crossover_ddp._averaging.centre import ElasticRound
from crossover_ddp.averaging_hooks import ElasticState, elastic_hook
from crossover_ddp.errors import SegmentError
from tests.harness import in_ranks, inside, run_ranks
from tests.harness.campaign import IN_CAMPAIGN
from tests.harness.networks import mlp
from tests.harness.training import WIDTH, Training
from tests.harness.waiting import eventually
from tests.journeys.test_bits_and_buffers import COUNTED, sent_bytes
from tests.multiprocess.averaged_training import averaged, in_bfloat16, spread
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
    """Rank 1 is slower: before its fourth step it waits for a round without it.

    With two ranks a GradScaler skips some steps.
    """
    trainer, scaler = trainer_of(rank, optimizer, "async"), new_scaler()
    for step in range(OWN_STEPS[rank]):
        trainer.scaled_step(scaler) if world_size == 2 else trainer.step()
        if rank == 1 and step == 2:  # after the second forward, in which DDP rebuilds its buckets
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
def test_ranks_that_pull_together_have_the_parameters_of_copies(
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
    trainer = trainer_of(rank, "momentum", mode)
    scaler = new_scaler()
    steps = 12 if rank else 4
    for _ in range(steps):
        trainer.scaled_step(scaler)
    trainer.state.state_dict()  # runs the exchanges that are due
    stats, before = trainer.state.stats(), trainer.values
    assert stats["not_finite"] == 0
    with trainer.state.averaged():
        inside = trainer.values
    assert torch.equal(before, trainer.values), "averaged() has changed the training"
    if mode == "wild":  # nothing is in flight there
        assert stats["own_pulls"] == steps // EVERY, (
            "a rank that skips an update pulls all the same"
        )
        mean = before / 2
        dist.all_reduce(mean)
        assert torch.equal(inside, mean)
    trainer.state.average()
    end = trainer.values
    trainer.run(1).close()
    return end


@pytest.mark.parametrize("mode", ["async", "wild"])
@in_ranks(2)
def test_a_rank_with_infinities_does_not_change_the_others(rank: int, mode: str) -> None:
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


def training_apart(rank: int, mode: Any, device: str, **options: Any) -> Training:
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
    training = training_apart(rank, "sync", device).run(4)
    centre = training.state.state_dict()["kept"]["centre"]["0.weight"]
    training.close()
    return training.held[0].detach().cpu(), centre


@pytest.mark.fake_cuda
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_ranks_on_a_device_have_the_bits_of_the_host(backend: str) -> None:
    on_host = run_ranks(pull_on, 2, args=("cpu",))
    for there, here in zip(
        run_ranks(pull_on, 2, args=("cuda",), backend=backend), on_host, strict=True
    ):
        assert all(map(torch.equal, there, here))


@in_ranks(2)
def test_the_wild_centre_gains_what_ranks_lose(rank: int) -> None:
    """Ranks pull at the same time, from different places, so lost additions are rare."""
    training = training_apart(rank, "wild", "cpu", module=mlp(WIDTH, 1000, 60, seed=3))
    before = training.values.double().sum()
    start = before - rank * len(training.values)
    training.run(40)
    centre = training.state.state_dict()["kept"]["centre"].values()
    lost = torch.stack([before - training.values.double().sum()])
    dist.all_reduce(lost)
    gained = float(sum(each.double().sum() for each in centre) - start)
    assert 10_000 < gained == pytest.approx(float(lost), rel=0.01)
    training.close()


@in_ranks(2)
def test_too_little_shared_memory_is_an_error_on_all_ranks(rank: int) -> None:
    full = OSError(28, "No space left on device") if rank == 0 else None
    allocate = mock.patch.object(os, "posix_fallocate", side_effect=full, wraps=os.posix_fallocate)
    why = "see there" if rank else r"\[Errno 28\] No space left on device; use mode='async'"
    with allocate, pytest.raises(SegmentError, match=rf"got none on ranks \[0\]: {why}"):
        trainer_of(rank, "sgd", "wild").run(3)


@pytest.mark.defect("strangers-5")
@pytest.mark.parametrize("mode", ["sync", "async"])
@in_ranks(2)
def test_replicas_of_bfloat16_converge(rank: int, mode: Any) -> None:
    """To within one step of the format, which is 1/128 at 1, although each pull is smaller."""
    training = averaged(ElasticState(1, mode, 0.05), in_bfloat16(), lr=0.0).run(1)
    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.fill_(1.0 + rank / 16)
    for _ in range(100):
        training.run(20)
        time.sleep(0.01)  # for rounds
        distance = spread(training.values.float())
        if distance <= 1 / 128:
            break
    assert distance <= 1 / 128
    training.close()


def train_wild(rank: int, world_size: int, device: str) -> tuple[torch.Tensor, int]:
    """Return how far the centre has moved, and how many process groups are left behind."""
    groups = dist.distributed_c10d._world.pg_map
    before = len(groups)
    with inside.pretend_host(f"host {rank}"):
        training = averaged(ElasticState(1, "wild", 0.3), lr=0.0, device=device).run(1)
    with torch.no_grad():
        start = training.model.module.weight.cpu().clone()
        training.model.module.weight.add_(float(rank))
    training.run(4)
    centre = training.state.state_dict()["kept"]["centre"]["weight"]
    training.close()
    return centre - start, len(groups) - before


@pytest.mark.defect("codecs-S9", "codecs-S19")
@pytest.mark.parametrize(
    ("device", "backend"),
    [("cpu", "gloo"), pytest.param("cuda", "nccl", marks=pytest.mark.fake_cuda)],
)
def test_the_saved_wild_centre_is_of_one_moment_and_close_leaves_no_process_group(
    device: str, backend: str
) -> None:
    for moved, left in run_ranks(train_wild, 2, args=(device,), backend=backend):
        assert float(moved.max() - moved.min()) < 1e-6
        assert left == 0


@COUNTED
@pytest.mark.defect("codecs-S20")
@in_ranks(2)
def test_a_rank_without_an_offer_sends_its_part_of_the_centre_only(rank: int) -> None:
    """While rank 0 alone trains, rank 1 sends half a centre in a round, not a whole model."""
    training = averaged(ElasticState(1, "async"), nn.Linear(4, 100_000), lr=0.0).run(2)
    dist.barrier()
    sent = []
    for count in (5, 15):
        while len(training.state.rounds()) < count:
            if rank:
                time.sleep(0.01)
            else:
                training.run(1)
        sent.append(sent_bytes())
    assert not any(each.offered[1] for each in training.state.rounds()[5:15])
    training.close()
    assert rank == 0 or sent[1] - sent[0] < 0.75 * 10 * 4 * training.values.numel()

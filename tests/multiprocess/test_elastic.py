"""Elastic averaging in real ranks: at their own pace and together against copies in one process, and wild."""

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from crossover_ddp._averaging.centre import ElasticRound
from crossover_ddp._averaging.shared_centre import chunks_from, pull_shared, share
from crossover_ddp._engine.exchange import Exchange
from crossover_ddp.averaging_hooks import ElasticState, elastic_hook
from crossover_ddp.errors import SegmentError
from tests.harness import in_ranks, run_ranks
from tests.harness.campaign import IN_CAMPAIGN
from tests.harness.training import Training
from tests.harness.waiting import eventually
from tests.multiprocess.averaging_oracle import OVERFLOWS, Trainer, new_scaler
from tests.multiprocess.elastic_oracle import Replay

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
    """Rank 1 is slower than the others: before its fourth step it waits for a round without it.

    With two ranks a GradScaler skips some of their steps.
    """
    trainer, scaler = trainer_of(rank, optimizer, "async"), new_scaler()
    for step in range(OWN_STEPS[rank]):
        trainer.scaled_step(scaler) if world_size == 2 else trainer.step()
        if rank == 1 and step == 2:  # after the second forward, in which DDP arranges its buckets
            assert eventually(lambda: any(each.offered[1] is None for each in trainer.state.rounds()))
        time.sleep(0.02 if rank == 1 else 0.004)
    log = assert_replayed(trainer, optimizer, *OWN_STEPS[:world_size])
    assert len(log) > 5
    assert {record.offered[1] is None for record in log} == {True, False}, (
        "rounds with the slow rank and without"
    )


STEPS = 11


@pytest.mark.parametrize(("world_size", "optimizer"), PACES)
@in_ranks()
def test_ranks_that_pull_together_walk_the_path_of_copies(rank: int, world_size: int, optimizer: str) -> None:
    trainer, scaler = trainer_of(rank, optimizer, "sync"), new_scaler()
    for _ in range(STEPS):
        trainer.scaled_step(scaler) if world_size == 2 else trainer.step()
    log = assert_replayed(trainer, optimizer, *[STEPS] * world_size)
    due = range(EVERY, STEPS, EVERY)
    assert log == [ElasticRound(number, (each,) * world_size, each) for number, each in enumerate(due)]


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
    assert all(each.isfinite().all() for each in trainer.state.state_dict()["kept"]["centre"].values())
    counted = trainer.state.stats()["not_finite"]
    assert counted >= 4 if rank else counted == 0
    assert bool(trainer.end().isfinite().all()) == (rank == 0)


def apart(rank: int, mode: Any, device: str = "cuda", every: int = EVERY) -> Training:
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    training = Training(
        lambda *_: (ElasticState(every, mode, 0.3), elastic_hook),
        device=device,
        optimizers=lambda model: [torch.optim.SGD(model.parameters(), lr=0.0)],
    ).run(1)
    with torch.no_grad():
        for parameter in training.held:
            parameter.add_(float(rank))
    return training


@pytest.mark.fake_cuda
@in_ranks(2, backend="nccl")
def test_ranks_meet_on_a_device(rank: int, world_size: int) -> None:
    """On the host, and of several hosts: tests/recipes/test_lab_ranks.py."""
    training = apart(rank, "async")

    def are_near() -> bool:
        training.run(30)
        everyone: list[Any] = [None] * world_size
        dist.all_gather_object(everyone, training.held[0].detach().cpu())
        return float((everyone[0] - everyone[1]).abs().max()) < 0.35

    assert eventually(are_near, every_s=0.1)
    training.close()


def pull_on(rank: int, world_size: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Pull together; return the parameters and the centre."""
    training = apart(rank, "sync", device, every=1).run(4)
    centre = training.state.state_dict()["kept"]["centre"]["0.weight"]
    training.close()
    return training.held[0].detach().cpu(), centre


@pytest.mark.fake_cuda
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_ranks_pull_on_a_device_as_on_the_host(backend: str) -> None:
    on_host = run_ranks(pull_on, 2, args=("cpu",))
    for there, here in zip(run_ranks(pull_on, 2, args=("cuda",), backend=backend), on_host, strict=True):
        assert all(map(torch.equal, there, here))


@contextlib.contextmanager
def shared(numel: int) -> Iterator[tuple[torch.Tensor, Exchange]]:
    """Share a centre of zeros between all ranks."""
    group = dist.group.WORLD
    assert group is not None
    exchange = Exchange(group)
    try:
        (centre,), leaders, mates = share(group, [torch.zeros(numel)])
        assert leaders == [0] and mates == list(range(dist.get_world_size()))
        dist.barrier()
        yield centre, exchange
    finally:
        exchange.close()


@in_ranks(4)
def test_four_writers_lose_little_and_tear_nothing(rank: int, world_size: int) -> None:
    """10⁸ updates of an element in all."""
    torch.set_num_threads(1)
    numel, writes = 1_000_003, 25
    with shared(numel) as (centre, _):
        for _ in range(writes):
            for start, chunk in chunks_from(rank / world_size, [torch.ones(numel)]):
                centre[start : start + chunk.numel()].add_(chunk)
        dist.barrier()
        values = centre.clone()
    assert torch.equal(values, values.round())
    assert values.min() >= writes
    assert values.max() <= world_size * writes
    assert 0 <= 1 - float(values.double().sum()) / (numel * writes * world_size) < 0.01


@in_ranks(2)
def test_the_centre_gains_what_ranks_lose(rank: int, world_size: int) -> None:
    """Pull at the same time, from different places; what one loses the centre gains."""
    values = [torch.full((70_000,), float(rank)), torch.full((61,), float(rank), dtype=torch.bfloat16)]
    before = sum(float(each.double().sum()) for each in values)
    with shared(70_061) as (centre, exchange):
        for _ in range(40):
            pull_shared(centre, values, 0.1, rank / world_size)
            dist.barrier()
        gone = before - sum(float(each.double().sum()) for each in values)
        table = exchange.gather_numbers([gone], torch.device("cpu"))
        gained = float(centre.double().sum())
    assert 10_000 < gained == pytest.approx(sum(numbers[0] for numbers in table), rel=0.01)


@in_ranks(2)
def test_without_room_all_ranks_are_told(rank: int) -> None:
    full = OSError(28, "No space left on device") if rank == 0 else None
    allocate = mock.patch.object(os, "posix_fallocate", side_effect=full, wraps=os.posix_fallocate)
    why = "see there" if rank else r"\[Errno 28\] No space left on device; use mode='async'"
    with allocate, pytest.raises(SegmentError, match=rf"got none on ranks \[0\]: {why}"), shared(10):
        pass
    dist.barrier()

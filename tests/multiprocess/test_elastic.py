"""Elastic averaging in real ranks: at their own pace and together against copies in one process, and wild."""

import gc
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from crossover_ddp._averaging.centre import ElasticRound
from crossover_ddp.averaging_hooks import ElasticState, elastic_hook
from crossover_ddp.errors import UnsupportedConfigurationError
from tests.harness import in_ranks, inside, run_ranks
from tests.harness.campaign import IN_CAMPAIGN
from tests.harness.training import Training
from tests.harness.waiting import eventually
from tests.multiprocess.averaging_oracle import OVERFLOWS, Trainer, new_scaler
from tests.multiprocess.elastic_oracle import Replay

EVERY = 2


def trainer_of(rank: int, optimizer: str, mode: Any) -> Trainer:
    return Trainer(rank, ElasticState(EVERY, mode), optimizer)


@pytest.fixture
def single_thread() -> Iterator[None]:
    """Products are rounded as in the ranks."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# --- at their own pace ------------------------------------------------------------------------------------------------

OWN_STEPS = (60, 20, 45, 30)
PACES = [(2, "adamw"), (4, "momentum"), *([(2, "sgd")] if IN_CAMPAIGN else [])]


def train_at_own_pace(rank: int, world_size: int, optimizer: str) -> tuple[torch.Tensor, list[Any]]:
    """Rank 1 is slower than the others: before its fourth step it waits for a round without it.

    With two ranks a GradScaler skips some of their steps.
    """
    trainer, scaler = trainer_of(rank, optimizer, "async"), new_scaler()
    for step in range(OWN_STEPS[rank]):
        trainer.scaled_step(scaler) if world_size == 2 else trainer.step()
        if rank == 1 and step == 2:  # after the second forward, in which DDP arranges its buckets
            assert eventually(lambda: any(each.offered[1] is None for each in trainer.state.rounds()))
        time.sleep(0.02 if rank == 1 else 0.004)
    return trainer.end(), trainer.state.rounds()


@pytest.mark.usefixtures("single_thread")
@pytest.mark.parametrize(("world_size", "optimizer"), PACES)
def test_rounds_can_be_replayed_from_their_log(world_size: int, optimizer: str) -> None:
    found = run_ranks(train_at_own_pace, world_size, args=(optimizer,))
    logs = [log for _, log in found]
    assert len(logs[0]) > 5
    assert any(record.offered[1] is None for record in logs[0]), "no round without the slow rank"
    assert any(record.offered[1] is not None for record in logs[0]), "no round with the slow rank"
    skips = OVERFLOWS if world_size == 2 else ()
    expected = Replay(optimizer, logs, 0.9 / world_size, skips).run(OWN_STEPS[:world_size])
    for (values, _), replayed in zip(found, expected, strict=True):
        assert torch.equal(values, replayed)


# --- together -------------------------------------------------------------------------------------------------------

STEPS = 11


def train_together(rank: int, world_size: int, optimizer: str) -> tuple[torch.Tensor, list[Any]]:
    trainer, scaler = trainer_of(rank, optimizer, "sync"), new_scaler()
    for _ in range(STEPS):
        trainer.scaled_step(scaler) if world_size == 2 else trainer.step()
    return trainer.end(), trainer.state.rounds()


@pytest.mark.usefixtures("single_thread")
@pytest.mark.parametrize(("world_size", "optimizer"), PACES)
def test_ranks_that_pull_together_walk_the_path_of_copies(world_size: int, optimizer: str) -> None:
    due = range(EVERY, STEPS, EVERY)
    rounds = [ElasticRound(number, (each,) * world_size, each) for number, each in enumerate(due)]
    skips = OVERFLOWS if world_size == 2 else ()
    expected = Replay(optimizer, [rounds] * world_size, 0.9 / world_size, skips).run([STEPS] * world_size)
    found = run_ranks(train_together, world_size, args=(optimizer,))
    for (values, log), there in zip(found, expected, strict=True):
        assert torch.equal(values, there)
        assert log == rounds


# --- at the end -----------------------------------------------------------------------------------------------------


def average_at_the_end(
    rank: int, world_size: int, mode: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    trainer, scaler, steps = trainer_of(rank, "momentum", mode), new_scaler(), 12 if rank else 4
    for _ in range(steps):
        trainer.scaled_step(scaler)
    trainer.state.state_dict()  # what is due now is done
    stats = trainer.state.stats()
    assert stats["not_finite"] == 0
    if mode == "wild":
        assert stats["own_pulls"] == steps // EVERY, "who skips an update pulls all the same"
    before = trainer.values
    with trainer.state.averaged():
        inside = trainer.values
    assert torch.equal(before, trainer.values), "averaged() has changed the training"
    trainer.state.average()
    end = trainer.values
    trainer.run(1).close()
    return before, inside, end


@pytest.mark.parametrize("mode", ["async", "wild"])
def test_ranks_are_equal_after_average(mode: str) -> None:
    found = run_ranks(average_at_the_end, 2, args=(mode,))
    assert torch.equal(found[0][2], found[1][2])
    if mode == "wild":  # nothing is in flight there
        assert torch.equal(found[0][1], (found[0][0] / 2 + found[1][0] / 2))


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


# --- ranks that began apart -----------------------------------------------------------------------------------------


def meet(rank: int, world_size: int, mode: Any, hosts: int, device: str = "cpu") -> dict[str, int]:
    """Learn nothing until all have come near; pretend that ranks live on several hosts."""
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    with inside.pretend_host(f"host {rank * hosts // world_size}"):
        training = Training(
            lambda *_: (ElasticState(EVERY, mode, 0.3), elastic_hook),
            rank,
            device=device,
            optimizers=lambda model: [torch.optim.SGD(model.parameters(), lr=0.0)],
        ).run(1)
    with torch.no_grad():
        for parameter in training.held:
            parameter.add_(float(rank))
    pulls = mode != "wild" or (hosts > 1 and rank % (world_size // hosts) == 0)
    near = 0.35 * (world_size - 1)
    for _ in range(20):  # a busy machine takes more than one turn of this
        for _ in range(60):
            training.run(1)
            time.sleep(0.003)
        stats, found = training.state.stats(), [None] * world_size
        values = torch.cat([parameter.detach().flatten().cpu() for parameter in training.held])
        dist.all_gather_object(found, (values, not pulls or stats["pulls"] > 0))
        everyone, have_pulled = zip(*found, strict=True)
        spread = float((everyone[0] - everyone[-1]).abs().max())
        if all(have_pulled) and spread < near:
            break
    if device == "cuda":
        with pytest.raises(UnsupportedConfigurationError, match="kernels the host's clock does not see"):
            training.state.plan()
    training.close()
    assert spread < near, "ranks that began apart have not come closer"
    assert (stats["pulls"] > 0) == pulls
    return stats  # type: ignore[no-any-return]


@pytest.mark.parametrize(("world_size", "hosts"), [(2, 1), (4, 2)])
@in_ranks()
def test_ranks_of_a_host_meet_in_memory_and_hosts_in_rounds(rank: int, world_size: int, hosts: int) -> None:
    stats = meet(rank, world_size, "wild", hosts)
    assert stats["hosts"] == hosts
    assert stats["own_pulls"] >= 29


@pytest.mark.fake_cuda
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_ranks_meet_on_a_device(backend: str) -> None:
    run_ranks(meet, 2, args=("async", 1, "cuda"), backend=backend)


def pull_on(rank: int, world_size: int, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Begin apart, learn nothing and pull together; return the parameters and the centre."""
    if kind == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    training = Training(
        lambda *_: (ElasticState(1, "sync", 0.3), elastic_hook),
        device=kind,
        optimizers=lambda model: [torch.optim.SGD(model.parameters(), lr=0.0)],
    ).run(1)
    with torch.no_grad():
        for parameter in training.held:
            parameter.add_(float(rank))
    training.run(4)
    centre = training.state.state_dict()["kept"]["centre"]["0.weight"]
    training.close()
    return training.held[0].detach().cpu(), centre


@pytest.mark.fake_cuda
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_ranks_pull_on_a_device_as_on_the_host(backend: str) -> None:
    on_host = run_ranks(pull_on, 2, args=("cpu",))
    for there, here in zip(run_ranks(pull_on, 2, args=("cuda",), backend=backend), on_host, strict=True):
        assert all(map(torch.equal, there, here))


def dropped(rank: int, world_size: int) -> list[int]:
    """Return how many threads there are after each of several models that nobody has closed."""
    counts = []
    for _ in range(3):
        Training(lambda *_: (ElasticState(1, "sync"), elastic_hook), rank).run(2)
        gc.collect()
        counts.append(threading.active_count())
    return counts


def test_models_that_pull_together_leave_nothing_when_they_are_dropped() -> None:
    assert [len({*counts}) for counts in run_ranks(dropped, 2)] == [1, 1]

"""Ranks that die, stop or blow up: an error in bounded time, on all ranks, and no wrong parameters."""

import functools
import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from crossover_ddp import CrossoverError, ExchangeError, UnsupportedConfigurationError
from crossover_ddp.averaging_hooks import ElasticState, LocalSGDState
from tests.harness import Job, in_ranks, run_jobs
from tests.harness.groups import impatient_group
from tests.multiprocess.averaging_oracle import Trainer

PATIENCE_S = 4.0
LIMIT_S = 45.0  # of a busy machine
STATES: dict[str, Any] = {
    "blocking": lambda group: LocalSGDState(2, process_group=group),
    "delayed": lambda group: LocalSGDState(3, 2, process_group=group),
    "sync": lambda group: ElasticState(2, "sync", process_group=group),
    "async": lambda group: ElasticState(2, "async", process_group=group),
    "wild": lambda group: ElasticState(2, "wild", process_group=group),
}


def patient(rank: int, kind: str) -> Trainer:
    group = impatient_group(PATIENCE_S)
    return Trainer(rank, STATES[kind](group), process_group=group)


def until_it_fails(trainer: Trainer) -> tuple[str, float, int]:
    begin_s, steps = time.monotonic(), 0
    while time.monotonic() - begin_s < PATIENCE_S + LIMIT_S:
        try:
            trainer.step()
        except CrossoverError as error:
            took_s = time.monotonic() - begin_s
            with pytest.raises(type(error)):  # and nobody goes on as if nothing had happened
                trainer.step()
            with pytest.raises(type(error)):
                trainer.state.average()
            trainer.state.close()
            return type(error).__name__, took_s, steps
        steps += 1
        time.sleep(0.02)
    return "went on", time.monotonic() - begin_s, steps


def lose_a_peer(rank: int, world_size: int, kind: str, how: str) -> tuple[str, float, int]:
    trainer = patient(rank, kind).run(5)
    pids = [None, None]
    dist.all_gather_object(pids, os.getpid())
    dist.barrier()
    if rank == 1:
        # Whoever is stopped cannot go on by itself; rank 0 kills it when it has seen enough.
        signal.raise_signal(signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        time.sleep(60)
    found = until_it_fails(trainer)
    if how == "stopped":
        os.kill(pids[1], signal.SIGKILL)  # type: ignore[arg-type]
    return found


LOSSES = [
    *((kind, "killed") for kind in STATES),
    *((kind, "stopped") for kind in ("delayed", "async", "wild")),
]


@functools.cache
def after_losses() -> dict[tuple[str, str], tuple[str, float, int]]:
    """Lose a peer in a job of each kind at the same time: all of them do is wait."""
    jobs = [Job(lose_a_peer, 2, loss, deaths={1: signal.SIGKILL}, name="-".join(loss)) for loss in LOSSES]
    return {loss: found for loss, (found, _) in zip(LOSSES, run_jobs(jobs, timeout_s=90), strict=True)}


@pytest.mark.parametrize("loss", LOSSES, ids="-".join)
def test_the_loss_of_a_peer_is_an_error_in_bounded_time(loss: tuple[str, str]) -> None:
    error, took_s, steps = after_losses()[loss]
    assert error == ExchangeError.__name__
    assert took_s < PATIENCE_S + LIMIT_S
    if loss in (("async", "stopped"), ("wild", "stopped")):
        assert steps > 4, "a stopped rank has stopped the others before the timeout"
        assert took_s > PATIENCE_S / 2


@pytest.mark.defect("codecs-S1")
@pytest.mark.parametrize("kind", ["blocking", "delayed", "sync"])
@in_ranks(2)
def test_infinities_on_one_rank_are_an_error_on_all_and_spread_to_none(rank: int, kind: str) -> None:
    trainer = patient(rank, kind).run(4)
    if rank == 1:
        with torch.no_grad():
            list(trainer.model.parameters())[-1][0] = float("nan" if kind == "blocking" else "inf")
    who = "this rank's are among them" if rank else "see the other ranks"
    with pytest.raises(
        UnsupportedConfigurationError, match=f"expected finite parameters on all ranks.*{who}"
    ):
        trainer.run(8)
    assert rank or trainer.values.isfinite().all(), "the healthy rank took the mean over"
    trainer.close()

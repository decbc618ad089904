"""Owners beside a sibling job, and without one of the ranks."""

import functools
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim import _muon as torch_muon
from torch.optim import sgd as torch_sgd

from crossover_ddp import ExchangeError, GPUMutex
from tests.harness import Job, run_jobs, run_ranks
from tests.harness.groups import impatient_group, new_group
from tests.harness.training import Training
from tests.multiprocess.owned_training import OwnedRun, Soap, batch, mixture

STEPS = 10
PATIENCE_S = 10.0
LIMIT_S = 60.0  # of a busy machine
# What owners compute, by the way of the hook.
WORK = {
    "kfac": (torch.linalg, "cholesky_ex"),
    "muon": (torch_muon, "_zeropower_via_newtonschulz"),
    "owned": (torch_sgd, "sgd"),
}


def train(rank: int, world_size: int, way: str, group: str) -> list[bool]:
    """Return for each piece of an owner's work from the second step on whether the turn was held."""
    mutex = GPUMutex(group, device=f"device{rank}")
    training, held = Training(way, rank, mutex=mutex).run(1), []
    module, name = WORK[way]
    compute = getattr(module, name)

    @functools.wraps(compute)  # whose signature Muon's state reads
    def watched(*arguments: Any, **options: Any) -> Any:
        if len(arguments[0]):  # else it is a count of steps
            held.append(mutex.holding)
        return compute(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, watched)
        training.run(STEPS)
    training.close()
    mutex.close()
    return held


@pytest.mark.parametrize("way", WORK)
def test_owners_work_inside_of_their_turns(way: str) -> None:
    group = new_group()
    for job in run_jobs([Job(train, 2, (way, group), name=name) for name in "ab"], timeout_s=120):
        for held in job:
            assert held
            assert all(held)


def lose_a_peer(rank: int, world_size: int) -> tuple[str, float]:
    """Rank 1 dies; return what the others hear of it, and when."""
    group = impatient_group(PATIENCE_S)
    run = OwnedRun(mixture(), "soap", owners=True, options={"process_group": group})
    for step in range(3):
        run.step(batch(rank, step))
    dist.barrier()
    if rank == 1:
        Soap._update = lambda *_: signal.raise_signal(signal.SIGKILL)  # type: ignore[method-assign]
    outcome, begin_s = "went on", time.monotonic()
    try:
        for step in range(3, 6):
            run.step(batch(rank, step))
    except ExchangeError as error:
        outcome = str(error)
    took_s = time.monotonic() - begin_s
    dist.destroy_process_group(group)
    return outcome, took_s


def test_the_loss_of_a_peer_in_its_step_is_an_error_in_bounded_time() -> None:
    survivor, _ = run_ranks(lose_a_peer, 2, deaths={1: signal.SIGKILL}, timeout_s=90)
    message, took_s = survivor
    assert message.startswith("rank 0 of 2: the "), message
    assert took_s < PATIENCE_S + LIMIT_S

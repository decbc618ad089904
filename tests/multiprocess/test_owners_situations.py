"""Owners beside a sibling job, and without one of the ranks."""

import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp import ExchangeError, GPUMutex
from tests.harness import Job, run_jobs, run_ranks
from tests.harness.groups import new_group
from tests.multiprocess.owned_training import OwnedRun, Soap, batch, mixture

STEPS = 10
PATIENCE_S = 3.0
LIMIT_S = 20.0  # of a busy machine


def train(rank: int, world_size: int, group: str) -> dict[str, Any]:
    """Train; without a group alone and without turns."""
    mutex = GPUMutex(group, device=f"device{rank}") if group else None
    run = OwnedRun(mixture(), "soap", owners=True, mutex=mutex)
    held: dict[str, list[bool]] = {"forward": [], "update": []}

    def note(what: str) -> None:
        held[what].append(mutex is None or mutex.holding)

    run.module.register_forward_pre_hook(lambda *_: note("forward"))
    update = Soap._update

    def watched(*arguments: Any) -> None:
        note("update")
        update(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Soap, "_update", watched)
        for step in range(STEPS):
            run.step(batch(rank, step))
    assert run.state is not None
    run.state.flush()
    stats = mutex.stats() if mutex is not None else {}
    if mutex is not None:
        mutex.close()
    matrices = [p for group in run.optimizers[0].param_groups for p in group["params"]]
    return {
        "parameters": [parameter.tolist() for parameter in run.parameters()],
        "held": held,
        "own": sum(owner == rank for owner in run.state.owners[: len(matrices)]),
        "stats": stats,
    }


def test_siblings_train_as_alone_and_owners_update_in_their_turns() -> None:
    group = new_group()
    alone = run_ranks(train, 2, args=("",))
    jobs = [Job(train, 2, (group,), name=name) for name in "ab"]
    for job in run_jobs(jobs, timeout_s=120):
        for rank, of_rank in enumerate(job):
            assert of_rank["parameters"] == alone[rank]["parameters"]
            assert of_rank["own"]
            assert len(of_rank["held"]["update"]) == of_rank["own"] * STEPS
            assert len(of_rank["held"]["forward"]) == STEPS
            # The first forward comes before the first turn.
            assert all(of_rank["held"]["forward"][1:])
            assert all(of_rank["held"]["update"][of_rank["own"] :])
            assert of_rank["stats"]["turns"] >= STEPS - 1
            assert of_rank["stats"]["disabled_because"] is None
            assert of_rank["stats"]["leases_expired"] == 0


def lose_a_peer(rank: int, world_size: int, moment: str) -> tuple[str, float]:
    """Rank 1 dies; return what the others hear of it, and when."""
    DistributedDataParallel(mixture())  # imports what one rank would else wait for
    dist.barrier()
    group = dist.new_group(timeout=timedelta(seconds=PATIENCE_S))
    assert group is not None
    run = OwnedRun(mixture(), "soap", owners=True, options={"process_group": group})
    for step in range(3):
        run.step(batch(rank, step))
    dist.barrier()
    if rank == 1:
        if moment == "between backward and step":
            run.backward(batch(rank, 3))
            signal.raise_signal(signal.SIGKILL)
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


@pytest.mark.parametrize("moment", ["between backward and step", "in the owner's step"])
def test_the_loss_of_a_peer_is_an_error_in_bounded_time(moment: str) -> None:
    survivor, _ = run_ranks(lose_a_peer, 2, args=(moment,), deaths={1: signal.SIGKILL})
    message, took_s = survivor
    assert message.startswith("rank 0 of 2: the "), message
    assert took_s < PATIENCE_S + LIMIT_S

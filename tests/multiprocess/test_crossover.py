"""Two sibling jobs of two ranks each, on two devices: turns are taken, and nobody's results change."""

import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from crossover_ddp import CrossoverState, crossover_wrapper
from tests.harness import Job, inside, run_jobs
from tests.harness.groups import new_group
from tests.harness.training import WIDTH, Training

STEPS = 12


def network(seed: int) -> nn.Module:
    """BatchNorm, so that DDP broadcasts buffers inside the turn; several buckets."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 128))


def train(rank: int, world_size: int, seed: int, wrapped: bool) -> tuple[list[float], list[list[float]], int]:
    """Return losses, parameters, and turns."""
    hook, inner = powerSGD_hook.powerSGD_hook, powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
    training = Training(
        lambda *_: (CrossoverState(hook_state=inner), crossover_wrapper(hook)) if wrapped else (inner, hook),
        rank,
        module=network(seed),
        # PowerSGD's callbacks run collectives on gloo's threads, in no order when several buckets are under way.
        bucket_cap_mb=25.0,
    )
    losses = [training.step() for _ in range(STEPS)]
    turns = training.state.stats()["turns"] if wrapped else STEPS
    training.close()
    # PowerSGD's last callbacks may still run, and abort a process that ends by then (pytorch#179291).
    time.sleep(0.1)
    return losses, [p.detach().flatten().tolist() for p in training.model.parameters()], turns


def environment(world_size: int) -> list[dict[str, str]]:
    return [{"CROSSOVER_DEVICE": f"device{rank}"} for rank in range(world_size)]


def jobs(wrapped: bool) -> list[Job]:
    return [Job(train, 2, (seed, wrapped), environment=environment(2), name=f"job {seed}") for seed in (1, 2)]


def test_a_hook_with_a_state_keeps_its_results_inside_the_wrapper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSOVER_GROUP", new_group())
    alone = [run_jobs([job])[0] for job in jobs(False)]
    assert run_jobs(jobs(True), timeout_s=90) == alone


def train_again_after_a_failure(rank: int, world_size: int) -> list[dict[str, Any]]:
    """Two trainings in one process group; at the end of the first, peers of rank 0 are quicker to close than it."""
    stats = []
    for _ in range(2):
        state = Training("crossover", rank, module=network(1)).run(3).state
        if rank == 0 and not stats:
            inside.give_up(state.mutex, RuntimeError("Connection closed by peer"))
        state.close()
        stats.append(state.stats())
    return stats


def test_all_ranks_join_anew_after_one_had_failed_before_it_was_closed() -> None:
    """They would wait for each other for half an hour if only those whose mutex had been well did."""
    ranks = run_jobs([Job(train_again_after_a_failure, 2, environment=environment(2))], timeout_s=60)[0]
    reasons = [[stats["disabled_because"] for stats in rank] for rank in ranks]
    assert reasons == [["RuntimeError: Connection closed by peer", "closed"], ["closed", "closed"]]
    assert [rank[1]["turns"] for rank in ranks] == [3, 3]

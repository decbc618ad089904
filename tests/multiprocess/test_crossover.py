"""Two sibling jobs of two ranks each, on two devices: turns are taken, and nobody's results change."""

from typing import Any

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp import CrossoverState, crossover_hook, crossover_wrapper
from tests.harness import Job, run_jobs
from tests.harness.groups import new_group

STEPS = 12


def network(seed: int) -> torch.nn.Module:
    """BatchNorm, so that DDP broadcasts buffers inside the turn; several buckets."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 8, 3, padding=1),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(8 * 64, 128),
        torch.nn.BatchNorm1d(128),
        torch.nn.Linear(128, 10),
    )


def train(rank: int, world_size: int, seed: int, wrapped: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    # PowerSGD's callbacks run collectives on gloo's threads, in no order when several buckets are under way.
    model = DistributedDataParallel(network(seed), bucket_cap_mb=25.0, gradient_as_bucket_view=True)
    inner = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
    state = CrossoverState(hook_state=inner) if wrapped else None
    hook = powerSGD_hook.powerSGD_hook
    model.register_comm_hook(state or inner, crossover_wrapper(hook) if wrapped else hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(100 * seed + rank)
    found = []
    for _ in range(STEPS):
        inputs = torch.randn(8, 1, 8, 8, generator=generator)
        targets = torch.randint(0, 10, (8,), generator=generator)
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    stats = state.stats() if state else {}
    if state:
        state.close()
    parameters = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return {"losses": found, "parameters": parameters.numpy().tobytes(), "stats": stats}


def environment(world_size: int) -> list[dict[str, str]]:
    return [{"CROSSOVER_DEVICE": f"device{rank}"} for rank in range(world_size)]


def jobs(wrapped: bool) -> list[Job]:
    return [Job(train, 2, (seed, wrapped), environment=environment(2), name=f"job {seed}") for seed in (1, 2)]


def test_a_hook_with_a_state_keeps_its_results_inside_the_wrapper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSOVER_GROUP", new_group())
    alone = [run_jobs([job])[0] for job in jobs(False)]
    for job, bare_job in zip(run_jobs(jobs(True), timeout_s=90), alone, strict=True):
        for ours, bare in zip(job, bare_job, strict=True):
            assert ours["losses"] == bare["losses"]
            assert ours["parameters"] == bare["parameters"]
            assert ours["stats"]["turns"] == STEPS


def train_again_after_a_failure(rank: int, world_size: int) -> list[dict[str, Any]]:
    """Two trainings in one process group; at the end of the first, peers of rank 0 are quicker to close than it."""
    stats = []
    for _ in range(2):
        model = DistributedDataParallel(network(seed=1), bucket_cap_mb=0.05)
        state = CrossoverState()
        model.register_comm_hook(state, crossover_hook)
        for _ in range(3):
            model(torch.ones(8, 1, 8, 8)).sum().backward()
        if rank == 0 and not stats:
            assert state.mutex is not None
            state.mutex._give_up(RuntimeError("Connection closed by peer"))
        state.close()
        stats.append(state.stats())
    return stats


def test_all_ranks_join_anew_after_one_had_failed_before_it_was_closed() -> None:
    """They would wait for each other for half an hour if only those whose mutex had been well did."""
    ranks = run_jobs([Job(train_again_after_a_failure, 2, environment=environment(2))], timeout_s=60)[0]
    reasons = [[stats["disabled_because"] for stats in rank] for rank in ranks]
    assert reasons == [["RuntimeError: Connection closed by peer", "closed"], ["closed", "closed"]]
    assert [rank[1]["turns"] for rank in ranks] == [3, 3]

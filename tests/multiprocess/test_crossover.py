"""Two sibling jobs of two ranks each, on two devices: turns are taken, and nobody's results change."""

from typing import Any

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp import CrossoverState, crossover_hook, crossover_wrapper
from tests.harness import Job, run_jobs
from tests.harness.groups import new_group

STEPS = 12
HOOKS: dict[str, Any] = {
    "fp16": default_hooks.fp16_compress_hook,
    "bf16": default_hooks.bf16_compress_hook,
    "powersgd": powerSGD_hook.powerSGD_hook,
}


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


def state_and_hook(hook: str) -> tuple[Any, Any]:
    inner = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2) if hook.endswith("powersgd") else None
    name = hook.rpartition(":")[2]
    if hook.startswith("crossover:"):
        return CrossoverState(hook_state=inner), crossover_wrapper(HOOKS[name])
    if hook == "crossover":
        return CrossoverState(), crossover_hook
    return inner, HOOKS[name]


def cap_mb(hook: str) -> float:
    """PowerSGD's callbacks run collectives on gloo's threads, in no order when several buckets are under way."""
    return 25.0 if hook.endswith("powersgd") else 0.05


def train(rank: int, world_size: int, hook: str, seed: int, accumulate: int = 1) -> dict[str, Any]:
    torch.set_num_threads(1)
    model = DistributedDataParallel(network(seed), bucket_cap_mb=cap_mb(hook), gradient_as_bucket_view=True)
    state = None
    if hook != "none":
        state, function = state_and_hook(hook)
        model.register_comm_hook(state, function)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(100 * seed + rank)
    found = []
    for _ in range(STEPS):
        for part in range(accumulate):
            model.require_backward_grad_sync = part == accumulate - 1
            inputs = torch.randn(8, 1, 8, 8, generator=generator)
            targets = torch.randint(0, 10, (8,), generator=generator)
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    stats = state.stats() if isinstance(state, CrossoverState) else {}
    if isinstance(state, CrossoverState):
        state.close()
    parameters = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return {"losses": found, "parameters": parameters.numpy().tobytes(), "stats": stats}


def environment(world_size: int) -> list[dict[str, str]]:
    return [{"CROSSOVER_DEVICE": f"device{rank}"} for rank in range(world_size)]


def siblings(hook: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[list[dict[str, Any]]]:
    monkeypatch.setenv("CROSSOVER_GROUP", new_group())
    jobs = [
        Job(train, 2, (hook, seed, *options.values()), environment=environment(2), name=f"job {seed}")
        for seed in (1, 2)
    ]
    return run_jobs(jobs, timeout_s=90)


def alone(hook: str, seed: int, **options: Any) -> list[dict[str, Any]]:
    return run_jobs([Job(train, 2, (hook, seed, *options.values()), environment=environment(2))])[0]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_siblings_train_exactly_as_plain_ddp_alone(accumulate: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed, job in zip((1, 2), siblings("crossover", monkeypatch, accumulate=accumulate), strict=True):
        for rank, plain in enumerate(alone("none", seed, accumulate=accumulate)):
            assert job[rank]["losses"] == plain["losses"]
            assert job[rank]["parameters"] == plain["parameters"]
            assert job[rank]["stats"]["turns"] == STEPS
            assert job[rank]["stats"]["disabled_because"] is None
            assert job[rank]["stats"]["leases_expired"] == 0


@pytest.mark.parametrize("hook", ["fp16", "bf16", "powersgd"])
def test_other_hooks_keep_their_results_inside_the_wrapper(
    hook: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed, job in zip((1, 2), siblings(f"crossover:{hook}", monkeypatch), strict=True):
        for rank, bare in enumerate(alone(hook, seed)):
            assert job[rank]["losses"] == bare["losses"]
            assert job[rank]["parameters"] == bare["parameters"]
            assert job[rank]["stats"]["turns"] == STEPS


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

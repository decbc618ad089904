"""Decoupled training in real ranks: what one rank may do alone, and plans of buckets."""

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
import timm.utils
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from crossover_ddp import (
    DecoupledState,
    UnsupportedConfigurationError,
    decoupled_hook,
)
from tests.harness import run_ranks

CAP_MB = 0.002
MAKERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
}


def network() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(96, 24),
        nn.ReLU(),
        nn.Linear(24, 10),
    )


class Training:
    """A model under plain DDP, or decoupled."""

    def __init__(
        self,
        rank: int,
        optimizer: str,
        way: str = "plain",
        *,
        options: dict[str, Any] | None = None,
        hook: Callable[..., Any] = decoupled_hook,
    ) -> None:
        options = options or {"bucket_cap_mb": CAP_MB}
        self.model = DistributedDataParallel(network(), gradient_as_bucket_view=True, **options)
        self.optimizer = MAKERS[optimizer](self.model)
        self.state = DecoupledState(self.optimizer, defer="always") if way == "decoupled" else None
        if self.state is not None:
            self.model.register_comm_hook(self.state, hook)
        self.generator = torch.Generator().manual_seed(50 + rank)

    def backward(self) -> None:
        images = torch.randn(8, 1, 6, 6, generator=self.generator)
        targets = torch.randint(0, 10, (8,), generator=self.generator)
        nn.functional.cross_entropy(self.model(images), targets).backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def end(self) -> torch.Tensor:
        self.model.eval()
        self.model(torch.zeros(1, 1, 6, 6))  # between two steps buffers may differ
        values = self.model.module.state_dict().values()
        flat = torch.cat([value.flatten().double() for value in values])
        if self.state is not None:
            self.state.close()
        return flat


def flush_on_rank_0_and_clip(rank: int, world_size: int) -> bool:
    """``flush`` asks nobody, so the ranks that have not called it must not wait for rank 0's parts."""
    training, plain = (Training(rank, "sgd", way) for way in ("decoupled", "plain"))
    same = True
    for _ in range(6):
        training.backward()
        plain.backward()
        assert training.state is not None
        if rank == 0:
            training.state.flush()
        norm = training.state.clip_grad_norm_(0.5)
        # Ours is summed in float64, so that deferred steps have the same.
        same &= torch.allclose(norm, clip_grad_norm_(plain.model.parameters(), 0.5), rtol=1e-6)
        for each in (training, plain):
            each.optimizer.step()
            each.optimizer.zero_grad()
    return same and torch.allclose(training.end(), plain.end(), rtol=1e-5, atol=1e-6)


def test_one_rank_may_flush_before_all_clip() -> None:
    assert run_ranks(flush_on_rank_0_and_clip, 2) == [True, True]


def only_rank_0_looks(rank: int, world_size: int) -> bool:
    """Checkpoints, averages and evaluations of one rank need no other rank."""
    training, plain = (Training(rank, "adamw", way) for way in ("decoupled", "plain"))
    average = timm.utils.ModelEmaV3(training.model.module, decay=0.9) if rank == 0 else None
    for step in range(12):
        training.step()
        plain.step()
        if rank == 0:
            look(training, step, average)
    return torch.equal(training.end(), plain.end())


def look(training: Training, step: int, average: Any) -> None:
    ways: list[Callable[[], object]] = [
        lambda: training.model.state_dict(),
        lambda: training.optimizer.state_dict(),
        lambda: average.update(training.model.module),
        lambda: copy.deepcopy(training.model.module)(torch.ones(2, 1, 6, 6)),
        lambda: time.sleep(0.05),
    ]
    ways[step % len(ways)]()


def test_one_rank_may_look_alone() -> None:
    assert run_ranks(only_rank_0_looks, 2) == [True, True]


def plan(rank: int, world_size: int) -> dict[str, Any]:
    training = Training(rank, "sgd", "decoupled")
    assert training.state is not None
    for _ in range(8):
        training.step()
    chosen = training.state.plan_buckets()
    training.end()
    sizes: dict[int, int] = {}

    def noting(state, bucket):  # type: ignore[no-untyped-def]
        sizes[bucket.index()] = bucket.buffer().nbytes
        return decoupled_hook(state, bucket)

    trained = Training(rank, "sgd", "decoupled", options=chosen.ddp_options(), hook=noting)
    for _ in range(4):
        trained.step()
    trained.end()
    return {**vars(chosen), "sizes": list(sizes.values())}


def test_all_ranks_plan_the_same_buckets() -> None:
    first, second = run_ranks(plan, 2)
    assert first == second
    assert first["step_s"] > 0
    # DDP closes a bucket with the parameter that fills it.
    assert all(size >= first["cap_bytes"] for size in first["sizes"][:-1]), "DDP makes the buckets as planned"


def plan_too_early(rank: int, world_size: int, steps: int) -> str:
    training = Training(rank, "sgd", "decoupled")
    assert training.state is not None
    for _ in range(steps):
        training.step()
        if rank == 0:  # whose updates do not come in forward then, so that it has nothing to plan from
            training.model.module.state_dict()
    try:
        training.state.plan_buckets()
    except UnsupportedConfigurationError as error:
        return str(error)
    finally:
        training.end()
    return ""


@pytest.mark.parametrize(("steps", "recorded"), [(1, [False, False]), (8, [False, True])])
def test_a_plan_needs_deferred_steps_on_all_ranks(steps: int, recorded: list[bool]) -> None:
    for message in run_ranks(plan_too_early, 2, args=(steps,)):
        assert f"got {recorded}; train some ten steps before" in message

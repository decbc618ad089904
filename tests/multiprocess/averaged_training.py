"""Training of a small layer with a state of the averaging hooks."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from crossover_ddp.averaging_hooks import ElasticState, elastic_hook, local_sgd_hook
from tests.harness.training import Training


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(1000 * step + rank))
    return model(inputs.to(next(model.parameters()))).square().mean()  # type: ignore[no-any-return]


def averaged(
    state: Any, network: nn.Module | None = None, *, lr: float = 0.1, **options: Any
) -> Training:
    """Return a training with ``state``; by default of a linear layer of four features."""
    hook = elastic_hook if isinstance(state, ElasticState) else local_sgd_hook
    torch.manual_seed(0)
    return Training(
        lambda *_: (state, hook),
        dist.get_rank(),
        module=network or nn.Linear(4, 4),
        optimizers=lambda model: [torch.optim.SGD(model.parameters(), lr)],
        **{"loss": loss_of, **options},
    )


def in_bfloat16() -> nn.Module:
    return nn.Linear(4, 40).to(torch.bfloat16)


def spread(values: torch.Tensor) -> float:
    """Return the largest difference between the first and the last rank's ``values``."""
    of_ranks = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(of_ranks, values)
    return float((of_ranks[0] - of_ranks[-1]).abs().max())

"""Averaged replicas twice: as ranks of DDP with a hook, and as plain copies in one process."""

import functools
import itertools
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from crossover_ddp.averaging_hooks import ElasticState, elastic_hook, local_sgd_hook
from tests.harness.training import Training
from tests.multiprocess.replicas import Copies, flat

MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-4),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, eps=1e-4),
}
NESTEROV = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
# Ranks and steps with infinite losses: in steps before, at and between exchanges, twice in a row, and never on both
# ranks at once. Scales are powers of two, so scaling and unscaling round nothing.
OVERFLOWS = frozenset({(1, 3), (1, 4), (0, 7), (1, 9)})
SCALE = 2.0**10


def network() -> nn.Module:
    """A convolution, statistics, and 101 outputs: the flat vector divides by nothing."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(1, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten(), nn.Linear(80, 13), nn.Tanh(), nn.Linear(13, 7)
    )  # fmt: skip


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    images = torch.randn(6, 1, 6, 6, generator=generator)
    return nn.functional.cross_entropy(model(images), torch.randint(0, 7, (6,), generator=generator))


class Trainer(Training):
    def __init__(
        self, rank: int, state: Any, optimizer: str = "momentum", *, model: nn.Module | None = None, **options: Any
    ) -> None:
        hook = elastic_hook if isinstance(state, ElasticState) else local_sgd_hook
        super().__init__(
            lambda *_: (state, hook),
            rank,
            module=model or network(),
            optimizers=lambda made: [MAKERS[optimizer](made.parameters())],
            loss=loss_of,
            **{"broadcast_buffers": False, "bucket_cap_mb": 0.002, **options},
        )

    def scaled_step(self, scaler: torch.amp.GradScaler) -> None:
        """Train with a GradScaler, which skips where the loss overflows on this rank."""
        loss = self.loss()
        scaler.scale(loss * float("inf") if (self.rank, self.steps) in OVERFLOWS else loss).backward()
        scaler.step(self.optimizer)
        scaler.update()
        self.drop()
        self.steps += 1

    @property
    def values(self) -> torch.Tensor:
        return flat(self.model.module)

    def end(self) -> torch.Tensor:
        """Close the state; return what the model was before."""
        values = self.values
        self.close()
        return values


def new_scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=1000)


def copies_of(world_size: int, optimizer: str, skips: Collection[tuple[int, int]] = (), *, first: int = 0) -> Copies:
    models = [network() for _ in range(world_size)]
    steps = [itertools.count(first) for _ in models]

    def gradients(rank: int) -> None:
        loss_of(models[rank], rank, next(steps[rank])).backward()

    copies = Copies(models, [MAKERS[optimizer](model.parameters()) for model in models], gradients, skips)
    copies.steps = first
    return copies

"""Averaged replicas twice: as ranks of DDP with a hook, and as plain copies in one process."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp.averaging_hooks import LocalSGDState, local_sgd_hook
from tests.multiprocess.replicas import Copies, DelayedWalk, flat

MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-4),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, eps=1e-4),
}
NESTEROV = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
PLAIN = functools.partial(torch.optim.SGD, lr=1.0)


def network() -> nn.Module:
    """A convolution, statistics, and 101 outputs: the flat vector divides by nothing."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(1, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten(), nn.Linear(80, 13), nn.Tanh(), nn.Linear(13, 7)
    )  # fmt: skip


def batches(rank: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(70 + rank)
    while True:
        images = torch.randn(6, 1, 6, 6, generator=generator)
        yield images, torch.randint(0, 7, (6,), generator=generator)


class Trainer:
    """One rank: DDP, an optimizer, and the hook's state."""

    def __init__(
        self,
        rank: int,
        state: Any,
        optimizer: str = "momentum",
        *,
        hook: Any = local_sgd_hook,
        model: nn.Module | None = None,
        **options: Any,
    ) -> None:
        given = {
            "broadcast_buffers": False,
            "gradient_as_bucket_view": True,
            "bucket_cap_mb": 0.002,
            **options,
        }
        self.model = DistributedDataParallel(network() if model is None else model, **given)
        self.optimizer = MAKERS[optimizer](self.model.parameters())
        self.state = state
        if hook is not None:
            self.model.register_comm_hook(state, hook)
        self.batches = batches(rank)

    def backward(self) -> float:
        images, labels = next(self.batches)
        loss = nn.functional.cross_entropy(self.model(images), labels)
        loss.backward()
        return float(loss.detach())

    def step(self, accumulate: int = 1) -> float:
        for part in range(accumulate):
            with contextlib.nullcontext() if part == accumulate - 1 else self.model.no_sync():
                loss = self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def train(self, steps: int) -> list[float]:
        return [self.step() for _ in range(steps)]

    @property
    def values(self) -> torch.Tensor:
        return flat(self.model.module)


def copies_of(
    world_size: int, optimizer: str, skips: Collection[tuple[int, int]] = (), *, first: int = 0
) -> Copies:
    """The same in one process: a copy of the network for each rank, which goes on with batch ``first``."""
    models = [network() for _ in range(world_size)]
    sources = [itertools.islice(batches(rank), first, None) for rank in range(world_size)]

    def gradients(rank: int) -> None:
        images, labels = next(sources[rank])
        nn.functional.cross_entropy(models[rank](images), labels).backward()

    copies = Copies(models, [MAKERS[optimizer](model.parameters()) for model in models], gradients, skips)
    copies.steps = first
    return copies


def delayed_oracle(
    world_size: int, optimizer: str, steps: int, *, skips: Collection[tuple[int, int]] = (), **settings: Any
) -> list[torch.Tensor]:
    """Walk what `LocalSGDState` walks; returns each copy's values."""
    walk = DelayedWalk(copies_of(world_size, optimizer, skips), **settings)
    for _ in range(steps):
        walk.step()
    return walk.copies.snapshots()


def by_hook(rank: int, optimizer: str, steps: int, name: str) -> torch.Tensor:
    settings, outer = SETTINGS[name]
    make = None if outer is None else outer_of(*outer)
    trainer = Trainer(rank, LocalSGDState(**settings, outer_optimizer=make), optimizer)
    trainer.train(steps)
    trainer.state.close()
    return trainer.values


def outer_of(rate: float, momentum: float) -> Callable[[Any], torch.optim.Optimizer]:
    return functools.partial(torch.optim.SGD, lr=rate, momentum=momentum, nesterov=momentum > 0)


SETTINGS: dict[str, tuple[dict[str, Any], tuple[float, float] | None]] = {
    "local": ({"sync_every": 4}, None),
    "post_local": ({"sync_every": 3, "warmup_steps": 4}, None),
    "delayed": ({"sync_every": 4, "delay": 3}, None),
    "streamed": ({"sync_every": 4, "delay": 1, "fragments": 4}, None),
    "many_fragments": ({"sync_every": 3, "delay": 2, "fragments": 5, "warmup_steps": 2}, None),
    "diloco": ({"sync_every": 4}, (0.7, 0.9)),
    "streaming_diloco": ({"sync_every": 4, "delay": 2, "fragments": 3, "warmup_steps": 1}, (0.7, 0.9)),
}


def walk_all(
    rank: int, world_size: int, steps: int, cells: Collection[tuple[str, str]]
) -> dict[tuple[str, str], tuple[torch.Tensor, Any]]:
    """Return this rank's values of each cell, and on rank 0 what the copies say of all ranks."""
    torch.set_num_threads(1)
    found = {}
    for name, optimizer in cells:
        expected = None
        if rank == 0:
            settings, outer = SETTINGS[name]
            expected = delayed_oracle(world_size, optimizer, steps, **settings, outer=outer)
        found[name, optimizer] = by_hook(rank, optimizer, steps, name), expected
    return found

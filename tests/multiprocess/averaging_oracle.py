"""Averaged replicas twice: as ranks of DDP with a hook, and as plain copies in one process."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp.averaging_hooks import LocalSGDState, local_sgd_hook

MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-4),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=2e-3, eps=1e-4),
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


def floats(model: nn.Module) -> list[torch.Tensor]:
    """Return what is averaged, in the order of the flat vector: parameters, then buffers."""
    tensors = [*model.parameters(), *model.buffers()]
    return [tensor.detach() for tensor in tensors if tensor.is_floating_point()]


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in floats(model)])


def write(model: nn.Module, values: torch.Tensor) -> None:
    tensors = floats(model)
    for tensor, piece in zip(tensors, values.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(piece.view_as(tensor))


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


class Copies:
    """The same in one process: a copy of the network for each rank, and vectors that anybody can follow.

    ``after``: called with the number of steps done, before the next forward.
    """

    def __init__(self, world_size: int, optimizer: str) -> None:
        self.world_size = world_size
        self.models = [network() for _ in range(world_size)]
        self.optimizers = [MAKERS[optimizer](model.parameters()) for model in self.models]
        self.batches = [batches(rank) for rank in range(world_size)]
        self.steps = 0

    def gradients(self) -> None:
        for model, source in zip(self.models, self.batches, strict=True):
            images, labels = next(source)
            nn.functional.cross_entropy(model(images), labels).backward()

    def step(self, *, together: bool = False) -> None:
        self.gradients()
        if together:
            for of_all in zip(*[model.parameters() for model in self.models], strict=True):
                mean = mean_of([parameter.grad for parameter in of_all])
                for parameter in of_all:
                    parameter.grad.copy_(mean)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.steps += 1

    @torch.no_grad()
    def snapshots(self) -> list[torch.Tensor]:
        return [flat(model) for model in self.models]

    @torch.no_grad()
    def write(self, values: Sequence[torch.Tensor]) -> None:
        for model, each in zip(self.models, values, strict=True):
            write(model, each)


def mean_of(values: Sequence[Any]) -> torch.Tensor:
    """Add as the ring does: each part begins on the rank behind its owner; divided before the sum."""
    world_size, numel = len(values), values[0].numel()
    parts = [value.flatten() / world_size for value in values]
    share, mean = numel // world_size, torch.empty(numel)
    for owner in range(world_size):
        place = slice(owner * share, numel if owner == world_size - 1 else (owner + 1) * share)
        order = [(owner + 1 + step) % world_size for step in range(world_size)]
        mean[place] = functools.reduce(torch.add, [parts[rank][place] for rank in order])
    return mean.view_as(values[0])


def delayed_oracle(
    world_size: int,
    optimizer: str,
    steps: int,
    *,
    sync_every: int,
    delay: int = 0,
    fragments: int = 1,
    warmup_steps: int = 0,
    outer: tuple[float, float] | None = None,
) -> list[torch.Tensor]:
    """Walk what `LocalSGDState` walks; ``outer``: rate and Nesterov momentum. Returns each copy's values."""
    copies = Copies(world_size, optimizer)
    numel = len(copies.snapshots()[0])
    trainable = sum(p.numel() for p in copies.models[0].parameters())
    anchor = velocity = None
    flying: dict[int, tuple[slice, list[torch.Tensor], torch.Tensor]] = {}
    for _ in range(steps):
        local = copies.steps - warmup_steps
        if local == 0:
            anchor, velocity = copies.snapshots()[0].clone(), torch.zeros(numel)
        for fragment in range(fragments):
            offset = fragment * sync_every // fragments
            place = slice(numel * fragment // fragments, numel * (fragment + 1) // fragments)
            if fragment in flying and (local - delay - offset) % sync_every == 0 and delay:
                land(copies, *flying.pop(fragment))
            if local > 0 and (local - offset) % sync_every == 0:
                sent = [values[place] for values in copies.snapshots()]
                mean = mean_of(sent)
                if outer is not None:
                    mean = outer_step(
                        mean, anchor[place], velocity[place], max(0, trainable - place.start), *outer
                    )
                if delay:
                    flying[fragment] = place, sent, mean
                else:
                    values = copies.snapshots()
                    for each in values:
                        each[place] = mean
                    copies.write(values)
        copies.step(together=local < 0)
    return copies.snapshots()


def land(copies: Copies, place: slice, sent: Sequence[torch.Tensor], mean: torch.Tensor) -> None:
    values = copies.snapshots()
    for each, own in zip(values, sent, strict=True):
        each[place] += mean - own
    copies.write(values)


def outer_step(
    mean: torch.Tensor,
    anchor: torch.Tensor,
    velocity: torch.Tensor,
    trainable: int,
    rate: float,
    momentum: float,
) -> torch.Tensor:
    """Nesterov's step of the anchor, in the coordinates of [Note: outer steps around the mean]; buffers: the mean."""
    result = mean.clone()
    delta = anchor[:trainable] - mean[:trainable]
    velocity[:trainable].mul_(momentum).add_(delta)
    step = delta.add(velocity[:trainable], alpha=momentum) if momentum else delta
    result[:trainable] += delta.add(step, alpha=-rate)
    anchor.copy_(result)
    return result


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
CELLS = list(itertools.product(SETTINGS, MAKERS))


def walk_all(rank: int, world_size: int, steps: int) -> dict[tuple[str, str], tuple[torch.Tensor, Any]]:
    """Return this rank's values of each cell, and on rank 0 what the copies say of all ranks."""
    torch.set_num_threads(1)
    found = {}
    for name, optimizer in CELLS:
        expected = None
        if rank == 0:
            settings, outer = SETTINGS[name]
            expected = delayed_oracle(world_size, optimizer, steps, **settings, outer=outer)
        found[name, optimizer] = by_hook(rank, optimizer, steps, name), expected
    return found

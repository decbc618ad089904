"""Averaged replicas as copies of one model in one process: what the averaging hooks do, without ranks or a network.

The tests hold the hooks to these copies, most of them to the last bit (tests/multiprocess/test_averaging.py). So what
is measured of losses on copies holds for ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn

from tests.harness.oracles import tree_sum


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


def mean_of(values: Sequence[Any]) -> torch.Tensor:
    """Add as the owners of equal parts do; divided before the sum."""
    return tree_sum([value / len(values) for value in values])


class Copies:
    """One copy of the model for each rank, all with the same values.

    ``gradients`` computes those of one copy on its next batch; ``skips``: pairs (rank, number of the step) in which an
    optimizer does nothing, as a GradScaler has it.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        gradients: Callable[[int], None],
        skips: Collection[tuple[int, int]] = (),
    ) -> None:
        self.models, self.optimizers, self.gradients = models, optimizers, gradients
        self.steps, self._skips = 0, skips

    def step(self, *, together: bool = False) -> None:
        """Train one step, each copy on its own gradients, or together on the mean, as plain DDP does."""
        for rank in range(len(self.models)):
            self.gradients(rank)
        if together:
            for of_all in zip(*[model.parameters() for model in self.models], strict=True):
                mean = mean_of([parameter.grad for parameter in of_all])
                for parameter in of_all:
                    parameter.grad.copy_(mean)
        for rank in range(len(self.models)):
            self.update(rank, self.steps)
        self.steps += 1

    def update(self, rank: int, number: int) -> None:
        """Take a copy's step, which is its ``number``-th."""
        if (rank, number) not in self._skips:
            self.optimizers[rank].step()
        self.optimizers[rank].zero_grad()

    @torch.no_grad()
    def snapshots(self) -> list[torch.Tensor]:
        return [flat(model) for model in self.models]

    @torch.no_grad()
    def write(self, values: Sequence[torch.Tensor]) -> None:
        for model, each in zip(self.models, values, strict=True):
            write(model, each)


class DelayedWalk:
    """What `LocalSGDState` walks; ``outer``: rate and Nesterov momentum of the outer optimizer."""

    def __init__(
        self,
        copies: Copies,
        *,
        sync_every: int,
        delay: int = 0,
        fragments: int = 1,
        warmup_steps: int = 0,
        outer: tuple[float, float] | None = None,
    ) -> None:
        self.copies = copies
        self.anchor = copies.snapshots()[0].clone()
        self.velocity = torch.zeros_like(self.anchor)
        self._every, self._delay, self._fragments = sync_every, delay, fragments
        self._warmup, self._outer = warmup_steps, outer
        self._trainable = sum(p.numel() for p in copies.models[0].parameters())
        self._acted = copies.steps
        self._flying: dict[int, tuple[slice, list[torch.Tensor], torch.Tensor]] = {}

    def step(self) -> None:
        local = self.copies.steps - self._warmup
        if local == 0:
            self.anchor = self.copies.snapshots()[0].clone()
        self._exchange()
        self.copies.step(together=local < 0 or self._every == 1)

    def average(self) -> None:
        """Make all copies equal, with what is in flight."""
        self._exchange()
        for fragment in list(self._flying):
            self._land(*self._flying.pop(fragment))
        self.copies.write([mean_of(self.copies.snapshots())] * len(self.copies.models))

    def _exchange(self) -> None:
        """Do what is due after the steps so far."""
        local = self.copies.steps - self._warmup
        if self._acted == self.copies.steps or self._every == 1:
            return
        self._acted = self.copies.steps
        for fragment in range(self._fragments):
            offset = fragment * self._every // self._fragments
            if fragment in self._flying and (local - self._delay - offset) % self._every == 0:
                self._land(*self._flying.pop(fragment))
            if local > 0 and (local - offset) % self._every == 0:
                self._leave(fragment)

    def _leave(self, fragment: int) -> None:
        numel = len(self.anchor)
        place = slice(numel * fragment // self._fragments, numel * (fragment + 1) // self._fragments)
        sent = [values[place] for values in self.copies.snapshots()]
        mean = mean_of(sent)
        if self._outer is not None:
            mean = self._outer_step(place, mean, *self._outer)
        if self._delay:
            self._flying[fragment] = place, sent, mean
            return
        values = self.copies.snapshots()
        for each in values:
            each[place] = mean
        self.copies.write(values)

    def _land(self, place: slice, sent: Sequence[torch.Tensor], mean: torch.Tensor) -> None:
        values = self.copies.snapshots()
        for each, own in zip(values, sent, strict=True):
            each[place] += mean - own
        self.copies.write(values)

    def _outer_step(self, place: slice, mean: torch.Tensor, rate: float, momentum: float) -> torch.Tensor:
        """Nesterov's step of the anchor, see [Note: outer steps]; buffers: the mean."""
        trainable, result = max(0, self._trainable - place.start), mean.clone()
        own, velocity = self.anchor[place][:trainable], self.velocity[place][:trainable]
        delta = own - mean[:trainable]
        velocity.mul_(momentum).add_(delta)
        step = delta.add(velocity, alpha=momentum) if momentum else delta
        result[:trainable] = own.add_(step, alpha=-rate)
        return result


class Spring:
    """The centre of elastic averaging, pulled by several copies at once; ``rate``: α."""

    def __init__(self, start: torch.Tensor, rate: float) -> None:
        self.centre = start.clone()
        self.rate = rate

    def pull(self, values: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Return what each rank that pulls adds to its values; None stands for one that does not."""
        given = [each for each in values if each is not None]
        former = self.centre.clone()
        moved = tree_sum(given).sub(former, alpha=len(given))
        self.centre.add_(moved, alpha=self.rate)
        return [None if each is None else (each - former) * -self.rate for each in values]

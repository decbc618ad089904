"""torch's Muon on owners: the direction of a matrix travels, in bfloat16, and each rank applies it.

[Note: directions in the next forward] The owner of a matrix keeps its momentum and computes its direction in
``step()``. The direction takes two bytes a number, as torch computes it, in the place of the new values. Each rank,
the owner too, applies it when it arrives, with the learning rate, weight decay and ``adjust_lr_fn`` of the moment at
which ``step()`` was called. Both halves are torch's own, see [Note: torch's own arithmetic]. Our design.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Muon, Optimizer

from crossover_ddp._owners.muon import (
    DirectionSettings,
    check_torch,
    direction_numel,
    direction_of,
    direction_view,
    momentum_in,
    put_momentum,
    take_step,
)
from crossover_ddp._owners.partial_optimizer import Group, PartialOptimizer, StepPlan

from .owned_optimizers import OwnedOptimizer, OwnedUpdate


class OwnedMuon(OwnedOptimizer):
    """A ``torch.optim.Muon``, whose directions travel; see `OwnedOptimizer`."""

    def returning_numel(self, numel: int, itemsize: int) -> int:
        """Return how many elements of a buffer a direction takes; the last one may be used in part."""
        return direction_numel(numel, itemsize)

    def piece(self, flat: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        """Return the direction of a matrix, in the order in memory that torch's has."""
        return direction_view(flat, parameter.shape)

    def compute(self, plan: StepPlan, own: Sequence[OwnedUpdate]) -> None:
        """Update the momentum of owned matrices, and put their directions where they travel."""
        for (matrix, gradient), piece, _ in own:
            momentum = self._momentum(matrix, gradient)
            settings = DirectionSettings.of(_group(plan, matrix))
            piece.copy_(direction_of(gradient, momentum, momentum, settings))

    def take_over(self, plan: StepPlan, arrived: Sequence[OwnedUpdate]) -> None:
        """Apply directions, to owned matrices as to others."""
        for update, direction, _ in arrived:
            take_step(update.parameter, direction, _group(plan, update.parameter))

    def _momentum(self, matrix: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        state: dict[str, Any] = self.optimizer.state[matrix]
        momentum = momentum_in(state)
        if momentum is None:
            momentum = torch.zeros_like(gradient, memory_format=torch.preserve_format)
            put_momentum(state, momentum)
        return momentum


def owned_optimizer(optimizer: Optimizer) -> OwnedOptimizer:
    """Return how ``optimizer`` runs on owners: directions travel of torch's Muon itself, and of no class made of it.

    Raises ``UnsupportedConfigurationError`` for a Muon of a torch whose step has other halves.
    """
    if type(optimizer) is not Muon or not PartialOptimizer(optimizer).runs(Muon.step):
        return OwnedOptimizer(optimizer)
    check_torch()
    return OwnedMuon(optimizer)


def _group(plan: StepPlan, matrix: torch.Tensor) -> Group:
    return plan.groups[plan.group_of[id(matrix)]]

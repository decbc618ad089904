"""Optimizers of which each rank runs the part of the parameters that it owns, and what they keep."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.optim import Optimizer

from crossover_ddp._owners.assignment import assign
from crossover_ddp._owners.kept import Kept
from crossover_ddp._owners.partial_optimizer import PartialOptimizer, StepPlan, Update
from crossover_ddp.errors import UnsupportedConfigurationError

from .owner_trial import costs_of
from .shares import view_of


class OwnedUpdate(NamedTuple):
    """An update, and where in the buffer that comes back its owner puts what the other ranks need of it."""

    update: Update
    piece: torch.Tensor
    is_own: bool


class OwnedOptimizer:
    """One optimizer, whose step is taken for some of its parameters.

    Args:
        optimizer: the user's, with its own ``step``.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        modes = [f"{name}()" for name in ("train", "eval") if callable(getattr(optimizer, name, None))]
        if modes:
            raise UnsupportedConfigurationError(
                f"expected an optimizer without modes of its own, got {type(optimizer).__name__} with {modes}, which "
                "need the state of all parameters, of which a rank has its own ones'; use owners=None"
            )
        self.optimizer = optimizer
        self.partial = PartialOptimizer(optimizer)
        self.costs = costs_of(optimizer)
        self.parameters: list[torch.Tensor] = [p for group in optimizer.param_groups for p in group["params"]]

    def returning_numel(self, numel: int, itemsize: int) -> int:
        """Return how many elements of a buffer come back for a parameter: its new values.

        Args:
            numel: of the parameter.
            itemsize: bytes of an element of the buffer.
        """
        return numel

    def piece(self, flat: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        """Return what comes back for a parameter, of the elements ``flat`` that it has in the buffer."""
        return view_of(flat, parameter, 0)

    def compute(self, plan: StepPlan, own: Sequence[OwnedUpdate]) -> None:
        """Update owned parameters as ``plan`` says, and put their new values where they travel."""
        self.partial.apply(plan, [each.update for each in own])
        for update, piece, _ in own:
            piece.copy_(update.parameter)

    def take_over(self, plan: StepPlan, arrived: Sequence[OwnedUpdate]) -> None:
        """Update parameters by what their owners have sent; ``plan``: of the step."""
        others = [each for each in arrived if not each.is_own]
        if others:
            torch._foreach_copy_([each.update.parameter for each in others], [each.piece for each in others])


class OwnedOptimizers:
    """All optimizers of a model; every parameter has an owner, which alone keeps the optimizer's state of it.

    Args:
        each: of the user's optimizers; each has other parameters.
        rank, world_size: of this process.
    """

    def __init__(self, each: Sequence[OwnedOptimizer], rank: int, world_size: int) -> None:
        self.each = each
        self.parameters = [p for owned in self.each for p in owned.parameters]
        costs = [cost for owned in self.each for cost in owned.costs]
        self.owners, self.loads = assign(costs, world_size)
        self.owner_of = {id(p): owner for p, owner in zip(self.parameters, self.owners, strict=True)}
        self.number_of = {id(p): number for number, owned in enumerate(self.each) for p in owned.parameters}
        _check_parameters(self.parameters)
        self.kept = Kept([owned.optimizer for owned in self.each], self.owner_of, rank)

    def of(self, parameter: torch.Tensor) -> OwnedOptimizer:
        """Return the optimizer that has a parameter."""
        return self.each[self.number_of[id(parameter)]]


def _check_parameters(parameters: Sequence[torch.Tensor]) -> None:
    if len({id(parameter) for parameter in parameters}) < len(parameters):
        raise UnsupportedConfigurationError(
            "expected each parameter in one optimizer, got one that is in several; give it to one of them"
        )
    if any(parameter.is_complex() for parameter in parameters):
        raise UnsupportedConfigurationError(
            "expected real parameters for owners='layers', got complex ones; use owners=None"
        )

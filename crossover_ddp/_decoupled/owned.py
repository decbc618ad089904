"""Optimizers of which each rank runs the part of the parameters that it owns: what they keep, send, and cost.

[Note: directions in the next forward] The owner of a matrix keeps its momentum and computes its direction in
``step()``. The direction takes two bytes a number, as torch computes it, in the place of the new values. Each rank,
the owner too, applies it when it arrives, with the learning rate, weight decay and ``adjust_lr_fn`` of the moment at
which ``step()`` was called. Both halves are torch's own, see [Note: torch's own arithmetic]. Our design.

[Note: trial of owners] `check_separable` has compared whole steps with parts, on tiny parameters. An owner's step must
also do without the other ranks: an optimizer with collectives of its own would wait for ever. So it takes two steps on
a stand-in for each different parameter, of its real shape. There collectives are refused. What it keeps afterwards is
what the parameter costs: sides, preconditioners and limits of sizes are the optimizer's own affair. What depends on
the values of gradients, such as clipping that begins at a large norm, does not show here.
"""

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import Muon, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from crossover_ddp._owners.assignment import assign
from crossover_ddp._owners.kept import Kept, tensors_in
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
from crossover_ddp._owners.optimizer import Group, PartialOptimizer, StepPlan, Update, copy_on
from crossover_ddp.errors import UnsupportedConfigurationError

from .pending import view_of

_COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional")
_STEPS = 2


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


def costs_of(optimizer: Optimizer) -> list[int]:
    """Return the bytes that each parameter costs, in the order of the groups; raise if it cannot run on owners alone.

    A parameter costs itself and what the optimizer keeps of it; a frozen one nothing.

    Not collective; takes the time of two steps on one parameter of each shape.
    """
    known: dict[object, int] = {}
    costs = []
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            key = (number, parameter.shape, parameter.stride(), parameter.dtype, parameter.device)
            if not parameter.requires_grad:
                costs.append(0)
                continue
            if key not in known:
                known[key] = _tried_alone(optimizer, group, parameter)
            costs.append(known[key])
    return costs


class _NoCollectives(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace in _COLLECTIVES:
            raise _CollectiveError(str(func))
        return func(*args, **(kwargs or {}))


class _CollectiveError(Exception):
    """An optimizer talks to other ranks."""


def _tried_alone(optimizer: Optimizer, group: dict[str, Any], parameter: torch.Tensor) -> int:
    stand_in = _wave(parameter, 0).requires_grad_()
    tried = copy_on(optimizer, [(group, [stand_in])])
    if optimizer.state.get(parameter):
        tried.state[stand_in] = copy.deepcopy(optimizer.state[parameter])
    partial = PartialOptimizer(tried)
    try:
        with torch.random.fork_rng(), _NoCollectives():  # type: ignore[no-untyped-call]
            for step in range(_STEPS):
                partial.apply(partial.plan(), [Update(stand_in, _wave(parameter, step + 1))])
    except _CollectiveError as error:
        raise UnsupportedConfigurationError(
            f"expected an optimizer that leaves the exchange to the hook, got {type(optimizer).__name__}, whose step() "
            f"calls {error} itself; pass the optimizer that it was made from, for one process"
        ) from None
    except Exception as error:
        raise UnsupportedConfigurationError(
            f"expected an optimizer that works on one parameter alone, got {type(optimizer).__name__}, which failed on "
            f"one of shape {tuple(parameter.shape)} ({type(error).__name__}: {error}); use owners=None, or another hook"
        ) from error
    return parameter.nbytes + sum(each.nbytes for each in tensors_in(tried.state.get(stand_in, {})))


def _wave(like: torch.Tensor, phase: int) -> torch.Tensor:
    """Return numbers between -1 and 1, of the shape, type and order in memory of ``like``."""
    made = torch.empty_like(like, requires_grad=False)
    numbers = torch.arange(like.numel(), dtype=torch.float32, device=like.device)
    return made.copy_(torch.sin(0.7 * numbers + phase).view(like.shape))

"""Optimizers of which each rank runs the part of the parameters that it owns, and what they keep."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from crossover_ddp._engine.endings import let_collectives_go
from crossover_ddp.errors import UnsupportedConfigurationError

from .owner_trial import costs_of
from .owners import assign
from .partial_optimizer import PartialOptimizer, StepPlan, Update
from .shares import view_of
from .state_tensors import described, filled, in_memory, places_in, tensors_in


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
        self._rank = rank
        costs = [cost for owned in self.each for cost in owned.costs]
        self.owners, self.loads = assign(costs, world_size)
        self.owner_of = {id(p): owner for p, owner in zip(self.parameters, self.owners, strict=True)}
        self.number_of = {id(p): number for number, owned in enumerate(self.each) for p in owned.parameters}
        _check_parameters(self.parameters)
        self._is_whole = True
        self.drop_foreign()

    def of(self, parameter: torch.Tensor) -> OwnedOptimizer:
        """Return the optimizer that has a parameter."""
        return self.each[self.number_of[id(parameter)]]

    # --- what they keep ------------------------------------------------------------------------------------

    @property
    def is_whole(self) -> bool:
        """Whether this rank has the state of all parameters that have one."""
        return self._is_whole

    def stepped(self) -> None:
        """Note that owners have updated their state; what was consolidated before is old."""
        self._is_whole = self._is_whole and all(owner == self._rank for owner in self.owners)
        self.drop_foreign()

    def check_foreign(self) -> None:
        """Refuse what somebody else keeps in the optimizers for parameters of other ranks, as a Lookahead does."""
        for parameter, owner in zip(self.parameters, self.owners, strict=True) if not self._is_whole else ():
            if owner != self._rank and (kept := self._state_of(parameter).get(parameter)):
                name = type(self.of(parameter).optimizer).__name__
                raise UnsupportedConfigurationError(
                    f"expected state of this rank's own parameters in {name}, got {sorted(kept)} of one that rank "
                    f"{owner} owns, which differs from rank to rank (a Lookahead around it?); use owners=None"
                )

    def adopt(self) -> None:
        """Keep the owned part of a state that was loaded."""
        self._is_whole = True
        self.drop_foreign()

    def drop_foreign(self) -> None:
        """Take the state of other ranks' parameters out of the optimizers."""
        for parameter, owner in zip(self.parameters, self.owners, strict=True):
            if owner != self._rank and self._state_of(parameter).pop(parameter, None):
                self._is_whole = False

    def check_whole(self) -> None:
        """Refuse to hand out a part of the state."""
        if not self.is_whole:
            raise UnsupportedConfigurationError(
                "expected state.consolidate() on all ranks before optimizer.state_dict() and state.close(), got the "
                "state of this rank's own parameters only; call it after the last step"
            )

    def memory_usage(self) -> dict[str, int]:
        """Return "state": the bytes that the optimizers keep on this rank."""
        kept = [self._state_of(p).get(p, {}) for p in self.parameters]
        return {"state": sum(tensor.nbytes for tensor in tensors_in(kept))}

    @torch.no_grad()
    def consolidate(self, group: dist.ProcessGroup, to: int | None) -> None:
        """Send each parameter's state from its owner to all; rank ``to`` keeps it, or all for None. **Collective**."""
        if group.size() == 1:
            return
        own = {
            number: described(self._state_of(parameter)[parameter])
            for number, parameter in enumerate(self.parameters)
            if self.owners[number] == self._rank and parameter in self._state_of(parameter)
        }
        everyone: list[Any] = [None] * group.size()
        dist.all_gather_object(everyone, own, group=group)
        for owner, owned in enumerate(everyone):
            for number, description in owned.items():
                self._exchange(
                    group, owner, self.parameters[number], description, keep=to in (None, self._rank)
                )
        self._is_whole = self._is_whole or to in (None, self._rank)
        let_collectives_go(group)  # these may be a job's last

    def _exchange(
        self, group: dist.ProcessGroup, owner: int, parameter: torch.Tensor, description: Any, *, keep: bool
    ) -> None:
        states = self._state_of(parameter)
        own = tensors_in(states[parameter]) if owner == self._rank else None
        received = []
        for place in places_in(description):
            there = place.empty(parameter.device)
            if own is not None:
                there.copy_(next(own))
            if there.numel():
                dist.broadcast(in_memory(there), group=group, group_src=owner)
            if own is None and keep:
                received.append(there.cpu() if place.on_cpu else there)
        if own is None and keep:
            states[parameter] = filled(description, iter(received))

    def _state_of(self, parameter: torch.Tensor) -> Any:
        return self.of(parameter).optimizer.state


def _check_parameters(parameters: Sequence[torch.Tensor]) -> None:
    if len({id(parameter) for parameter in parameters}) < len(parameters):
        raise UnsupportedConfigurationError(
            "expected each parameter in one optimizer, got one that is in several; give it to one of them"
        )
    if any(parameter.is_complex() for parameter in parameters):
        raise UnsupportedConfigurationError(
            "expected real parameters for owners='layers', got complex ones; use owners=None"
        )

"""What a parameter costs its owner, and whether an optimizer may run on owners alone.

[Note: trial of owners] `check_separable` has compared whole steps with parts, on tiny parameters. An owner's step must
also do without the other ranks: an optimizer with collectives of its own would wait for ever. So it takes two steps on
a stand-in for each different parameter, of its real shape. There collectives are refused. What it keeps afterwards is
what the parameter costs: sides, preconditioners and limits of sizes are the optimizer's own affair. What depends on
the values of gradients, such as clipping that begins at a large norm, does not show here.
"""

import copy
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from crossover_ddp._owners.kept import tensors_in
from crossover_ddp._owners.partial_optimizer import PartialOptimizer, Update, copy_on
from crossover_ddp.errors import UnsupportedConfigurationError

_COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional")
_STEPS = 2


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

"""Finds out how many bytes each parameter costs its owner, by trying the optimizer.

[Note: trial of owners] `check_separable` has already compared whole steps with partial steps on
tiny parameters. An owner's step must also work without the other ranks: an optimizer that calls
collectives itself would wait forever. So the optimizer takes two steps on a stand-in for each kind
of parameter, in its real shape, while collectives are refused. The state that it then holds shows
what the parameter costs, since only the optimizer knows its preconditioners and size limits. The
trial does not show behaviour that depends on gradient values, such as clipping that begins at a
large norm.
"""

import copy
from typing import Any, Final

import torch
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from crossover_ddp._owners.optimizer import Group, PartialOptimizer, Update, copy_on
from crossover_ddp._owners.owned_state import tensors_in
from crossover_ddp.errors import UnsupportedConfigurationError

_COLLECTIVES: Final = ("c10d", "_c10d_functional", "c10d_functional")
_TRIED_STEPS: Final = 2


def costs_of(optimizer: Optimizer) -> list[int]:
    """Return the cost of each parameter in bytes, in the order of the parameter groups.

    A parameter costs its own size plus that of its optimizer state. A frozen parameter costs
    nothing. Raises ``UnsupportedConfigurationError`` if the optimizer cannot run on owners alone.

    Not collective. It takes as long as two steps on one parameter of each shape.
    """
    modes = [f"{name}()" for name in ("train", "eval") if callable(getattr(optimizer, name, None))]
    if modes:
        raise UnsupportedConfigurationError(
            f"expected an optimizer without modes of its own, got {type(optimizer).__name__} with "
            f"{modes}, which need the state of all parameters, where a rank keeps only its own; "
            "use DecoupledState"
        )
    known: dict[object, int] = {}
    costs = []
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if not parameter.requires_grad:
                costs.append(0)
                continue
            key = (number, parameter.shape, parameter.stride(), parameter.dtype, parameter.device)
            if key not in known:
                known[key] = _tried_alone(optimizer, group, parameter)
            costs.append(known[key])
    return costs


class _NoCollectives(TorchDispatchMode):
    """A mode that refuses an optimizer's calls of collectives."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._name = type(optimizer).__name__

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func.namespace in _COLLECTIVES:
            raise UnsupportedConfigurationError(
                "expected an optimizer that leaves the exchange to the hook, got "
                f"{self._name}, whose step() calls {func} itself; pass the optimizer that it was "
                "made from, for one process"
            )
        return func(*args, **(kwargs or {}))


def _tried_alone(optimizer: Optimizer, group: Group, parameter: torch.Tensor) -> int:
    """Take two steps on a stand-in for ``parameter``, and return its cost in bytes."""
    stand_in = _wave(parameter, 0).requires_grad_()
    tried = copy_on(optimizer, [(group, [stand_in])])
    if optimizer.state.get(parameter):
        tried.state[stand_in] = copy.deepcopy(optimizer.state[parameter])
    partial = PartialOptimizer(tried)
    try:
        with torch.random.fork_rng(), _NoCollectives(optimizer):
            for step in range(_TRIED_STEPS):
                partial.apply(partial.plan(), [Update(stand_in, _wave(parameter, step + 1))])
    except UnsupportedConfigurationError:
        raise
    except Exception as error:
        raise UnsupportedConfigurationError(
            "expected an optimizer that works on one parameter alone, got "
            f"{type(optimizer).__name__}, which failed on one of shape {tuple(parameter.shape)} "
            f"({type(error).__name__}: {error}); use DecoupledState, or another hook"
        ) from error
    return parameter.nbytes + sum(each.nbytes for each in tensors_in(tried.state.get(stand_in, {})))


def _wave(like: torch.Tensor, phase: int) -> torch.Tensor:
    """Return numbers between -1 and 1 with the shape, dtype and memory order of ``like``."""
    made = torch.empty_like(like, requires_grad=False)
    numbers = torch.arange(like.numel(), dtype=torch.float32, device=like.device)
    return made.copy_(torch.sin(0.7 * numbers + phase).view(like.shape))

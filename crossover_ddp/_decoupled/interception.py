"""Our ``step`` and ``zero_grad`` in the place of the optimizer's, and parameters up to date in its groups.

[Note: groups] Code that goes through ``group["params"]`` (GradScaler, clipping, weight clamping, a Lookahead around the
optimizer) reads parameters or gradients. The list in the group reports it; hyper-parameters are read as ever, by
schedulers in every step.
"""

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol, SupportsIndex, overload

import torch
from torch.optim import Optimizer

from crossover_ddp.errors import UnsupportedConfigurationError

from .compiled import uncompiled

_MARK: Final = "_crossover_ddp_decoupled"


class Watcher(Protocol):
    """Who wants to know of the optimizer's users."""

    def on_step(self, closure: Callable[[], Any] | None) -> Any:
        """The user calls ``step``."""

    def on_zero_grad(self) -> None:
        """The user has called ``zero_grad``."""

    def on_look(self) -> None:
        """Somebody is about to go through the optimizer's parameters."""

    def flush(self) -> None:
        """Somebody needs all that is pending."""

    def unwatched(self) -> contextlib.AbstractContextManager[None]:
        """What this thread does meanwhile reads no values."""


class GuardedList(list[torch.Tensor]):
    """The parameters of a group; says when somebody goes through them. Copies of it are plain lists."""

    def __init__(self, parameters: list[torch.Tensor], look: Callable[[], None]) -> None:
        super().__init__(parameters)
        self._look = look

    def __iter__(self) -> Iterator[torch.Tensor]:
        self._look()
        return super().__iter__()

    def __reversed__(self) -> Iterator[torch.Tensor]:
        self._look()
        return super().__reversed__()

    @overload
    def __getitem__(self, index: SupportsIndex) -> torch.Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> list[torch.Tensor]: ...
    def __getitem__(self, index: Any) -> Any:
        self._look()
        return super().__getitem__(index)

    def __add__(self, other: Any) -> Any:
        self._look()
        return super().__add__(other)

    def copy(self) -> list[torch.Tensor]:
        """Make a plain list."""
        return [*self]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return list, ([*self],)


def check_not_intercepted(optimizer: Optimizer) -> None:
    """Refuse an optimizer that has a state already."""
    if getattr(optimizer, _MARK, None) is not None:
        raise UnsupportedConfigurationError(
            "expected an optimizer without a DecoupledState, got one that has another already; "
            "make one optimizer for each model, or close() the other state"
        )


def intercept(optimizer: Optimizer, watcher: Watcher) -> contextlib.ExitStack:
    """Tell ``watcher`` what is done with ``optimizer``; close what is returned to end it."""
    stack = contextlib.ExitStack()
    own = {name: vars(optimizer).get(name) for name in ("step", "zero_grad")}
    original_zero_grad = optimizer.zero_grad
    on_step, on_look = uncompiled(watcher.on_step), uncompiled(watcher.on_look)

    @functools.wraps(optimizer.step)
    def step(self_: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        return on_step(closure)

    @uncompiled
    def zero(set_to_none: bool) -> None:
        if not set_to_none:
            watcher.flush()
        with watcher.unwatched():
            original_zero_grad(set_to_none)
        watcher.on_zero_grad()

    @functools.wraps(optimizer.zero_grad)
    def zero_grad(self_: Optimizer, set_to_none: bool = True) -> None:
        zero(set_to_none)

    # Methods, since learning-rate schedulers wrap ``optimizer.step.__func__``.
    ours = {"step": types.MethodType(step, optimizer), "zero_grad": types.MethodType(zero_grad, optimizer)}
    vars(optimizer).update(ours)
    setattr(optimizer, _MARK, True)
    stack.callback(_restore, optimizer, ours, own)
    guard_groups(optimizer, on_look)
    for register in (optimizer.register_state_dict_pre_hook, optimizer.register_load_state_dict_pre_hook):
        stack.callback(register(lambda *_: watcher.flush()).remove)
    return stack


def guard_groups(optimizer: Optimizer, look: Callable[[], None]) -> None:
    """Guard the lists of parameters in all groups; there may be new groups."""
    for group in optimizer.param_groups:
        if type(group["params"]) is not GuardedList:
            group["params"] = GuardedList(group["params"], look)


def _restore(optimizer: Optimizer, ours: dict[str, Any], own: dict[str, Any]) -> None:
    for group in optimizer.param_groups:
        if type(group["params"]) is GuardedList:
            group["params"] = [*list.__iter__(group["params"])]
    for name, value in own.items():
        # A scheduler may have wrapped ours meanwhile; ours hands everything on by now.
        if vars(optimizer).get(name) is not ours[name]:
            continue
        if value is None:
            vars(optimizer).pop(name, None)
        else:
            vars(optimizer)[name] = value
    vars(optimizer).pop(_MARK, None)

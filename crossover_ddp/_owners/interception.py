"""Our ``step`` and ``zero_grad`` in the place of the optimizer's, and parameters up to date in its groups.

[Note: groups] Code that goes through ``group["params"]`` (GradScaler, clipping, weight clamping, a Lookahead around the
optimizer) reads parameters or gradients. The list in the group reports it; hyper-parameters are read as ever, by
schedulers in every step.
"""

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any, Final, SupportsIndex, overload

import torch
from torch.optim import Optimizer

from crossover_ddp._ddp.compiled import uncompiled
from crossover_ddp.errors import UnsupportedConfigurationError

_MARK: Final = "_crossover_ddp_state"


class GuardedList(list[torch.Tensor]):
    """The parameters of a group; says when somebody goes through them. Copies of it are plain lists."""

    def __init__(self, parameters: list[torch.Tensor], look: Callable[[], None]) -> None:
        super().__init__(parameters)
        self._look = uncompiled(look)

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
            "expected an optimizer without a DecoupledState or MuonState, got one that has another already; make one "
            "optimizer for each model, or close() the other state"
        )


def _nothing() -> None:
    pass


def intercept(
    optimizer: Optimizer,
    *,
    on_step: Callable[[Callable[[], Any]], Any],
    on_zero_grad: Callable[[], None],
    on_look: Callable[[], None] | None = None,
    flush: Callable[[], None] = _nothing,
    unwatched: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> contextlib.ExitStack:
    """Have ours called in the place of the optimizer's own methods; close what is returned to end it.

    Args:
        optimizer: without a state of ours.
        on_step: called in the place of ``step`` with the original one, after a closure.
        on_zero_grad: called after ``zero_grad``.
        on_look: called before somebody goes through the parameters in the groups.
        flush: called before somebody needs everything up to date.
        unwatched: entered where this thread goes through parameters without reading values.
    """
    stack = contextlib.ExitStack()
    own = {name: vars(optimizer).get(name) for name in ("step", "zero_grad")}
    original_step, original_zero_grad = optimizer.step, optimizer.zero_grad

    @uncompiled
    def stepped(closure: Callable[[], Any] | None) -> Any:
        if closure is None:
            return on_step(original_step)
        with torch.enable_grad():  # as torch's optimizers do: once, before they look at gradients
            loss = closure()
        on_step(original_step)
        return loss

    @functools.wraps(original_step)
    def step(self_: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        return stepped(closure)

    @uncompiled
    def zero(set_to_none: bool) -> None:
        if not set_to_none:
            flush()
        with unwatched():
            original_zero_grad(set_to_none)
        on_zero_grad()

    @functools.wraps(original_zero_grad)
    def zero_grad(self_: Optimizer, set_to_none: bool = True) -> None:
        zero(set_to_none)

    # Methods, since learning-rate schedulers wrap ``optimizer.step.__func__``.
    ours = {"step": types.MethodType(step, optimizer), "zero_grad": types.MethodType(zero_grad, optimizer)}
    vars(optimizer).update(ours)
    setattr(optimizer, _MARK, True)
    stack.callback(_restore, optimizer, ours, own)
    if on_look is not None:
        guard_groups(optimizer, on_look)
    for register in (optimizer.register_state_dict_pre_hook, optimizer.register_load_state_dict_pre_hook):
        stack.callback(register(lambda *_: flush()).remove)
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

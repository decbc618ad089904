"""Where torch.compile has taken over: which modules of a network, and whether a call comes out of compiled code.

[Note: compiled code and guards] Dynamo traces Python hooks and dictionaries and compiles anew when what they look
at has changed. So nothing of ours may be in sight while compiled code runs: what it reads is brought up to date, and
the guards are taken away, before it is entered, from outside of the graph. All functions of ours that may be called
from traced code are disabled for dynamo.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any, TypeVar, cast

import torch
from torch import nn

Function = TypeVar("Function", bound=Callable[..., Any])


def uncompiled(function: Function) -> Function:
    """Keep dynamo out of ``function``."""
    return cast(Function, torch.compiler.disable(function))


def called_by_compiled_code() -> bool:
    """Tell whether some caller was called by torch.compile, so that what the caller calls next may be compiled."""
    # Code that keeps dynamo out, as ours does, is in dynamo's modules too.
    disabling = _code_that_disables()
    frame = sys._getframe(1)
    while (caller := frame.f_back) is not None:
        frame = caller
        if frame.f_globals.get("__name__", "").startswith("torch._dynamo.") and frame.f_code is not disabling:
            return True
    return False


@functools.cache
def _code_that_disables() -> CodeType:
    return uncompiled(_code_of_caller)()


def _code_of_caller() -> CodeType:
    return sys._getframe(1).f_code


def compiled_modules(network: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost modules of ``network`` that run compiled code or a CUDA graph when they are called."""
    seen: set[nn.Module] = set()
    waiting = [network]
    while waiting:
        module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        if is_compiled(module):
            yield module
        else:
            waiting.extend(reversed([*module.children()]))


def is_compiled(module: nn.Module) -> bool:
    """Tell whether ``module``, as a whole, is replaced by compiled code or a CUDA graph, which asks nothing of it."""
    return (
        isinstance(module, torch._dynamo.OptimizedModule)
        or compiled_call(module) is not None
        or hasattr(getattr(module, "forward", None), "_torchdynamo_orig_callable")
        or getattr(vars(module).get("forward"), "__module__", None) == "torch.cuda.graphs"
    )


def compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """Return what ``module.compile()`` has made."""
    return cast(Callable[..., Any] | None, vars(module).get("_compiled_call_impl"))


class OwnHook(functools.partial[None]):
    """A hook of a module, for this module only: a copy gets one that does nothing. No Python of ours calls it."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return OwnHook, (_nothing,)


def _nothing(*_: Any) -> None:
    return None

"""Keeps dynamo out of functions of this package, and makes module hooks that it need not trace."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def uncompiled(function: Function) -> Function:
    """Keep dynamo out of ``function``."""
    return cast(Function, torch.compiler.disable(function))


class OwnHook(functools.partial[None]):
    """A hook of one module, which a copy of the module does not get: the copy's hook does nothing.

    A partial, so that calling the hook runs no Python code of this package.
    """

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return OwnHook, (_nothing,)


def _nothing(*_: Any) -> None:
    return None

"""Keeps dynamo out of functions of this package, and has module hooks that it need not trace."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def uncompiled(function: Function) -> Function:
    """Return ``function`` in a form that dynamo does not trace."""
    return cast(Function, torch.compiler.disable(function))


class OwnHook(functools.partial[None]):
    """A module hook that does nothing in a copy of the module.

    It is a partial, so that calling the hook itself runs no Python code of this package.
    """

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return OwnHook, (_nothing,)


def _nothing(*_: Any) -> None:
    return None

"""What dynamo must not trace: functions of ours that it is kept out of, and hooks without Python of ours."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def uncompiled(function: Function) -> Function:
    """Keep dynamo out of ``function``."""
    return cast(Function, torch.compiler.disable(function))


class OwnHook(functools.partial[None]):
    """A hook of a module, for this module only: a copy gets one that does nothing. No Python of ours calls it."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return OwnHook, (_nothing,)


def _nothing(*_: Any) -> None:
    return None

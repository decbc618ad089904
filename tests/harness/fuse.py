"""An exception in the middle of a backward pass."""

from typing import Any, cast

import torch


class _Fuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("blown")


def blow(x: torch.Tensor) -> torch.Tensor:
    """Return a copy of ``x``; its backward raises ``ArithmeticError("blown")``."""
    return cast(torch.Tensor, _Fuse.apply(x))

"""The small network of most tests, and an exception in the middle of its backward pass."""

import itertools
from typing import Any, cast

import torch
from torch import nn


def mlp(*widths: int, seed: int, tanh_last: bool = False, **options: Any) -> nn.Sequential:
    """Return linear layers of these widths, the same on all ranks.

    Args:
        widths: of the inputs, then of each layer.
        seed: of its weights.
        tanh_last: tanh also behind the last layer.
        options: of ``nn.Linear``.
    """
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs, **options), nn.Tanh()]
    return nn.Sequential(*(layers if tanh_last else layers[:-1]))


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

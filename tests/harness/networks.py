"""Small networks for tests, and an exception in the middle of a backward pass."""

import itertools
from typing import Any

import torch
from torch import nn


def mlp(*widths: int, seed: int, tanh_last: bool = False, **options: Any) -> nn.Sequential:
    """Return linear layers with tanh in between, the same on all ranks.

    Args:
        widths: the width of the input, then those of the layers' outputs.
        seed: of the initial weights.
        tanh_last: whether a tanh follows the last layer.
        options: passed to ``nn.Linear``.
    """
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs, **options), nn.Tanh()]
    return nn.Sequential(*(layers if tanh_last else layers[:-1]))


class Branches(nn.Module):
    """Alternates between two layers from forward to forward. A third layer follows both."""

    def __init__(self, place: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.head = nn.Linear(6, 1)
        self.place = place  # an odd number chooses the second branch for the next forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.place += 1
        return self.head(self.branches[(self.place - 1) % 2](x))  # type: ignore[no-any-return]


def blow(x: torch.Tensor) -> torch.Tensor:
    """Return a copy of ``x``; its backward raises ``ArithmeticError("blown")``."""

    def raises(gradient: torch.Tensor) -> None:
        raise ArithmeticError("blown")

    copy = x.clone()
    copy.register_hook(raises)
    return copy

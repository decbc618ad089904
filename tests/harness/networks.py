"""The small network of most tests: linear layers with tanh between them."""

import itertools
from typing import Any

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

"""What a KFACState sets up once: the layers, what they cost, and the arguments that do not change."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist
from torch import nn

from .columns import WeightSharing
from .layers import Layer
from .placement import LayerCost
from .settings import Hypers


@dataclass(frozen=True)
class KFACSetup:
    """The same on all ranks, but ``rank``.

    Args:
        model: weakly, since DDP holds the state where no collector sees it.
        layers: of the model.
        costs: of the layers, in the same order.
        inverse_steps: how often solvers are made at the beginning.
        hypers: see ``KFACState``.
        rank, world_size: of this process.
        process_group: the ranks of the job, None for the default group.
        solver, pi, sharing, accumulated: see ``KFACState``.
        local: whether factors do not travel.
        keeps_turn: whether making solvers is compute inside the job's turn.
        loss_scale: of this moment.
    """

    model: weakref.ref[nn.Module]
    layers: Sequence[Layer]
    costs: Sequence[LayerCost]
    inverse_steps: int
    hypers: Hypers
    rank: int
    world_size: int
    process_group: dist.ProcessGroup | None
    solver: Literal["inverse", "eigen"]
    pi: bool
    sharing: WeightSharing
    accumulated: Literal["mean", "sum"]
    local: bool
    keeps_turn: bool
    loss_scale: Callable[[], float]

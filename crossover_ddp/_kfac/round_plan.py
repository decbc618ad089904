"""What all ranks do in one step of K-FAC, and one layer of it in a bucket."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from .columns import LayerShape
from .spread import SpreadSolver


@dataclass(frozen=True)
class RoundPlan:
    """What all ranks do in one step; made of the step's number and the hyper-parameters of that moment.

    Args:
        rank, world_size: of this process.
        owners: of each layer.
        damping, decay, kl_clip: see ``KFACState``; kl_clip None scales nothing.
        scale: of the loss in this backward pass, undone in the KL clip.
        takes_factors: whether the running factors are updated by what arrives in this step.
        late_groups: in how many groups they follow at most, see [Note: late factors] in ``factor_traffic``; 0: they
            do not.
        inverts: whether new solvers are made.
        keeps_turn: whether making solvers is compute inside the job's turn.
        solver: which kind, as in ``KFACState``.
    """

    rank: int
    world_size: int
    owners: tuple[int, ...]
    damping: float
    decay: float
    kl_clip: float | None
    scale: float = 1.0
    takes_factors: bool = True
    late_groups: int = 0
    inverts: bool = True
    keeps_turn: bool = False
    solver: Literal["inverse", "eigen"] = "inverse"


@dataclass(eq=False)
class BucketLayer:
    """One complete layer in a payload: its gradients in DDP's buckets.

    ``lr``, ``bias_lr``: of its weight and its bias. ``local``: this rank's A and G, if it takes its own. ``spread``:
    its solver, if all ranks have it and the layer is spread in this step. ``sends_solver``: whether its owner sends it
    to all ranks in this step.
    """

    index: int
    shape: LayerShape
    weight: Tensor
    bias: Tensor | None
    lr: float
    bias_lr: float
    local: tuple[Tensor, Tensor] | None = None
    spread: SpreadSolver | None = None
    sends_solver: bool = False

    @property
    def gradient_numel(self) -> int:
        """Elements of weight and bias."""
        return self.weight.numel() + (0 if self.bias is None else self.bias.numel())

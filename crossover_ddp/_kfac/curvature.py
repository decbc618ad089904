"""What the owner of a layer keeps of it: the running factors, and the solver made of them.

Only the owner has them, so that their memory, and the work of making solvers, is divided by the number of ranks.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import Tensor

from .factors import BatchFactor, is_finite, multiplied, update_running
from .layers import Layer, LayerShape
from .placement import LayerCost
from .spread import SpreadSolver

_PI_RANGE: Final = (1e-8, 1e8)
_RETRIES: Final = 8


class Solver:
    """What turns a layer's gradient into its K-FAC step, made of its two factors.

    Attributes:
        strained: how many times a factor (of one group) had to be damped further than asked; 0 after a checkpoint.
    """

    strained: int

    @classmethod
    def compute(cls, a: Tensor, g: Tensor, damping: float, *, pi: bool) -> "Solver":
        """Prepare to precondition, by finite factors.

        The factors are left as they are, [groups, a, a] and [groups, g, g]; of them only the lower triangle may be
        read. ``pi`` divides the damping between them by their size. One that cannot be solved is damped tenfold, again
        and again, at last taken for its diagonal; see `strained`.
        """
        raise NotImplementedError

    def precondition(self, matrix: Tensor) -> Tensor:
        """Return V for the gradients [groups, g, a], in the factors' dtype; not in place."""
        raise NotImplementedError

    def tensors(self) -> dict[str, Tensor]:
        """Return what a checkpoint has to hold, and makes the solver again; the tensors themselves, not copies."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}


@dataclass(frozen=True)
class DampedInverse(Solver):
    """V = (G + √γ/π I)⁻¹ ∇ (A + √γ π I)⁻¹ by Cholesky.

    π = √((tr A / a) / (tr G / g)) per group, 1 where a trace is zero (Martens and Grosse, section 6.3), or 1.
    """

    a_inverse: Tensor
    g_inverse: Tensor
    strained: int = 0

    @classmethod
    def compute(cls, a: Tensor, g: Tensor, damping: float, *, pi: bool) -> "DampedInverse":
        balance = _balance(a, g) if pi else a.new_ones(a.shape[0], dtype=torch.float64)
        root = math.sqrt(damping)
        (a_inverse,), a_strained = _solved(a, root * balance, _inverse)
        (g_inverse,), g_strained = _solved(g, root / balance, _inverse)
        return cls(a_inverse, g_inverse, a_strained + g_strained)

    def precondition(self, matrix: Tensor) -> Tensor:
        return self.g_inverse @ (matrix.to(self.a_inverse.dtype) @ self.a_inverse)


@dataclass(frozen=True)
class Eigenbasis(Solver):
    """V = Q_G [(Q_Gᵀ ∇ Q_A) / (d_G d_Aᵀ + γ)] Q_Aᵀ, with negative eigenvalues taken for zero.

    Damps the whole Fisher block exactly (George et al., arXiv 1806.03884), so there is nothing to divide between
    the factors: ``pi`` has no effect.
    """

    a_values: Tensor
    a_vectors: Tensor
    g_values: Tensor
    g_vectors: Tensor
    damping: Tensor
    strained: int = 0

    @classmethod
    def compute(cls, a: Tensor, g: Tensor, damping: float, *, pi: bool) -> "Eigenbasis":
        none = a.new_zeros(a.shape[0], dtype=torch.float64)
        (a_values, a_vectors), a_strained = _solved(a, none, _eigen)
        (g_values, g_vectors), g_strained = _solved(g, none, _eigen)
        gamma = a.new_full((), max(damping, torch.finfo(a.dtype).tiny))
        return cls(a_values, a_vectors, g_values, g_vectors, gamma, a_strained + g_strained)

    def precondition(self, matrix: Tensor) -> Tensor:
        """Divide by the damped eigenvalues in the basis where the Fisher block is diagonal."""
        rotated = self.g_vectors.mT @ (matrix.to(self.a_vectors.dtype) @ self.a_vectors)
        rotated /= self.g_values.unsqueeze(-1) * self.a_values.unsqueeze(-2) + self.damping
        return self.g_vectors @ (rotated @ self.a_vectors.mT)


SOLVERS: Final[dict[str, type[Solver]]] = {"inverse": DampedInverse, "eigen": Eigenbasis}


@dataclass(eq=False)
class Curvature:
    """The second-order state of one layer on its owner.

    Args:
        kind: how the factors are inverted.
        pi: whether the damping is shared out between both factors by their traces.
        start: whether the running mean begins with the first batch or with the identity.

    Attributes:
        solver: what preconditions; None before the first.
        strained: how many times a factor had to be damped further before it could be inverted.
    """

    shape: LayerShape
    kind: type[Solver]
    pi: bool
    start: Literal["batch", "identity"]
    solver: Solver | None = None
    strained: int = 0
    _a: Tensor | None = None
    _g: Tensor | None = None
    _spread: SpreadSolver | None = None
    _dropped: Tensor | int = 0

    @property
    def dropped(self) -> int:
        """How many batches had factors that were not finite, or none at all; they changed nothing."""
        return int(self._dropped)

    def add(self, a: BatchFactor, g: BatchFactor, decay: float) -> None:
        """Take the factors of one batch into the running means, unless one of them is not finite."""
        usable = is_finite(a) & is_finite(g)
        self._dropped = self._dropped + ~usable
        if self._a is None or self._g is None or not usable.is_cuda:
            if not bool(usable):
                return
        else:
            # The host must not wait for the device: the old mean is its own mean with itself.
            a = torch.where(usable, multiplied(a), self._a)
            g = torch.where(usable, multiplied(g), self._g)
        self._a = update_running(self._a, a, decay, start=self.start)
        self._g = update_running(self._g, g, decay, start=self.start)

    def invert(self, damping: float) -> None:
        """Make a new solver of the running factors; the former one serves on without any, or if they are not finite."""
        if self._a is None or self._g is None or not is_finite(self._a) & is_finite(self._g):
            return
        self.solver, self._spread = self.kind.compute(self._a, self._g, damping, pi=self.pi), None
        self.strained += self.solver.strained

    def spread(self, root: Tensor | None = None) -> SpreadSolver | None:
        """Return the solver as all ranks get it if the layer is spread; None if there is none yet, or another kind."""
        if self._spread is None and isinstance(self.solver, DampedInverse):
            self._spread = SpreadSolver.of(
                self.solver.a_inverse, self.solver.g_inverse, self.shape, root
            )
        return self._spread

    def factor_bytes(self) -> int:
        return sum(factor.nbytes for factor in (self._a, self._g) if factor is not None)

    def solver_bytes(self) -> int:
        tensors = [] if self.solver is None else list(self.solver.tensors().values())
        if self._spread is not None:
            tensors.append(self._spread.root)
        return sum(tensor.nbytes for tensor in tensors)

    def state_dict(self) -> dict[str, Any]:
        """Return all tensors on the host, and the counts."""
        tensors = {} if self.solver is None else self.solver.tensors()
        return {
            "a": None if self._a is None else self._a.cpu(),
            "g": None if self._g is None else self._g.cpu(),
            "solver": {name: tensor.cpu() for name, tensor in tensors.items()} or None,
            "root": None if self._spread is None else self._spread.root.cpu(),
            "strained": self.strained,
            "dropped": self.dropped,
        }

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Take back what :meth:`state_dict` gave."""
        factors = state["a"], state["g"]
        self._a, self._g = (
            None if factor is None else factor.to(device, copy=True) for factor in factors
        )
        self.solver, self._spread = None, None
        if state["solver"] is not None:
            kind: type[Any] = self.kind
            self.solver = kind(
                **{name: each.to(device, copy=True) for name, each in state["solver"].items()}
            )
            if (
                root := state.get("root")
            ) is not None:  # as all ranks had it, if the layer was spread
                self.spread(root.to(device, copy=True))
        self.strained, self._dropped = state["strained"], state["dropped"]


@dataclass(eq=False)
class OwnedLayer:
    """A layer, and what this rank has of it.

    Args:
        index: in the order of layers.
        curvature: if this rank is the owner.
        solver: of a spread layer, which all ranks have; None before the first, and after factors that were no numbers.
    """

    index: int
    layer: Layer
    cost: LayerCost
    owner: int
    curvature: Curvature | None
    solver: SpreadSolver | None = None


def _mean_diagonal(factor: Tensor) -> Tensor:
    # float64: the trace of a large, finite factor may not fit into its own dtype.
    return factor.diagonal(dim1=-2, dim2=-1).double().mean(-1)


def _balance(a: Tensor, g: Tensor) -> Tensor:
    """Return π of each group, [groups]."""
    of_a, of_g = _mean_diagonal(a), _mean_diagonal(g)
    pi = (of_a / of_g).sqrt().clamp(*_PI_RANGE)
    return torch.where((of_a > 0) & (of_g > 0), pi, 1.0)


Solved = tuple[Tensor, ...]


def _solved(
    factor: Tensor, damping: Tensor, attempt: Callable[[Tensor], Solved]
) -> tuple[Solved, int]:
    """Let ``attempt`` solve factor + damping; damp the groups for which it gives something not finite further.

    At last their diagonals alone are solved. Returns what was returned, [groups, ...] each, and how many times a group
    was damped further.
    """
    solved, strained = attempt(_plus_identity(factor, damping)), 0
    failed = _failed(solved)
    # Below this, damping is lost in the rounding of the factor.
    rounding = torch.finfo(factor.dtype).eps * _mean_diagonal(factor).clamp(
        min=torch.finfo(factor.dtype).tiny
    )
    for retry in range(_RETRIES + 1):
        if not bool(failed.any()):
            break
        strained += int(failed.sum())
        damping = torch.where(failed, torch.maximum(10 * damping, rounding), damping)
        stronger = _plus_identity(factor[failed], damping[failed])
        again = attempt(
            stronger if retry < _RETRIES else torch.diag_embed(_positive_diagonal(stronger))
        )
        for whole, part in zip(solved, again, strict=True):
            whole[failed] = part
        failed = _failed(solved)
    return solved, strained


def _failed(solved: Solved) -> Tensor:
    return ~torch.stack([part.flatten(1).isfinite().all(1) for part in solved]).all(0)


def _plus_identity(factor: Tensor, amount: Tensor) -> Tensor:
    damped = factor.clone()
    damped.diagonal(dim1=-2, dim2=-1).add_(amount.to(factor.dtype).unsqueeze(-1))
    return damped


def _inverse(factor: Tensor) -> Solved:
    triangle, info = torch.linalg.cholesky_ex(factor)
    # Half a triangle, or one with a zero on its diagonal, would make the inversion of all groups raise.
    triangle[(info != 0) | (triangle.diagonal(dim1=-2, dim2=-1) == 0).any(-1)] = math.nan
    return (torch.cholesky_inverse(triangle),)


def _eigen(factor: Tensor) -> Solved:
    try:
        values, vectors = torch.linalg.eigh(factor)
    except torch.linalg.LinAlgError:
        # One group is enough to fail all: find out which.
        if factor.shape[0] > 1:
            each = [_eigen(group) for group in factor.split(1)]
            return tuple([torch.cat(parts) for parts in zip(*each, strict=True)])
        return factor.new_full(factor.shape[:-1], math.nan), factor.new_full(factor.shape, math.nan)
    return values.clamp_(min=0), vectors


def _positive_diagonal(factor: Tensor) -> Tensor:
    # Neither this nor its inverse overflows.
    limits = torch.finfo(factor.dtype)
    return factor.diagonal(dim1=-2, dim2=-1).clamp(limits.tiny * 4, limits.max / 4)

"""A layer's state on its owner: the running factors, and the solver computed from them.

Only the owner has this state. So its memory and the work of computing solvers are divided among the
ranks.
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
# How often a factor that cannot be solved is damped further, before its diagonal alone is solved.
_RETRIES: Final = 8


class Solver:
    """Turns a layer's gradient into its K-FAC direction. A solver is computed from both factors."""

    # How many times a factor (of one group) needed more damping than asked for. 0 if the solver
    # comes from a checkpoint.
    strained: int

    @classmethod
    def compute(cls, a: Tensor, g: Tensor, damping: float, *, pi: bool) -> "Solver":
        """Compute a solver from finite factors, [groups, a, a] and [groups, g, g].

        The factors are not changed. Only their lower triangles may be read. With ``pi``, the
        damping is divided between the two factors according to their size. If a factor cannot be
        solved, its damping is increased tenfold, several times if necessary. If that does not help,
        the factor is replaced by its diagonal. `strained` counts these attempts.
        """
        raise NotImplementedError

    def precondition(self, matrix: Tensor) -> Tensor:
        """Return the direction V for the gradients ``matrix``, which are not changed.

        The gradients have the shape [groups, g, a]. The direction has the factors' dtype.
        """
        raise NotImplementedError

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors to store in a checkpoint, by the names of constructor arguments.

        The tensors are not copied.
        """
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}


@dataclass(frozen=True)
class DampedInverse(Solver):
    """Computes V = (G + √γ/π I)⁻¹ ∇ (A + √γ π I)⁻¹ by Cholesky decomposition.

    With ``pi``, each group has π = √((tr A / a) / (tr G / g)), or 1 if a trace is zero (Martens and
    Grosse, section 6.3). Otherwise π is 1.
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
    """Computes V = Q_G [(Q_Gᵀ ∇ Q_A) / (d_G d_Aᵀ + γ)] Q_Aᵀ. Negative eigenvalues count as zero.

    The damping applies to the whole Fisher block (George et al., arXiv 1806.03884). It is not
    divided between the factors, so ``pi`` has no effect.
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
    """The second-order state of one layer on its owner."""

    shape: LayerShape
    # The class of solver, which determines how the factors are inverted.
    kind: type[Solver]
    # Whether the damping is divided between both factors according to their traces.
    pi: bool
    # Whether the running means begin with the first batch or with the identity.
    start: Literal["batch", "identity"]
    # None before the first solver has been computed.
    solver: Solver | None = None
    # How many times a factor needed more damping before it could be inverted.
    strained: int = 0
    # The running factors. None before the first finite batch.
    _a: Tensor | None = None
    _g: Tensor | None = None
    # The solver in the form that all ranks receive. None if it is not needed, or not computed yet.
    _spread: SpreadSolver | None = None
    # A tensor if the factors are on a device, so that the host need not wait for it.
    _dropped: Tensor | int = 0

    @property
    def dropped(self) -> int:
        """The number of batches that were ignored because a factor was missing or not finite."""
        return int(self._dropped)

    def add(self, a: BatchFactor, g: BatchFactor, decay: float) -> None:
        """Add one batch's factors to the running means, unless one of them is not finite."""
        usable = is_finite(a) & is_finite(g)
        self._dropped = self._dropped + ~usable
        if self._a is None or self._g is None or not usable.is_cuda:
            if not bool(usable):
                return
        else:
            # The host must not wait for the device. So an unusable batch is replaced by the old
            # mean, and adding the old mean to itself changes nothing.
            a = torch.where(usable, multiplied(a), self._a)
            g = torch.where(usable, multiplied(g), self._g)
        self._a = update_running(self._a, a, decay, start=self.start)
        self._g = update_running(self._g, g, decay, start=self.start)

    def invert(self, damping: float) -> None:
        """Compute a new solver from the running factors.

        If there are no factors, or if they are not finite, the previous solver stays.
        """
        if self._a is None or self._g is None or not is_finite(self._a) & is_finite(self._g):
            return
        self.solver = self.kind.compute(self._a, self._g, damping, pi=self.pi)
        self._spread = None
        self.strained += self.solver.strained

    def spread(self, root: Tensor | None = None) -> SpreadSolver | None:
        """Return the solver in the form that all ranks receive if the layer is spread.

        Return None if there is no solver yet, or if it is not a `DampedInverse`. ``root`` is the
        root of the smaller inverse from a checkpoint. If it is None, the root is computed.
        """
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
        """Return the factors, the solver's tensors and the counts. All tensors are on the host."""
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
        """Restore the result of `state_dict`."""
        self._a = None if state["a"] is None else state["a"].to(device, copy=True)
        self._g = None if state["g"] is None else state["g"].to(device, copy=True)
        self.solver = None
        self._spread = None
        if state["solver"] is not None:
            kind: type[Any] = self.kind
            tensors = state["solver"].items()
            self.solver = kind(**{name: each.to(device, copy=True) for name, each in tensors})
            # If the layer was spread, use the root that all ranks had: a new one might be rounded
            # differently.
            root = state.get("root")
            if root is not None:
                self.spread(root.to(device, copy=True))
        self.strained = state["strained"]
        self._dropped = state["dropped"]


@dataclass(eq=False)
class OwnedLayer:
    """A layer that K-FAC treats, and this rank's part of it."""

    # The layer's position in the list of layers that K-FAC treats.
    index: int
    layer: Layer
    cost: LayerCost
    owner: int
    # None unless this rank is the owner.
    curvature: Curvature | None
    # All ranks have it if the layer is spread. None while the owner has no solver to send.
    solver: SpreadSolver | None = None


def _mean_diagonal(factor: Tensor) -> Tensor:
    # In float64: the trace of a large, finite factor may overflow its own dtype.
    return factor.diagonal(dim1=-2, dim2=-1).double().mean(-1)


def _balance(a: Tensor, g: Tensor) -> Tensor:
    """Return π for each group, [groups]."""
    of_a = _mean_diagonal(a)
    of_g = _mean_diagonal(g)
    pi = (of_a / of_g).sqrt().clamp(*_PI_RANGE)
    return torch.where((of_a > 0) & (of_g > 0), pi, 1.0)


Solved = tuple[Tensor, ...]
"""The inverse, or the eigenvalues and the eigenvectors, of each group. Each is [groups, ...]."""


def _solved(
    factor: Tensor, damping: Tensor, attempt: Callable[[Tensor], Solved]
) -> tuple[Solved, int]:
    """Call ``attempt`` with factor + damping · I, and increase the damping of groups that fail.

    A group has failed if its result is not finite. If it still fails after all retries, only its
    diagonal is solved.

    Returns:
        The result of ``attempt``, and how many times the damping of a group was increased.
    """
    solved = attempt(_plus_identity(factor, damping))
    strained = 0
    failed = _failed(solved)
    # Damping below this limit is lost when the factor is rounded.
    limits = torch.finfo(factor.dtype)
    rounding = limits.eps * _mean_diagonal(factor).clamp(min=limits.tiny)
    for retry in range(_RETRIES + 1):
        if not bool(failed.any()):
            break
        strained += int(failed.sum())
        damping = torch.where(failed, torch.maximum(10 * damping, rounding), damping)
        stronger = _plus_identity(factor[failed], damping[failed])
        if retry == _RETRIES:
            stronger = torch.diag_embed(_positive_diagonal(stronger))
        again = attempt(stronger)
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
    # If a triangle is incomplete or has a zero on its diagonal, the inversion of all groups would
    # raise.
    triangle[(info != 0) | (triangle.diagonal(dim1=-2, dim2=-1) == 0).any(-1)] = math.nan
    return (torch.cholesky_inverse(triangle),)


def _eigen(factor: Tensor) -> Solved:
    try:
        values, vectors = torch.linalg.eigh(factor)
    except torch.linalg.LinAlgError:
        # A single group can make the whole call fail: solve the groups one by one to find it.
        if factor.shape[0] > 1:
            each = [_eigen(group) for group in factor.split(1)]
            return tuple([torch.cat(parts) for parts in zip(*each, strict=True)])
        return factor.new_full(factor.shape[:-1], math.nan), factor.new_full(factor.shape, math.nan)
    return values.clamp_(min=0), vectors


def _positive_diagonal(factor: Tensor) -> Tensor:
    # Clamped so that neither the diagonal nor its inverse overflows.
    limits = torch.finfo(factor.dtype)
    return factor.diagonal(dim1=-2, dim2=-1).clamp(limits.tiny * 4, limits.max / 4)

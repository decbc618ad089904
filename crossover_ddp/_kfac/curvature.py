"""The state of a layer on its owner: the running factors, and the solver made of them.

Only the owner has them. So their memory, and the work of making solvers, is divided among the
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
    """Turns a layer's gradient into its K-FAC direction. Made of the layer's two factors."""

    # How many times a factor (of one group) had to be damped further than asked. 0 after a
    # checkpoint.
    strained: int

    @classmethod
    def compute(cls, a: Tensor, g: Tensor, damping: float, *, pi: bool) -> "Solver":
        """Make a solver of finite factors, [groups, a, a] and [groups, g, g].

        The factors are not changed. Only their lower triangles may be read. ``pi`` divides the
        damping between them by their size. A factor that cannot be solved is damped ten times more,
        several times, and finally replaced by its diagonal; see `strained`.
        """
        raise NotImplementedError

    def precondition(self, matrix: Tensor) -> Tensor:
        """Return V for the gradients [groups, g, a], in the factors' dtype. Not in place."""
        raise NotImplementedError

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint holds, by argument of the class. Not copies."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}


@dataclass(frozen=True)
class DampedInverse(Solver):
    """V = (G + √γ/π I)⁻¹ ∇ (A + √γ π I)⁻¹ by Cholesky.

    π = √((tr A / a) / (tr G / g)) per group, 1 where a trace is zero (Martens and Grosse, section
    6.3), or 1.
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
    """V = Q_G [(Q_Gᵀ ∇ Q_A) / (d_G d_Aᵀ + γ)] Q_Aᵀ, with negative eigenvalues set to zero.

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
    # How the factors are inverted.
    kind: type[Solver]
    # Whether the damping is divided between both factors by their traces.
    pi: bool
    # Whether the running means begin with the first batch or with the identity.
    start: Literal["batch", "identity"]
    # None before the first solver.
    solver: Solver | None = None
    # How many times a factor had to be damped further before it could be inverted.
    strained: int = 0
    # The running factors. None before the first finite batch.
    _a: Tensor | None = None
    _g: Tensor | None = None
    # The solver as all ranks have it, if the layer is spread and the solver is of the right kind.
    _spread: SpreadSolver | None = None
    # On a device a tensor, so that the host need not wait for it.
    _dropped: Tensor | int = 0

    @property
    def dropped(self) -> int:
        """How many batches changed nothing: their factors were missing or not finite."""
        return int(self._dropped)

    def add(self, a: BatchFactor, g: BatchFactor, decay: float) -> None:
        """Add the factors of one batch to the running means, unless one of them is not finite."""
        usable = is_finite(a) & is_finite(g)
        self._dropped = self._dropped + ~usable
        if self._a is None or self._g is None or not usable.is_cuda:
            if not bool(usable):
                return
        else:
            # The host must not wait for the device, so a batch that is not usable is replaced by
            # the old mean, whose mean with itself is the same.
            a = torch.where(usable, multiplied(a), self._a)
            g = torch.where(usable, multiplied(g), self._g)
        self._a = update_running(self._a, a, decay, start=self.start)
        self._g = update_running(self._g, g, decay, start=self.start)

    def invert(self, damping: float) -> None:
        """Make a new solver of the running factors.

        The former solver stays if there are no factors, or if they are not finite.
        """
        if self._a is None or self._g is None or not is_finite(self._a) & is_finite(self._g):
            return
        self.solver = self.kind.compute(self._a, self._g, damping, pi=self.pi)
        self._spread = None
        self.strained += self.solver.strained

    def spread(self, root: Tensor | None = None) -> SpreadSolver | None:
        """Return the solver in the form that all ranks receive if the layer is spread.

        ``root`` is the root of the smaller inverse, from a checkpoint. None: compute it. Returns
        None if there is no solver yet, or one of another kind.
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
        """Restore the result of `state_dict`."""
        self._a = None if state["a"] is None else state["a"].to(device, copy=True)
        self._g = None if state["g"] is None else state["g"].to(device, copy=True)
        self.solver = None
        self._spread = None
        if state["solver"] is not None:
            kind: type[Any] = self.kind
            tensors = state["solver"].items()
            self.solver = kind(**{name: each.to(device, copy=True) for name, each in tensors})
            # The root that all ranks had, if the layer was spread: another one may be rounded
            # otherwise.
            root = state.get("root")
            if root is not None:
                self.spread(root.to(device, copy=True))
        self.strained = state["strained"]
        self._dropped = state["dropped"]


@dataclass(eq=False)
class OwnedLayer:
    """A layer that K-FAC treats, and this rank's part of it."""

    # In the order of layers.
    index: int
    layer: Layer
    cost: LayerCost
    owner: int
    # None unless this rank is the owner.
    curvature: Curvature | None
    # On all ranks if the layer is spread. None before the first solver, and after NaN factors.
    solver: SpreadSolver | None = None


def _mean_diagonal(factor: Tensor) -> Tensor:
    # In float64: the trace of a large, finite factor may overflow its own dtype.
    return factor.diagonal(dim1=-2, dim2=-1).double().mean(-1)


def _balance(a: Tensor, g: Tensor) -> Tensor:
    """Return π of each group, [groups]."""
    of_a = _mean_diagonal(a)
    of_g = _mean_diagonal(g)
    pi = (of_a / of_g).sqrt().clamp(*_PI_RANGE)
    return torch.where((of_a > 0) & (of_g > 0), pi, 1.0)


Solved = tuple[Tensor, ...]
"""An inverse, or eigenvalues and eigenvectors, of each group: [groups, ...] each."""


def _solved(
    factor: Tensor, damping: Tensor, attempt: Callable[[Tensor], Solved]
) -> tuple[Solved, int]:
    """Call ``attempt`` with factor + damping · I. Damp groups that it cannot solve further.

    A group is not solved if the result is not finite. After all retries its diagonal alone is
    solved.

    Returns the result of ``attempt``, and how many times a group was damped further.
    """
    solved = attempt(_plus_identity(factor, damping))
    strained = 0
    failed = _failed(solved)
    # Below this, damping is lost in the rounding of the factor.
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
    # An incomplete triangle, or a zero on its diagonal, would make the inversion of all groups
    # raise.
    triangle[(info != 0) | (triangle.diagonal(dim1=-2, dim2=-1) == 0).any(-1)] = math.nan
    return (torch.cholesky_inverse(triangle),)


def _eigen(factor: Tensor) -> Solved:
    try:
        values, vectors = torch.linalg.eigh(factor)
    except torch.linalg.LinAlgError:
        # One group is enough to make all fail: solve them one by one to find it.
        if factor.shape[0] > 1:
            each = [_eigen(group) for group in factor.split(1)]
            return tuple([torch.cat(parts) for parts in zip(*each, strict=True)])
        return factor.new_full(factor.shape[:-1], math.nan), factor.new_full(factor.shape, math.nan)
    return values.clamp_(min=0), vectors


def _positive_diagonal(factor: Tensor) -> Tensor:
    # Clamped so that neither the diagonal nor its inverse overflows.
    limits = torch.finfo(factor.dtype)
    return factor.diagonal(dim1=-2, dim2=-1).clamp(limits.tiny * 4, limits.max / 4)

"""The maths of K-FAC for one layer: factors, their running mean, and the preconditioned gradient. Pure tensors.

[Note: what the factors are] For a layer with inputs a (a column of ones appended where there is a bias) and output
gradients g, K-FAC takes the Fisher matrix to be a Kronecker product of A = E[a aᵀ] and G = E[g gᵀ], g being the
gradient of one sample's own loss (Martens and Grosse, arXiv 1503.05671; convolutions: Grosse and Martens, arXiv
1602.01407). What autograd hands us is the gradient of a *mean* over the N samples of this rank, so a sample's own is
N times that. A layer that is applied at S positions of a sample (pixels, tokens) leaves a choice, named by
`WeightSharing` ("expand" and "reduce": Eschenhagen et al., arXiv 2311.00636):

============== ====================================== ========================================
               A                                      G
============== ====================================== ========================================
expand         1/(N S) Σₙ Σₛ a aᵀ                     N Σₙ Σₛ g gᵀ
reduce         1/N Σₙ āₙ āₙᵀ, āₙ the mean over s      N Σₙ ĝₙ ĝₙᵀ, ĝₙ the sum over s
kfac-pytorch   Linear: as expand                      Linear: 1/(N S) Σₙ Σₛ g gᵀ
               Conv2d: as expand, divided by S²       Conv2d: 1/(N S³) Σₙ Σₛ g gᵀ
============== ====================================== ========================================

The last row has the constants of the public package of that name, whose users have tuned their damping to them.
A convolution of several groups is as many layers side by side: every factor here is [groups, d, d].

[Note: copies before products] A product may be rounded otherwise where its operands lie otherwise in memory. Where
gradients lie depends on the buckets, which a resumed run has anew, so what is multiplied is copied first.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from .columns import (
    Columns,
    LayerShape,
    WeightSharing,
    at_least_float32,
    conv_input_scale,
    input_columns,
    output_columns,
    window_columns,
    windows_of,
)

# Of a strip this wide only what is right of the diagonal is multiplied: five eighths of the work at four strips.
_GRAM_STRIP: Final = 256
# Unfolded inputs at a time, in numbers: 64 MiB of float32.
_CHUNK_NUMEL: Final = 1 << 24
# Diagonal blocks of a packed triangle. The order of elements depends on it: ranks must have the same.
_PACK_BLOCK: Final = 128
_PI_RANGE: Final = (1e-8, 1e8)
_RETRIES: Final = 8


def input_factor(module: nn.Module, shape: LayerShape, input: Tensor, sharing: WeightSharing) -> Tensor:
    """Compute A of one call of ``module``, see [Note: what the factors are].

    Args:
        module: the layer, for the geometry of its convolution; its parameters are not read.
        shape: what `layer_shape` said of it.
        input: what the module was called with, of any dtype: [..., features], or [N, C, H, W] or [C, H, W].
        sharing: how positions of a sample are counted.

    Returns: [groups, a_dim, a_dim], float32 (float64 for float64 input), exactly symmetric, without gradient.
    Finite for an empty input too.
    """
    if isinstance(module, nn.Conv2d) and sharing != "reduce":
        with torch.no_grad(), torch.autocast(input.device.type, enabled=False):
            x = at_least_float32(input)
            return _unfolded_factor(windows_of(module, x if x.dim() == 4 else x.unsqueeze(0)), shape, sharing)
    return input_factor_of(input_columns(module, shape, input, sharing), shape)


def input_factor_of(found: Columns, shape: LayerShape) -> Tensor:
    """Compute A of the columns of `input_columns`: the same as `input_factor`."""
    with torch.no_grad(), torch.autocast(found.columns.device.type, enabled=False):
        return _gram_with_ones(found.columns, shape).mul_(found.scale)


def output_factor(
    module: nn.Module, shape: LayerShape, grad_output: Tensor, sharing: WeightSharing
) -> Tensor:
    """Compute G of one call of ``module``, see [Note: what the factors are].

    Args:
        module: the layer; only its kind is looked at.
        shape: what `layer_shape` said of it.
        grad_output: the gradient of the loss, a mean over samples, with respect to what the module returned.
        sharing: how positions of a sample are counted.

    Returns: [groups, g_dim, g_dim], float32 (float64 for float64 gradients), exactly symmetric, without gradient.
    """
    found = output_columns(module, shape, grad_output, sharing)
    return factor_of(found.columns).mul_(found.scale)


def _unfolded_factor(windows: Tensor, shape: LayerShape, sharing: WeightSharing) -> Tensor:
    """Unfold a part of the samples at a time."""
    factor = windows.new_zeros(shape.groups, shape.a_dim, shape.a_dim)
    samples = max(1, windows.shape[1])
    for chunk in windows.split(max(1, _CHUNK_NUMEL * samples // max(1, windows.numel())), dim=1):
        factor += _gram_with_ones(window_columns(chunk, shape), shape)
    return factor.mul_(conv_input_scale(windows, sharing))


def _gram_with_ones(columns: Tensor, shape: LayerShape) -> Tensor:
    """Return Σ a aᵀ over the columns of [groups, features, count], each with a one appended if there is a bias."""
    if not shape.has_bias:
        return factor_of(columns)
    factor = columns.new_empty(shape.groups, shape.a_dim, shape.a_dim)
    factor[:, :-1, :-1] = factor_of(columns)
    factor[:, :-1, -1] = factor[:, -1, :-1] = columns.sum(-1)
    factor[:, -1, -1] = columns.shape[-1]
    return factor


def factor_of(columns: Tensor) -> Tensor:
    """Return C Cᵀ of [groups, d, count], exactly symmetric."""
    with torch.no_grad(), torch.autocast(columns.device.type, enabled=False):
        return _gram(columns)


class Gram(NamedTuple):
    """A factor that is not multiplied out yet: C Cᵀ of ``columns``, [groups, d, count]."""

    columns: Tensor

    @property
    def width(self) -> int:
        """Number of columns."""
        return self.columns.shape[2]

    def factor(self) -> Tensor:
        """Multiply it out."""
        return factor_of(self.columns)


BatchFactor = Tensor | Gram
"""The factor of one mini-batch, [groups, d, d], or what it is made of."""


def multiplied(batch: BatchFactor) -> Tensor:
    """Return the factor itself."""
    return batch.factor() if isinstance(batch, Gram) else batch


def is_finite(batch: BatchFactor) -> Tensor:
    """Tell whether a factor is finite, as a tensor of no dimensions; of columns without multiplying them out."""
    if isinstance(batch, Gram):
        # No element of C Cᵀ is greater than the sum of all squares.
        return torch.isfinite(torch.linalg.vector_norm(batch.columns) ** 2)
    return torch.isfinite(batch).all()


def _gram(columns: Tensor) -> Tensor:
    size = columns.shape[1]
    gram = columns.new_empty(columns.shape[0], size, size)
    for low in range(0, size, _GRAM_STRIP):
        high = min(low + _GRAM_STRIP, size)
        strip = columns[:, low:high] @ columns[:, low:].mT
        block, beside = strip[..., : high - low], strip[..., high - low :]
        gram[:, low:high, low:high] = (block + block.mT) / 2
        gram[:, low:high, high:] = beside
        gram[:, high:, low:high] = beside.mT
    return gram


@lru_cache(maxsize=256)
def _block_index(size: int, device: torch.device) -> Tensor:
    """Return where in a flat [size, size] block the elements of its upper triangle are."""
    rows, columns = torch.triu_indices(size, size)
    # Made on the host: complete when it is there, whichever stream uses it.
    index: Tensor = (rows * size + columns).to(device)
    return index


@lru_cache(maxsize=256)
def _block_order(size: int, device: torch.device) -> Tensor:
    """Return where in a packed block each element of the flat, symmetric [size, size] block is."""
    order = torch.zeros(size, size, dtype=torch.int64)
    rows, columns = torch.triu_indices(size, size)
    order[rows, columns] = order[columns, rows] = torch.arange(len(rows))
    return order.flatten().to(device)


def pack_triangle(factor: Tensor, out: Tensor) -> None:
    """Write the upper triangles of ``factor`` to ``out``, without gaps.

    The order of elements depends on ``groups`` and ``d`` alone: strips of rows, of each its triangle on the
    diagonal, then what is right of it.

    Args:
        factor: [groups, d, d]; what lies below the diagonals is not read.
        out: a contiguous one-dimensional view of groups * d * (d + 1) / 2 numbers, of any dtype.
    """
    groups, size, _ = factor.shape
    flat, start = out.view(groups, -1), 0
    for low in range(0, size, _PACK_BLOCK):
        high = min(low + _PACK_BLOCK, size)
        block = factor[:, low:high, low:high].reshape(groups, -1)
        index = _block_index(high - low, factor.device)
        flat[:, start : start + len(index)] = block[:, index]
        start += len(index)
        beside = flat[:, start : start + (high - low) * (size - high)]
        beside.view(groups, high - low, -1 if high < size else 0).copy_(factor[:, low:high, high:])
        start += beside.shape[1]


def unpack_triangle(flat: Tensor, groups: int, d: int) -> Tensor:
    """Return the symmetric [groups, d, d] that `pack_triangle` wrote to ``flat``, as a copy in its dtype."""
    factor, packed, start = flat.new_empty(groups, d, d), flat.view(groups, -1), 0
    for low in range(0, d, _PACK_BLOCK):
        high = min(low + _PACK_BLOCK, d)
        width = high - low
        length = width * (width + 1) // 2
        block = packed[:, start : start + length][:, _block_order(width, flat.device)]
        factor[:, low:high, low:high] = block.view(groups, width, width)
        start += length
        beside = packed[:, start : start + width * (d - high)].view(groups, width, d - high)
        factor[:, low:high, high:] = beside
        factor[:, high:, low:high] = beside.mT
        start += width * (d - high)
    return factor


def update_running(
    running: Tensor | None, batch: BatchFactor, decay: float, *, start: Literal["batch", "identity"]
) -> Tensor:
    """Take a mini-batch's factor into the running mean: new = decay * old + (1 - decay) * batch.

    So 0.95 forgets slowly; some code bases call the other weight the decay. Damping never gets into it. Neither is
    ``batch`` looked at: one that is not finite makes the mean so, for good.

    Args:
        running: the mean so far, updated in place; None the first time.
        batch: the factor of this step, of the same shape.
        decay: the weight of the old mean, from 0 to 1.
        start: what the first mean is: "batch", the batch itself (not a copy: hand over a tensor of your own), or
            "identity", decay * identity + (1 - decay) * batch, as kfac-pytorch has it.
    """
    if running is not None and isinstance(batch, Gram):
        with torch.no_grad(), torch.autocast(running.device.type, enabled=False):
            columns = batch.columns.to(running.dtype)
            return running.baddbmm_(columns, columns.mT, beta=decay, alpha=1 - decay)
    batch = multiplied(batch)
    if running is not None:
        return running.mul_(decay).add_(batch, alpha=1 - decay)
    if start == "batch":
        return batch
    first = batch * (1 - decay)
    first.diagonal(dim1=-2, dim2=-1).add_(decay)
    return first


def gradient_matrix(shape: LayerShape, weight_grad: Tensor, bias_grad: Tensor | None) -> Tensor:
    """Return the gradients of a layer as [groups, g_dim, a_dim], the bias in the last column; a copy or a view.

    Columns are in the order of A's rows. The dtype stays as it is.
    """
    matrix = weight_grad.reshape(shape.groups, shape.g_dim, -1)
    if not shape.has_bias:
        return matrix
    assert bias_grad is not None
    return torch.cat([matrix, bias_grad.reshape(shape.groups, shape.g_dim, 1)], dim=-1)


def split_gradient(shape: LayerShape, matrix: Tensor, weight_out: Tensor, bias_out: Tensor | None) -> None:
    """Write [groups, g_dim, a_dim] back to the shapes, memory formats and dtypes of weight and bias."""
    if not shape.has_bias:
        weight_out.copy_(matrix.reshape(weight_out.shape))
        return
    assert bias_out is not None
    weight_out.copy_(matrix[..., :-1].reshape(weight_out.shape))
    bias_out.copy_(matrix[..., -1].reshape(bias_out.shape))


class Solver(Protocol):
    """What turns a layer's gradient into its K-FAC step, made of its two factors."""

    @property
    def strained(self) -> int:
        """How many times a factor (of one group) had to be damped further than asked; 0 after `from_tensors`."""

    @classmethod
    def compute(cls, a_factor: Tensor, g_factor: Tensor, damping: float, *, pi: bool) -> "Solver | None":
        """Prepare to precondition; None if a factor is not finite, so that the former solver can serve on.

        Args:
            a_factor: A, [groups, a, a], symmetric; only its lower triangle may be read. Left as it is.
            g_factor: G, [groups, g, g].
            damping: γ > 0.
            pi: divide the damping between the factors by their size.

        On failure: ``ValueError`` for damping that is not a positive number. No factor raises: one that cannot be
        solved is damped tenfold, again and again, at last taken for its diagonal; see `strained`.
        """

    def precondition(self, matrix: Tensor) -> Tensor:
        """Return V for the gradients [groups, g, a], in the factors' dtype (at least float32); not in place."""

    def tensors(self) -> dict[str, Tensor]:
        """Return what a checkpoint has to hold; the tensors themselves, not copies."""

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> "Solver":
        """Make again what `tensors` described."""


@dataclass(frozen=True)
class DampedInverse:
    """V = (G + √γ/π I)⁻¹ ∇ (A + √γ π I)⁻¹ by Cholesky.

    π = √((tr A / a) / (tr G / g)) per group, 1 where a trace is zero (Martens and Grosse, section 6.3), or 1.
    See `Solver` for the methods.
    """

    a_inverse: Tensor
    g_inverse: Tensor
    strained: int = 0

    @classmethod
    def compute(
        cls, a_factor: Tensor, g_factor: Tensor, damping: float, *, pi: bool
    ) -> "DampedInverse | None":
        """Invert both factors, damped."""
        factors = _usable(a_factor, g_factor, damping)
        if factors is None:
            return None
        a, g = factors
        balance = _balance(a, g) if pi else a.new_ones(a.shape[0], dtype=torch.float64)
        root = math.sqrt(damping)
        (a_inverse,), a_strained = _solved(a, root * balance, _inverse, _diagonal_inverse)
        (g_inverse,), g_strained = _solved(g, root / balance, _inverse, _diagonal_inverse)
        return cls(a_inverse, g_inverse, a_strained + g_strained)

    def precondition(self, matrix: Tensor) -> Tensor:
        """Multiply by both inverses."""
        return self.g_inverse @ (matrix.to(self.a_inverse.dtype) @ self.a_inverse)

    def tensors(self) -> dict[str, Tensor]:
        """Return both inverses."""
        return {"a_inverse": self.a_inverse, "g_inverse": self.g_inverse}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> "DampedInverse":
        """Take both inverses."""
        return cls(tensors["a_inverse"], tensors["g_inverse"])


@dataclass(frozen=True)
class Eigenbasis:
    """V = Q_G [(Q_Gᵀ ∇ Q_A) / (d_G d_Aᵀ + γ)] Q_Aᵀ, with negative eigenvalues taken for zero.

    Damps the whole Fisher block exactly (George et al., arXiv 1806.03884), so there is nothing to divide between
    the factors: ``pi`` has no effect. See `Solver` for the methods.
    """

    a_values: Tensor
    a_vectors: Tensor
    g_values: Tensor
    g_vectors: Tensor
    damping: Tensor
    strained: int = 0

    @classmethod
    def compute(cls, a_factor: Tensor, g_factor: Tensor, damping: float, *, pi: bool) -> "Eigenbasis | None":
        """Decompose both factors."""
        factors = _usable(a_factor, g_factor, damping)
        if factors is None:
            return None
        a, g = factors
        none = a.new_zeros(a.shape[0], dtype=torch.float64)
        (a_values, a_vectors), a_strained = _solved(a, none, _eigen, _diagonal_eigen)
        (g_values, g_vectors), g_strained = _solved(g, none, _eigen, _diagonal_eigen)
        gamma = a.new_full((), max(damping, torch.finfo(a.dtype).tiny))
        return cls(a_values, a_vectors, g_values, g_vectors, gamma, a_strained + g_strained)

    def precondition(self, matrix: Tensor) -> Tensor:
        """Divide by the damped eigenvalues in the basis where the Fisher block is diagonal."""
        rotated = self.g_vectors.mT @ (matrix.to(self.a_vectors.dtype) @ self.a_vectors)
        rotated /= self.g_values.unsqueeze(-1) * self.a_values.unsqueeze(-2) + self.damping
        return self.g_vectors @ (rotated @ self.a_vectors.mT)

    def tensors(self) -> dict[str, Tensor]:
        """Return eigenvalues, eigenvectors and the damping."""
        return {name: getattr(self, name) for name in self._NAMES}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> "Eigenbasis":
        """Take eigenvalues, eigenvectors and the damping."""
        a_values, a_vectors, g_values, g_vectors, damping = (tensors[name] for name in cls._NAMES)
        return cls(a_values, a_vectors, g_values, g_vectors, damping)

    _NAMES = ("a_values", "a_vectors", "g_values", "g_vectors", "damping")


SOLVERS: Final[dict[str, type[Solver]]] = {"inverse": DampedInverse, "eigen": Eigenbasis}


def _usable(a_factor: Tensor, g_factor: Tensor, damping: float) -> tuple[Tensor, Tensor] | None:
    """Return both factors in the dtype to compute in, None if one is not finite."""
    if not 0 < damping < math.inf:
        raise ValueError(f"expected damping > 0, got damping={damping}; 0.001 to 0.03 is usual")
    a, g = at_least_float32(a_factor), at_least_float32(g_factor)
    finite = torch.isfinite(a).all() & torch.isfinite(g).all()
    return (a, g) if finite else None


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
    factor: Tensor,
    damping: Tensor,
    attempt: Callable[[Tensor], Solved],
    fall_back: Callable[[Tensor], Solved],
) -> tuple[Solved, int]:
    """Let ``attempt`` solve factor + damping; damp the groups for which it gives something not finite further.

    Args:
        factor: [groups, d, d], finite.
        damping: [groups].
        attempt: returns tensors [groups, ...]; not finite for a group without solution.
        fall_back: the same for the diagonals alone; always finite.

    Returns: what these returned, and how many times a group was damped further or fell back.
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
        again = attempt(stronger) if retry < _RETRIES else fall_back(stronger)
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


def _diagonal_inverse(factor: Tensor) -> Solved:
    return (torch.diag_embed(1 / _positive_diagonal(factor)),)


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


def _diagonal_eigen(factor: Tensor) -> Solved:
    basis = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device)
    return _positive_diagonal(factor), basis.expand_as(factor)


def _positive_diagonal(factor: Tensor) -> Tensor:
    # Neither this nor its inverse overflows.
    limits = torch.finfo(factor.dtype)
    return factor.diagonal(dim1=-2, dim2=-1).clamp(limits.tiny * 4, limits.max / 4)

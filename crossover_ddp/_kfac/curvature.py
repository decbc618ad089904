"""The mathematics of K-FAC for one layer: factors, running means, solvers and directions.

Nothing here travels. Only a layer's owner keeps its `Curvature`, so the memory and the work of
computing solvers are divided among the ranks.

[Note: definition of the factors] For a layer with inputs a (with a one appended to each if there is
a bias) and output gradients g, K-FAC approximates the Fisher matrix by a Kronecker product of A =
E[a aᵀ] and G = E[g gᵀ]. Here g is the gradient of one sample's own loss (Martens and Grosse, arXiv
1503.05671; for convolutions: Grosse and Martens, arXiv 1602.01407). Autograd computes the gradient
of a *mean* over the N samples on this rank, so a sample's own gradient is N times as large. N is
the number of samples that the model was called with. The first dimension of a layer's input may
have another size: sequences may come first, windows of a picture may be samples, and an expert sees
only some samples. If a layer is applied at S positions in a sample (pixels, tokens), there is a
choice, which `WeightSharing` names ("expand" and "reduce": Eschenhagen et al., arXiv 2311.00636):

============== ====================================== ========================================
               A                                      G
============== ====================================== ========================================
expand         1/(N S) Σₙ Σₛ a aᵀ                     N Σₙ Σₛ g gᵀ
reduce         1/N Σₙ āₙ āₙᵀ, āₙ the mean over s      N Σₙ ĝₙ ĝₙᵀ, ĝₙ the sum over s
kfac-pytorch   Linear: like expand                    Linear: 1/(N S) Σₙ Σₛ g gᵀ
               Conv2d: like expand, divided by S²     Conv2d: 1/(N S³) Σₙ Σₛ g gᵀ
============== ====================================== ========================================

The last row has the constants of the public package with that name, because its users have tuned
their damping to them. A convolution with several groups acts like several layers side by side:
every factor is [groups, d, d].

[Note: columns] A factor is C Cᵀ, where C holds its scaled columns, [groups, features, count]. It
has columns rather than rows because an unfolded picture has this memory order. If there are only a
few columns, they are smaller than the factor.

[Note: copies before products] The rounding of a product may depend on where its operands lie in
memory. Gradients lie in the buckets, which differ after a resume. So operands are copied first.

[Note: spread layers] Without spreading, a layer that fills most of a bucket travels to its owner
and back as a whole. With two ranks that takes twice as long as an even cut, and one rank multiplies
while the others wait. If all ranks have the layer's solver, each can multiply a part of the layer.
With the inverse of the smaller factor written as TᵀT, the direction is, up to transposition,

    V = Tᵀ U,   U = (T ∇) A⁻¹,

and a row of U depends only on the same row of T ∇. So every rank sends T times its own gradient.
Each rank receives its rows, summed over the ranks, and multiplies them by the larger inverse. Then
all rows are gathered, and every rank multiplies them by Tᵀ. The KL clip sums V · ∇ = U · (T ∇),
which is also a sum over rows. This is our own design.

The owner computes the solver. In the step in which the solver is new, the layer travels as a whole,
and the owner sends the solver to all ranks. This pays off if a solver serves for several steps, see
`placement.spreads`. All ranks use the owner's T, so that their terms belong to the same sum. Each
rank computes the last product itself. Ranks that round it differently would drift apart, so layers
are spread only if all ranks round a test product alike, see `rounding`.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crossover_ddp._ddp.layout import Span, equal_lengths, spans_of

from .layers import Layer, LayerShape
from .placement import LayerCost

WeightSharing = Literal["expand", "reduce", "kfac-pytorch"]

# The height of the strips in which C Cᵀ is computed. Each strip is computed only from the diagonal
# to the right, so four strips take five eighths of the work.
_GRAM_STRIP: Final = 256
# The number of unfolded input elements that are in memory at a time: 64 MiB of float32.
_CHUNK_NUMEL: Final = 1 << 24
# The size of the diagonal blocks in a packed triangle. The order of elements depends on it, so it
# must be equal on all ranks.
_PACK_BLOCK: Final = 128
_PI_RANGE: Final = (1e-8, 1e8)
# How often a factor that cannot be solved is damped further, before its diagonal alone is solved.
_RETRIES: Final = 8


# --- the factors of a mini-batch ------------------------------------------------------------------


class Columns(NamedTuple):
    """The columns C of a factor ``scale`` · C Cᵀ, see [Note: definition of the factors]."""

    # [groups, features, count], or the output of `_windows_of`, which is unfolded when needed.
    source: Tensor
    scale: float = 1.0
    # Whether a one is appended to each column.
    with_ones: bool = False
    # The number of groups. It is used only for a source that is not unfolded.
    groups: int = 1

    @property
    def width(self) -> int:
        sizes = self.source.shape
        return sizes[2] if len(sizes) == 3 else sizes[1:4].numel()

    def kept(self) -> "Columns":
        """Return an unfolded copy. Use this if the source may be changed in place."""
        return self._replace(source=_unfolded(self.source, self.groups).clone())

    def scaled(self) -> "Columns":
        """Return columns C such that C Cᵀ is the factor, with a scale of 1."""
        columns = _unfolded(self.source, self.groups)
        if self.with_ones:
            columns = torch.cat(
                [columns, columns.new_ones(columns.shape[0], 1, columns.shape[2])], dim=1
            )
        return Columns(columns * math.sqrt(self.scale))

    def factor(self) -> Tensor:
        """Return the factor, which is exactly symmetric and has no gradient.

        If there are no columns, the factor is still finite.
        """
        with torch.no_grad(), torch.autocast(self.source.device.type, enabled=False):
            factor, *others = (self._multiplied(chunk) for chunk in self._chunks())
            for other in others:
                factor += other
            return factor if self.scale == 1.0 else factor.mul_(self.scale)

    def _chunks(self) -> Iterator[Tensor]:
        if self.source.dim() == 3:
            yield self.source
            return
        samples = self.source.shape[1]
        most = max(1, _CHUNK_NUMEL * max(1, samples) // max(1, self.source.numel()))
        for chunk in self.source.split(most, dim=1):
            yield _unfolded(chunk, self.groups)

    def _multiplied(self, columns: Tensor) -> Tensor:
        gram = factor_of(columns)
        if not self.with_ones:
            return gram
        groups, features, count = columns.shape
        factor = columns.new_empty(groups, features + 1, features + 1)
        factor[:, :-1, :-1] = gram
        sums = columns.sum(-1)
        factor[:, :-1, -1] = sums
        factor[:, -1, :-1] = sums
        factor[:, -1, -1] = count
        return factor


def input_columns(
    module: nn.Module, shape: LayerShape, input: Tensor, sharing: WeightSharing
) -> Columns:
    """Return the columns of A for one call of ``module``. The module's parameters are not read.

    ``input`` is the argument of the call. It may have any dtype and one of the shapes
    [..., features], [N, C, H, W] and [C, H, W].
    """
    with torch.no_grad(), torch.autocast(input.device.type, enabled=False):
        x = at_least_float32(input)
        if not isinstance(module, nn.Conv2d):
            samples, positions = _counts(x)
            rows = x.reshape(-1, x.shape[-1])
            if sharing == "reduce" and x.dim() > 2:
                rows = x.flatten(1, -2).sum(1) / positions
            scale = 1 / (samples if sharing == "reduce" else samples * positions)
            return Columns(rows.T.unsqueeze(0), scale, shape.has_bias)
        windows = _windows_of(module, x if x.dim() == 4 else x.unsqueeze(0))
        samples = max(1, windows.shape[1])
        positions = windows.shape[2] * windows.shape[3]
        if sharing == "reduce":
            means = windows.mean(dim=(2, 3)).permute(0, 2, 3, 1)
            columns = means.reshape(shape.groups, shape.a_dim - shape.has_bias, windows.shape[1])
            return Columns(columns, 1 / samples, shape.has_bias)
        divisor = positions**2 if sharing == "kfac-pytorch" else 1
        scale = 1 / (samples * positions * divisor)
        return Columns(windows, scale, shape.has_bias, shape.groups)


def output_columns(
    module: nn.Module,
    shape: LayerShape,
    grad_output: Tensor,
    sharing: WeightSharing,
    model_samples: int | None = None,
) -> Columns:
    """Return the columns of G for one call of ``module``.

    Args:
        module: the module that was called.
        shape: the shape of its layer.
        grad_output: the gradient of the loss, a mean over samples, with respect to the output of
            the call.
        sharing: how to sum over the positions in a sample, see `WeightSharing`.
        model_samples: the number of samples that the model was called with. It is ignored if the
            output has no dimension for samples. Default: the size of the first dimension.
    """
    with torch.no_grad(), torch.autocast(grad_output.device.type, enabled=False):
        g = at_least_float32(grad_output)
        if g.dim() < (4 if isinstance(module, nn.Conv2d) else 2):
            model_samples = None
        if isinstance(module, nn.Conv2d):
            # Channels last, like the features of a Linear layer.
            pictures = g if g.dim() == 4 else g.unsqueeze(0)
            g = pictures.permute(0, 2, 3, 1)
        samples, positions = _counts(g)
        if sharing == "reduce" and g.dim() > 2:
            g = g.flatten(1, -2).sum(1)
        columns = g.reshape(-1, g.shape[-1]).T.reshape(shape.groups, shape.g_dim, -1)
        if sharing != "kfac-pytorch":
            return Columns(columns, model_samples or samples)
        divisor = samples * positions * (positions**2 if isinstance(module, nn.Conv2d) else 1)
        return Columns(columns, 1 / divisor)


def at_least_float32(x: Tensor) -> Tensor:
    """Return ``x``, detached, in a dtype with enough range for sums of squares."""
    return x.detach().to(torch.promote_types(x.dtype, torch.float32))


def _counts(x: Tensor) -> tuple[int, int]:
    """Return the numbers of samples N and of positions S in ``x``, which is [N, ..., d] or [d].

    Each is at least 1, even if there is no such dimension or if it is empty.
    """
    samples = x.shape[0] if x.dim() > 1 else 1
    return max(1, samples), max(1, math.prod(x.shape[1:-1]))


def _unfolded(windows: Tensor, groups: int) -> Tensor:
    """Return ``windows`` as [groups, features, count].

    The features are in the order of the weight's own dimensions.
    """
    if windows.dim() == 3:
        return windows
    channels, *counts, rows, columns = windows.shape
    # Channel, kernel row, kernel column.
    ordered = windows.permute(0, 4, 5, 1, 2, 3)
    return ordered.reshape(groups, channels * rows * columns // groups, math.prod(counts))


def _windows_of(module: nn.Conv2d, x: Tensor) -> Tensor:
    """View ``x``, [N, C, H, W], as the windows that the kernel sees.

    The result is [C, N, H_out, W_out, kernel rows, kernel columns].
    """
    # Channels come first, so that unfolding copies runs as long as a row of the picture, whatever
    # the memory format. This is faster than F.unfold, whose result has to be transposed.
    x = x.transpose(0, 1).contiguous()
    if module.padding_mode == "zeros":
        x = F.pad(x, _zero_padding(module))
    else:
        x = F.pad(x, module._reversed_padding_repeated_twice, mode=module.padding_mode)
    for dim in (0, 1):
        dilation = module.dilation[dim]
        extent = (module.kernel_size[dim] - 1) * dilation + 1
        x = x.unfold(2 + dim, extent, module.stride[dim])[..., ::dilation]
    return x


def _zero_padding(module: nn.Conv2d) -> list[int]:
    """Return the padding in the order of ``F.pad``: left, right, top, bottom."""
    padding = module.padding
    if not isinstance(padding, str):
        return [padding[1], padding[1], padding[0], padding[0]]
    if padding == "valid":
        return [0, 0, 0, 0]
    # "same": the second side gets one more if the total is odd.
    sides = []
    for dim in (1, 0):
        total = module.dilation[dim] * (module.kernel_size[dim] - 1)
        sides += [total // 2, total - total // 2]
    return sides


def factor_of(columns: Tensor) -> Tensor:
    """Return C Cᵀ for the columns C, [groups, d, count]. The result is exactly symmetric."""
    with torch.no_grad(), torch.autocast(columns.device.type, enabled=False):
        size = columns.shape[1]
        gram = columns.new_empty(columns.shape[0], size, size)
        for low in range(0, size, _GRAM_STRIP):
            high = min(low + _GRAM_STRIP, size)
            strip = columns[:, low:high] @ columns[:, low:].mT
            block = strip[..., : high - low]
            beside = strip[..., high - low :]
            gram[:, low:high, low:high] = (block + block.mT) / 2
            gram[:, low:high, high:] = beside
            gram[:, high:, low:high] = beside.mT
        return gram


BatchFactor = Tensor | Columns
"""The factor of one mini-batch: [groups, d, d], or columns that `Columns.scaled` has returned."""


def multiplied(batch: BatchFactor) -> Tensor:
    return batch.factor() if isinstance(batch, Columns) else batch


def is_finite(batch: BatchFactor) -> Tensor:
    """Return whether the factor is finite, as a tensor without dimensions."""
    if isinstance(batch, Columns):
        # This does not need the product: no element of C Cᵀ exceeds the sum of all squares.
        return torch.isfinite(torch.linalg.vector_norm(batch.source) ** 2)
    return torch.isfinite(batch).all()


def update_running(
    running: Tensor | None, batch: BatchFactor, decay: float, *, start: Literal["batch", "identity"]
) -> Tensor:
    """Add a mini-batch's factor to the running mean: new = decay * old + (1 - decay) * batch.

    So a decay of 0.95 forgets slowly. (Some code bases call the other weight the decay.) The mean
    is not damped. Values are not checked: after a batch that is not finite, the mean is never
    finite again. ``running`` is updated in place. If it is None, ``start`` decides the result. With
    "batch", the first mean is the batch itself, not a copy. With "identity", it is decay * identity
    + (1 - decay) * batch, as in kfac-pytorch.
    """
    if running is not None and isinstance(batch, Columns):
        with torch.no_grad(), torch.autocast(running.device.type, enabled=False):
            columns = batch.source.to(running.dtype)
            return running.baddbmm_(columns, columns.mT, beta=decay, alpha=1 - decay)
    batch = multiplied(batch)
    if running is not None:
        return running.mul_(decay).add_(batch, alpha=1 - decay)
    if start == "batch":
        return batch
    first = batch * (1 - decay)
    first.diagonal(dim1=-2, dim2=-1).add_(decay)
    return first


# --- packed triangles -----------------------------------------------------------------------------


@lru_cache(maxsize=256)
def _triangle_of_block(size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the rows and the columns of the upper triangle of a [size, size] block."""
    rows, columns = torch.triu_indices(size, size)
    # The indices are copied from the host, so they are complete for any stream that uses them.
    return rows.to(device), columns.to(device)


def triangle_numel(groups: int, dim: int) -> int:
    """Return the number of elements in the packed triangles of a factor [groups, dim, dim]."""
    return groups * dim * (dim + 1) // 2


def _strips(flat: Tensor, groups: int, size: int) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """Yield the strips of rows in a packed triangle as (low, high, triangle, beside).

    A strip has the rows from ``low`` up to, but not including, ``high``. ``triangle`` and
    ``beside`` are views of ``flat``: the packed triangle on the diagonal, and the block to its
    right. The order of elements depends only on ``groups`` and ``size``.
    """
    packed = flat.view(groups, -1)
    begin = 0
    for low in range(0, size, _PACK_BLOCK):
        high = min(low + _PACK_BLOCK, size)
        width = high - low
        beside = size - high
        middle = begin + triangle_numel(1, width)
        end = middle + width * beside
        yield low, high, packed[:, begin:middle], packed[:, middle:end].view(groups, width, beside)
        begin = end


def pack_triangle(factor: Tensor, out: Tensor) -> None:
    """Write the upper triangles of ``factor``, [groups, d, d], to ``out``.

    ``out`` is flat and may have any dtype. It is filled without gaps.
    """
    groups, size, _ = factor.shape
    for low, high, triangle, beside in _strips(out, groups, size):
        rows, columns = _triangle_of_block(high - low, factor.device)
        triangle.copy_(factor[:, low:high, low:high][:, rows, columns])
        beside.copy_(factor[:, low:high, high:])


def unpack_triangle(flat: Tensor, groups: int, size: int) -> Tensor:
    """Return the factor that `pack_triangle` wrote to ``flat``, as a copy in the same dtype."""
    factor = flat.new_empty(groups, size, size)
    for low, high, triangle, beside in _strips(flat, groups, size):
        rows, columns = _triangle_of_block(high - low, flat.device)
        block = factor[:, low:high, low:high]
        block[:, rows, columns] = triangle
        block[:, columns, rows] = triangle
        factor[:, low:high, high:] = beside
        factor[:, high:, low:high] = beside.mT
    return factor


# --- the gradient as a matrix ---------------------------------------------------------------------


def gradient_matrix(
    shape: LayerShape, weight_grad: Tensor, bias_grad: Tensor | None = None
) -> Tensor:
    """Return a layer's gradients as [groups, g_dim, a_dim], with the bias in the last column.

    The columns are in the order of A's rows. The result has the gradients' dtype and may be a view.
    """
    matrix = weight_grad.reshape(shape.groups, shape.g_dim, -1)
    if bias_grad is None:
        return matrix
    return torch.cat([matrix, bias_grad.reshape(shape.groups, shape.g_dim, 1)], dim=-1)


def split_gradient(matrix: Tensor, weight_out: Tensor, bias_out: Tensor | None = None) -> None:
    """Write ``matrix``, [groups, g_dim, a_dim], to the tensors for the weight and the bias.

    These may have any memory format and dtype.
    """
    if bias_out is not None:
        bias_out.copy_(matrix[..., -1].reshape(bias_out.shape))
        matrix = matrix[..., :-1]
    weight_out.copy_(matrix.reshape(weight_out.shape))


# --- solvers --------------------------------------------------------------------------------------


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
    least = limits.eps * _mean_diagonal(factor).clamp(min=limits.tiny)
    for retry in range(_RETRIES + 1):
        if not bool(failed.any()):
            break
        strained += int(failed.sum())
        damping = torch.where(failed, torch.maximum(10 * damping, least), damping)
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


# --- spread layers --------------------------------------------------------------------------------


def sides(shape: LayerShape) -> tuple[int, int]:
    """Return the smaller and the larger of the two factors' sizes, for a layer without groups."""
    return min(shape.g_dim, shape.a_dim), max(shape.g_dim, shape.a_dim)


@lru_cache(maxsize=256)
def rows_of(shape: LayerShape, world_size: int) -> tuple[Span, ...]:
    """Return the rows of T ∇ that belong to each rank.

    They depend only on the arguments, so a resumed run rounds in the same way.
    """
    return spans_of(equal_lengths(sides(shape)[0], world_size))


def spread_numel(shape: LayerShape) -> int:
    """Return the number of elements that `SpreadSolver.pack` writes."""
    small, large = sides(shape)
    return 1 + small**2 + triangle_numel(1, large)


@dataclass(frozen=True)
class SpreadSolver:
    """The solver that all ranks have for a spread layer, see [Note: spread layers]."""

    # The layer's shape. It has no groups.
    shape: LayerShape
    # T, of shape [s, s].
    root: Tensor
    # The larger factor's inverse, of shape [l, l].
    right: Tensor

    @classmethod
    def of(
        cls, a_inverse: Tensor, g_inverse: Tensor, shape: LayerShape, root: Tensor | None = None
    ) -> "SpreadSolver":
        """Create the solver from the owner's inverses. ``root`` is T if a checkpoint has it."""
        small = g_inverse[0]
        large = a_inverse[0]
        if _transposed(shape):
            small, large = large, small
        return cls(shape, _root(small) if root is None else root, large)

    def pack(self, out: Tensor) -> None:
        """Write the solver to ``out``, which has `spread_numel` elements.

        The first element is 1, so that `unpack` can distinguish a solver from zeros.
        """
        numel = self.root.numel()
        out[0] = 1.0
        out[1 : 1 + numel].copy_(self.root.flatten())
        pack_triangle(self.right.unsqueeze(0), out[1 + numel :])

    @classmethod
    def unpack(cls, packed: Tensor, shape: LayerShape) -> "SpreadSolver | None":
        """Read the output of `pack`. Return None if the owner had no solver and sent zeros.

        If the tensor is on a device, the host waits for it here.
        """
        if not bool(packed[0]):
            return None
        small, large = sides(shape)
        root = packed[1 : 1 + small**2].view(small, small).clone()
        return cls(shape, root, unpack_triangle(packed[1 + small**2 :], 1, large)[0])

    def before(self, matrix: Tensor, rows: Span, out: Tensor) -> None:
        """Write some rows of T ∇ to ``out``.

        Args:
            matrix: the gradient ∇, of shape [g, a].
            rows: the rows to compute.
            out: the tensor to write to, of shape [rows, l].
        """
        oriented = matrix.mT if _transposed(self.shape) else matrix
        gradient = oriented.to(self.root.dtype)
        root = self.root[rows.start : rows.stop]
        if out.dtype != root.dtype:
            out.copy_(root @ gradient)
        else:
            torch.mm(root, gradient, out=out)

    def after(self, rows: Sequence[Tensor]) -> Tensor:
        """Return V, of shape [g, a], from all rows of U in order."""
        # `cat` copies the rows, see [Note: copies before products].
        direction = self.root.mT @ torch.cat([each.to(self.root.dtype) for each in rows])
        return direction.mT if _transposed(self.shape) else direction

    @property
    def nbytes(self) -> int:
        return self.root.nbytes + self.right.nbytes


def rounding(shapes: Sequence[LayerShape], device: torch.device) -> str:
    """Return a digest of test products with these layers' sizes, to compare the ranks' rounding."""
    generator = torch.Generator().manual_seed(0)
    digest = hashlib.sha256()
    for small, large in sorted({sides(shape) for shape in shapes}):
        root = torch.randn(small, small, generator=generator, dtype=torch.float32).to(device)
        made = torch.randn(small, large, generator=generator, dtype=torch.float32).to(device)
        digest.update((root.mT @ made).cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def _transposed(shape: LayerShape) -> bool:
    """Return whether the inputs' factor is the smaller one."""
    return shape.g_dim > shape.a_dim


def _root(inverse: Tensor) -> Tensor:
    """Return a matrix T with TᵀT = ``inverse``."""
    triangle, info = torch.linalg.cholesky_ex(inverse)
    if not bool(info):
        upper: Tensor = triangle.mT.contiguous()
        return upper
    # Rounding has made the inverse indefinite, or nearly so: set negative eigenvalues to zero.
    values, vectors = torch.linalg.eigh(inverse.double())
    root: Tensor = values.clamp(min=0).sqrt().unsqueeze(-1) * vectors.mT
    return root.to(inverse.dtype).contiguous()


# --- the state of a layer -------------------------------------------------------------------------


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

"""The maths of K-FAC for one layer: factors, their running mean, the gradient as a matrix.

[Note: definition of the factors] For a layer with inputs a (a column of ones appended if there is a
bias) and output gradients g, K-FAC approximates the Fisher matrix by a Kronecker product of A = E[a
aᵀ] and G = E[g gᵀ]. There g is the gradient of one sample's own loss (Martens and Grosse, arXiv
1503.05671; convolutions: Grosse and Martens, arXiv 1602.01407). Autograd computes the gradient of a
*mean* over the N samples of this rank, so a sample's own gradient is N times that. N is the number
of samples that the model was called with. A layer's first dimension may be another one: sequences
may come first, windows of a picture may be samples, and an expert sees only some samples. A layer
that is applied at S positions of a sample (pixels, tokens) leaves a choice, named by
`WeightSharing` ("expand" and "reduce": Eschenhagen et al., arXiv 2311.00636):

============== ====================================== ========================================
               A                                      G
============== ====================================== ========================================
expand         1/(N S) Σₙ Σₛ a aᵀ                     N Σₙ Σₛ g gᵀ
reduce         1/N Σₙ āₙ āₙᵀ, āₙ the mean over s      N Σₙ ĝₙ ĝₙᵀ, ĝₙ the sum over s
kfac-pytorch   Linear: as expand                      Linear: 1/(N S) Σₙ Σₛ g gᵀ
               Conv2d: as expand, divided by S²       Conv2d: 1/(N S³) Σₙ Σₛ g gᵀ
============== ====================================== ========================================

The last row has the constants of the public package of that name: its users have tuned their
damping to them. A convolution of several groups is a row of layers side by side: every factor is
[groups, d, d].

[Note: columns] A factor is C Cᵀ of its scaled columns, [groups, features, count]. Columns rather
than rows, because an unfolded picture lies so in memory. If there are few columns, they are smaller
than the factor.

[Note: copies before products] The rounding of a product may depend on where its operands lie in
memory. Gradients lie in the buckets, which are different after a resume. So operands are copied
first.
"""

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Final, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import LayerShape

WeightSharing = Literal["expand", "reduce", "kfac-pytorch"]

# Width of the strips in which C Cᵀ is computed: each only from the diagonal to the right. Four
# strips take five eighths of the work.
_GRAM_STRIP: Final = 256
# How many unfolded inputs are in memory at a time: 64 MiB of float32.
_CHUNK_NUMEL: Final = 1 << 24
# Diagonal blocks of a packed triangle. The order of elements depends on it, so it must be equal on
# all ranks.
_PACK_BLOCK: Final = 128


class Columns(NamedTuple):
    """Columns C of a factor, which is ``scale`` · C Cᵀ, see [Note: definition of the factors]."""

    # [groups, features, count], or the result of `_windows_of`, which is unfolded when it is
    # needed.
    source: Tensor
    scale: float = 1.0
    # Whether a one is appended to each column.
    with_ones: bool = False
    # The groups of a source that is not unfolded.
    groups: int = 1

    @property
    def width(self) -> int:
        sizes = self.source.shape
        return sizes[2] if len(sizes) == 3 else sizes[1:4].numel()

    def kept(self) -> "Columns":
        """Return a copy, for a source that may be changed in place."""
        return self._replace(source=_unfolded(self.source, self.groups).clone())

    def scaled(self) -> "Columns":
        """Return columns C with C Cᵀ equal to the factor."""
        columns = _unfolded(self.source, self.groups)
        if self.with_ones:
            columns = torch.cat(
                [columns, columns.new_ones(columns.shape[0], 1, columns.shape[2])], dim=1
            )
        return Columns(columns * math.sqrt(self.scale))

    def factor(self) -> Tensor:
        """Return the factor, exactly symmetric, without gradient. Without columns it is finite."""
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
    """Return the columns of A for one call of ``module``, whose parameters are not read.

    ``input`` is the argument of the call, of any dtype: [..., features], [N, C, H, W] or [C, H, W].
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

    ``grad_output`` is the gradient of the loss, a mean over samples, with respect to the output of
    the call. ``model_samples`` is the number of samples, if the output has a dimension for them.
    None: it is the first dimension.
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
    """Return ``x`` in a dtype whose range is enough for sums of squares."""
    return x.detach().to(torch.promote_types(x.dtype, torch.float32))


def _counts(x: Tensor) -> tuple[int, int]:
    """Return samples N and positions S of [N, ..., d]: 1 if there is none, or it is empty."""
    samples = x.shape[0] if x.dim() > 1 else 1
    return max(1, samples), max(1, math.prod(x.shape[1:-1]))


def _unfolded(windows: Tensor, groups: int) -> Tensor:
    """Return [groups, features, count], features in the order of the weight's own dimensions."""
    if windows.dim() == 3:
        return windows
    channels, *counts, rows, columns = windows.shape
    # Channel, kernel row, kernel column.
    ordered = windows.permute(0, 4, 5, 1, 2, 3)
    return ordered.reshape(groups, channels * rows * columns // groups, math.prod(counts))


def _windows_of(module: nn.Conv2d, x: Tensor) -> Tensor:
    """View [N, C, H, W] as the kernel's windows.

    They are [C, N, H_out, W_out, kernel rows, kernel columns].
    """
    # Channels first, so that unfolding copies runs as long as a row of the picture, in any memory
    # format. Faster than F.unfold, whose result has to be transposed.
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
    """Return left, right, top, bottom: the order of ``F.pad``."""
    padding = module.padding
    if not isinstance(padding, str):
        return [padding[1], padding[1], padding[0], padding[0]]
    if padding == "valid":
        return [0, 0, 0, 0]
    # "same": the second side has one more if the total is odd.
    sides = []
    for dim in (1, 0):
        total = module.dilation[dim] * (module.kernel_size[dim] - 1)
        sides += [total // 2, total - total // 2]
    return sides


def factor_of(columns: Tensor) -> Tensor:
    """Return C Cᵀ of [groups, d, count], exactly symmetric."""
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
"""The factor of one mini-batch, [groups, d, d], or its columns, the result of `Columns.scaled`."""


def multiplied(batch: BatchFactor) -> Tensor:
    return batch.factor() if isinstance(batch, Columns) else batch


def is_finite(batch: BatchFactor) -> Tensor:
    """Return whether a factor is finite, as a tensor without dimensions."""
    if isinstance(batch, Columns):
        # Without the product: no element of C Cᵀ is greater than the sum of all squares.
        return torch.isfinite(torch.linalg.vector_norm(batch.source) ** 2)
    return torch.isfinite(batch).all()


@lru_cache(maxsize=256)
def _triangle_of_block(size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the rows and the columns of the upper triangle of a [size, size] block."""
    rows, columns = torch.triu_indices(size, size)
    # Copied from the host, and so complete for any stream that uses it.
    return rows.to(device), columns.to(device)


def triangle_numel(groups: int, dim: int) -> int:
    """Return the number of elements in the packed triangles of [groups, dim, dim]."""
    return groups * dim * (dim + 1) // 2


def _strips(flat: Tensor, groups: int, size: int) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """Yield each strip of rows of a packed triangle, as (low, high, triangle, beside).

    The strip has the rows [low, high). ``triangle`` and ``beside`` are views of ``flat``: the
    packed triangle on the diagonal, and the block to the right of it. The order of elements depends
    on ``groups`` and ``size`` alone.
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

    ``out`` is flat, of any dtype. It is filled without gaps.
    """
    groups, size, _ = factor.shape
    for low, high, triangle, beside in _strips(out, groups, size):
        rows, columns = _triangle_of_block(high - low, factor.device)
        triangle.copy_(factor[:, low:high, low:high][:, rows, columns])
        beside.copy_(factor[:, low:high, high:])


def unpack_triangle(flat: Tensor, groups: int, size: int) -> Tensor:
    """Return the [groups, d, d] that `pack_triangle` wrote to ``flat``, as a copy in its dtype."""
    factor = flat.new_empty(groups, size, size)
    for low, high, triangle, beside in _strips(flat, groups, size):
        rows, columns = _triangle_of_block(high - low, flat.device)
        block = factor[:, low:high, low:high]
        block[:, rows, columns] = triangle
        block[:, columns, rows] = triangle
        factor[:, low:high, high:] = beside
        factor[:, high:, low:high] = beside.mT
    return factor


def update_running(
    running: Tensor | None, batch: BatchFactor, decay: float, *, start: Literal["batch", "identity"]
) -> Tensor:
    """Add a mini-batch's factor to the running mean: new = decay * old + (1 - decay) * batch.

    So a decay of 0.95 forgets slowly; some code bases call the other weight the decay. The mean is
    not damped. Values are not checked: a batch that is not finite makes the mean permanently so.
    ``running`` is updated in place. The first mean is the batch itself, not a copy of it. With
    "identity" it is decay * identity + (1 - decay) * batch, as in kfac-pytorch.
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


def gradient_matrix(
    shape: LayerShape, weight_grad: Tensor, bias_grad: Tensor | None = None
) -> Tensor:
    """Return the gradients of a layer as [groups, g_dim, a_dim], the bias in the last column.

    The columns have the order of A's rows. The result has the gradients' dtype. It may be a view.
    """
    matrix = weight_grad.reshape(shape.groups, shape.g_dim, -1)
    if bias_grad is None:
        return matrix
    return torch.cat([matrix, bias_grad.reshape(shape.groups, shape.g_dim, 1)], dim=-1)


def split_gradient(matrix: Tensor, weight_out: Tensor, bias_out: Tensor | None = None) -> None:
    """Write [groups, g_dim, a_dim] to weight and bias, of any memory format and dtype."""
    if bias_out is not None:
        bias_out.copy_(matrix[..., -1].reshape(bias_out.shape))
        matrix = matrix[..., :-1]
    weight_out.copy_(matrix.reshape(weight_out.shape))

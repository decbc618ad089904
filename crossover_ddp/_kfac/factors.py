"""The mathematics of K-FAC for one layer: factors, running means, and the gradient as a matrix.

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

# The height of the strips in which C Cᵀ is computed. Each strip is computed only from the diagonal
# to the right, so four strips take five eighths of the work.
_GRAM_STRIP: Final = 256
# The number of unfolded input elements that are in memory at a time: 64 MiB of float32.
_CHUNK_NUMEL: Final = 1 << 24
# The size of the diagonal blocks in a packed triangle. The order of elements depends on it, so it
# must be equal on all ranks.
_PACK_BLOCK: Final = 128


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
    """Return a tensor without dimensions that says whether the factor is finite."""
    if isinstance(batch, Columns):
        # This does not need the product: no element of C Cᵀ exceeds the sum of all squares.
        return torch.isfinite(torch.linalg.vector_norm(batch.source) ** 2)
    return torch.isfinite(batch).all()


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


def update_running(
    running: Tensor | None, batch: BatchFactor, decay: float, *, start: Literal["batch", "identity"]
) -> Tensor:
    """Add a mini-batch's factor to the running mean: new = decay * old + (1 - decay) * batch.

    So a decay of 0.95 forgets slowly. (Some code bases call the other weight the decay.) The mean
    is not damped. Values are not checked: after a batch that is not finite, the mean is never
    finite again. ``running`` is updated in place. If it is None, ``start`` decides the result. With
    "batch", the first mean is the batch itself, not a copy. With "identity", it is decay * identity
    + (1 - decay) * batch, like in kfac-pytorch.
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

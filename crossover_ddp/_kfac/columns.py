"""What a layer multiplies, as columns: the inputs and output gradients whose second moments are K-FAC's factors.

Columns rather than rows, [groups, features, count], since that is how an unfolded picture lies in memory. A factor is
C Cᵀ of its scaled columns; where there are few of them they are smaller than the factor.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

WeightSharing = Literal["expand", "reduce", "kfac-pytorch"]


def triangle_numel(groups: int, dim: int) -> int:
    """Return the numbers in the packed triangles of [groups, dim, dim]."""
    return groups * dim * (dim + 1) // 2


@dataclass(frozen=True)
class LayerShape:
    """What of a layer decides the size of its factors.

    Args:
        groups: layers side by side; above 1 only for grouped convolutions.
        a_dim: input features per group, and the column of ones if there is a bias.
        g_dim: outputs per group.
        has_bias: whether there is a bias that is trained.
        transposed: whether the weight is [inputs, outputs].
    """

    groups: int
    a_dim: int
    g_dim: int
    has_bias: bool
    transposed: bool = False


def layer_shape(module: nn.Module) -> LayerShape | None:
    """Describe an ``nn.Linear`` or ``nn.Conv2d`` whose weight is trained; None for every other module.

    ``Conv1D`` of the package transformers, as in GPT-2, is a Linear layer whose weight is transposed. Subclasses count
    as long as they compute what the class computes. None also for a lazy, quantized, pruned or parametrized one (its
    weight is not what the optimizer updates), and for the projection in ``nn.MultiheadAttention``, whose weight is
    read without calling the module.
    """
    if not _computes_as_known(module) or not _trained(module, "weight"):
        return None
    weight: Tensor = module.weight  # type: ignore[assignment]
    if not weight.is_floating_point():
        return None
    has_bias = _trained(module, "bias")
    if not isinstance(module, nn.Linear | nn.Conv2d):
        return LayerShape(1, weight.shape[0] + has_bias, weight.shape[1], has_bias, transposed=True)
    groups = module.groups if isinstance(module, nn.Conv2d) else 1
    return LayerShape(groups, weight[0].numel() + has_bias, weight.shape[0] // groups, has_bias)


def _computes_as_known(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return False
    known = _known_class(module)
    if known is None or parametrize.is_parametrized(module):
        return False
    names = {"forward", "_conv_forward"}
    return not names & vars(module).keys() and all(
        getattr(type(module), name, None) is getattr(known, name, None) for name in names
    )


def _known_class(module: nn.Module) -> type[nn.Module] | None:
    for known in type(module).__mro__:
        if known in (nn.Linear, nn.Conv2d):
            return known
        # Not imported here: whoever has such a module has done so.
        if known.__name__ == "Conv1D" and known.__module__ == "transformers.pytorch_utils":
            return known
    return None


def _trained(module: nn.Module, name: str) -> bool:
    # Exactly a Parameter: subclasses of it are lazy, quantized or sharded.
    parameter = getattr(module, name, None)
    return type(parameter) is nn.Parameter and parameter.requires_grad


class Columns(NamedTuple):
    """Columns [groups, features, count]: the factor is ``scale`` · C Cᵀ, a one appended to each if ``with_ones``."""

    columns: Tensor
    scale: float
    with_ones: bool

    def scaled(self) -> Tensor:
        """Return columns whose C Cᵀ is the factor."""
        columns = self.columns
        if self.with_ones:
            columns = torch.cat([columns, columns.new_ones(columns.shape[0], 1, columns.shape[2])], dim=1)
        return columns * math.sqrt(self.scale)


def input_columns(module: nn.Module, shape: LayerShape, input: Tensor, sharing: WeightSharing) -> Columns:
    """Return the inputs of one call, a one appended where there is a bias; see `_factors.input_factor`."""
    with torch.no_grad(), torch.autocast(input.device.type, enabled=False):
        x = at_least_float32(input)
        if isinstance(module, nn.Conv2d):
            windows = windows_of(module, x if x.dim() == 4 else x.unsqueeze(0))
            columns = window_means(windows, shape) if sharing == "reduce" else window_columns(windows, shape)
            return Columns(columns, conv_input_scale(windows, sharing), shape.has_bias)
        samples, positions = counts(x)
        rows = mean_of_positions(x) if sharing == "reduce" else x.reshape(-1, x.shape[-1])
        scale = 1 / (samples if sharing == "reduce" else samples * positions)
        return Columns(rows.T.unsqueeze(0), scale, shape.has_bias)


def output_columns(
    module: nn.Module, shape: LayerShape, grad_output: Tensor, sharing: WeightSharing
) -> Columns:
    """Return the output gradients of one call; see `_factors.output_factor`."""
    with torch.no_grad(), torch.autocast(grad_output.device.type, enabled=False):
        g = at_least_float32(grad_output)
        if isinstance(module, nn.Conv2d):
            # Channels last, as a Linear layer has its features.
            g = (g if g.dim() == 4 else g.unsqueeze(0)).permute(0, 2, 3, 1)
        samples, positions = counts(g)
        if sharing == "reduce" and g.dim() > 2:
            g = g.flatten(1, -2).sum(1)
        columns = g.reshape(-1, g.shape[-1]).T.reshape(shape.groups, shape.g_dim, -1)
        if sharing != "kfac-pytorch":
            return Columns(columns, samples, False)
        divisor = samples * positions * (positions**2 if isinstance(module, nn.Conv2d) else 1)
        return Columns(columns, 1 / divisor, False)


def input_count(module: nn.Module, input: Tensor, output: Tensor, sharing: WeightSharing) -> int:
    """Return how many columns `input_columns` has, without making them. ``output``: of the same call."""
    if isinstance(module, nn.Conv2d):
        return output_count(module, output, sharing)
    return _linear_count(input, sharing)


def output_count(module: nn.Module, output: Tensor, sharing: WeightSharing) -> int:
    """Return how many columns `output_columns` has, without making them. ``output``: or its gradient."""
    if not isinstance(module, nn.Conv2d):
        return _linear_count(output, sharing)
    samples = output.shape[0] if output.dim() > 3 else 1
    return samples if sharing == "reduce" else samples * output.shape[-2] * output.shape[-1]


def _linear_count(x: Tensor, sharing: WeightSharing) -> int:
    if sharing == "reduce":
        return x.shape[0] if x.dim() > 1 else 1
    return x.numel() // max(1, x.shape[-1])


def window_columns(windows: Tensor, shape: LayerShape) -> Tensor:
    """Return [groups, features, count] of `windows_of`, in the order of the weight's own dimensions."""
    # Channel, kernel row, kernel column.
    ordered = windows.permute(0, 4, 5, 1, 2, 3)
    return ordered.reshape(shape.groups, shape.a_dim - shape.has_bias, -1 if windows.numel() else 0)


def window_means(windows: Tensor, shape: LayerShape) -> Tensor:
    """Return the means over all positions of a sample, [groups, features, samples]."""
    means = windows.mean(dim=(2, 3)).permute(0, 2, 3, 1)
    return means.reshape(shape.groups, shape.a_dim - shape.has_bias, windows.shape[1])


def conv_input_scale(windows: Tensor, sharing: WeightSharing) -> float:
    """Return what A of a convolution is scaled by."""
    samples, positions = max(1, windows.shape[1]), windows.shape[2] * windows.shape[3]
    if sharing == "reduce":
        return 1 / samples
    return 1 / (samples * positions * (positions**2 if sharing == "kfac-pytorch" else 1))


def at_least_float32(x: Tensor) -> Tensor:
    """Return a number format in which sums of squares are safe."""
    return x.detach().to(torch.promote_types(x.dtype, torch.float32))


def counts(x: Tensor) -> tuple[int, int]:
    """Return samples N and positions S of [N, ..., d], 1 each where there is no such dimension or it is empty."""
    samples = x.shape[0] if x.dim() > 1 else 1
    return max(1, samples), max(1, math.prod(x.shape[1:-1]))


def mean_of_positions(x: Tensor) -> Tensor:
    """Return [N, d] of [N, ..., d]."""
    return x.flatten(1, -2).sum(1) / counts(x)[1] if x.dim() > 2 else x.reshape(-1, x.shape[-1])


def windows_of(module: nn.Conv2d, x: Tensor) -> Tensor:
    """View [N, C, H, W] as what the kernel meets: [C, N, H_out, W_out, kernel rows, kernel columns]."""
    # Channels first, so that unfolded numbers are copied in runs as long as a row of the picture, whatever the
    # memory format was. Quicker than F.unfold, whose result has to be transposed.
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
    """Return left, right, top, bottom, as ``F.pad`` wants them."""
    padding = module.padding
    if not isinstance(padding, str):
        return [padding[1], padding[1], padding[0], padding[0]]
    if padding == "valid":
        return [0, 0, 0, 0]
    totals = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
    return [side for total in reversed(totals) for side in (total // 2, total - total // 2)]

"""What is where in a bucket of DDP."""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from crossover_ddp.errors import UnsupportedConfigurationError

from .layout import Span


class Content(NamedTuple):
    """One parameter in a bucket: its gradient, and where that is in the flat buffer."""

    parameter: Tensor
    gradient: Tensor
    span: Span


class Run(NamedTuple):
    """Elements of a parameter, from ``begin`` on, and where they travel."""

    parameter: Tensor
    begin: int
    span: Span


def part_of(flat: Tensor, span: Span) -> Tensor:
    """Return the elements of a span, not a copy."""
    return flat[span.start : span.stop]


def contents_of(bucket: dist.GradBucket, buffer: Tensor) -> list[Content]:
    """List the parameters of a bucket; raise if ``buffer`` is not made of their gradients one after the other."""
    contents, start = [], 0
    for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        # DDP shows complex gradients as pairs of real numbers.
        stop = start + parameter.numel() * (
            2 if parameter.is_complex() and not buffer.is_complex() else 1
        )
        span = Span(start, stop)
        contents.append(
            Content(parameter, _as_parameter(parameter, gradient, buffer[start:stop]), span)
        )
        start = stop
    if start != buffer.numel():
        raise UnsupportedConfigurationError(
            f"expected a bucket of {start} elements, got {buffer.numel()}; this torch lays out its buckets in a way "
            "that this hook does not know"
        )
    return contents


def _as_parameter(parameter: Tensor, gradient: Tensor, part: Tensor) -> Tensor:
    """Return the gradient as DDP lays it out in its part of the buffer: in the memory order of the parameter.

    ``bucket.gradients()`` has the parameter's shape, but takes any order for the contiguous one.
    """
    return (
        gradient
        if parameter.is_contiguous() or parameter.is_complex()
        else view_of(part, parameter)
    )


def view_of(part: Tensor, parameter: Tensor) -> Tensor:
    """Return what stands in a part of a flat buffer as DDP lays out the gradient of ``parameter``."""
    return part.as_strided(parameter.shape, _strides_in_bucket(parameter))


def _strides_in_bucket(parameter: Tensor) -> tuple[int, ...]:
    if parameter.is_contiguous() or is_dense(parameter):
        return parameter.stride()
    return torch.empty(parameter.shape, device="meta").stride()  # DDP takes the contiguous order


def is_dense(tensor: Tensor) -> bool:
    """Tell whether elements lie one behind the other, in any order, without gaps or overlaps."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True

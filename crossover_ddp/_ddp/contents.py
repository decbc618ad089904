"""Where the gradients of a DDP bucket lie in its flat buffer."""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from crossover_ddp.errors import UnsupportedConfigurationError

from .layout import Span


class Content(NamedTuple):
    """One parameter in a bucket."""

    parameter: Tensor
    gradient: Tensor
    span: Span  # of the gradient in the flat buffer


class Run(NamedTuple):
    """Consecutive elements of a parameter that travel together."""

    parameter: Tensor
    begin: int  # the first element
    span: Span  # of the elements in the buffer that travels


def part_of(flat: Tensor, span: Span) -> Tensor:
    """Return a view of the elements of a span."""
    return flat[span.start : span.stop]


def contents_of(bucket: dist.GradBucket, buffer: Tensor) -> list[Content]:
    """List the parameters of a bucket, whose gradients follow each other in ``buffer``.

    Raises if ``buffer`` has another length than these gradients.
    """
    contents = []
    start = 0
    for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        stop = start + parameter.numel()
        if parameter.is_complex() and not buffer.is_complex():
            stop += parameter.numel()  # DDP shows complex gradients as pairs of real numbers
        ordered = _as_parameter(parameter, gradient, buffer[start:stop])
        contents.append(Content(parameter, ordered, Span(start, stop)))
        start = stop
    if start != buffer.numel():
        raise UnsupportedConfigurationError(
            f"expected a bucket of {start} elements, got {buffer.numel()}: this version of torch "
            "lays out its buckets in a way that this hook does not know; use another version of "
            "torch, or plain DDP"
        )
    return contents


def _as_parameter(parameter: Tensor, gradient: Tensor, part: Tensor) -> Tensor:
    """Return the gradient in the memory order of the parameter, as DDP lays it out in the buffer.

    ``bucket.gradients()`` has the parameter's shape, but reads the elements in contiguous order
    whatever the parameter's own order is.
    """
    if parameter.is_contiguous() or parameter.is_complex():
        return gradient
    return view_of(part, parameter)


def view_of(part: Tensor, parameter: Tensor) -> Tensor:
    """View a part of a flat buffer as DDP lays out the gradient of ``parameter`` in it."""
    return part.as_strided(parameter.shape, _strides_in_bucket(parameter))


def _strides_in_bucket(parameter: Tensor) -> tuple[int, ...]:
    if parameter.is_contiguous() or is_dense(parameter):
        return parameter.stride()
    # The parameter has gaps or overlaps: DDP takes the contiguous order.
    return torch.empty(parameter.shape, device="meta").stride()


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill their memory, in any order, without gaps or overlaps."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True

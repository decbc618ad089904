"""Finds the gradients of a DDP bucket in its flat buffer."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from crossover_ddp.errors import UnsupportedConfigurationError

from .layout import Span


class Content(NamedTuple):
    """One parameter of a bucket, with its gradient."""

    parameter: Tensor
    gradient: Tensor
    span: Span  # the gradient's place in the flat buffer


class Run(NamedTuple):
    """Consecutive elements of a parameter that travel together."""

    parameter: Tensor
    begin: int  # the index of the first element
    span: Span  # the elements' place in the buffer that travels


def part_of(flat: Tensor, span: Span) -> Tensor:
    """Return a view of the elements of ``flat`` that ``span`` covers."""
    return flat[span.start : span.stop]


def copy_parts(source: Tensor, target: Tensor, moves: Sequence[tuple[Span, Span]]) -> None:
    """Copy parts of one flat buffer to another one.

    Args:
        source: the buffer to read.
        target: the buffer to write to.
        moves: for each part, its span in ``source`` and its span in ``target``.
    """
    if moves:  # torch refuses empty lists
        torch._foreach_copy_(
            [part_of(target, place) for _, place in moves],
            [part_of(source, span) for span, _ in moves],
        )


def contents_of(bucket: dist.GradBucket, buffer: Tensor) -> list[Content]:
    """Return the parameters of a bucket, in the order of their gradients in ``buffer``.

    Raises if the gradients do not fill ``buffer`` exactly.
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
    """Return the gradient in the parameter's memory order, as DDP lays it out in the buffer.

    The tensors in ``bucket.gradients()`` have the parameters' shapes. But they read the elements in
    contiguous order, whatever order the parameter itself has.
    """
    if parameter.is_contiguous() or parameter.is_complex():
        return gradient
    return view_of(part, parameter)


def view_of(part: Tensor, parameter: Tensor) -> Tensor:
    """Return ``part`` of a flat buffer as a view with the shape of ``parameter``.

    The strides are the ones that DDP uses for the gradient of ``parameter``.
    """
    return part.as_strided(parameter.shape, _strides_in_bucket(parameter))


def _strides_in_bucket(parameter: Tensor) -> tuple[int, ...]:
    if parameter.is_contiguous() or is_dense(parameter):
        return parameter.stride()
    # The parameter has gaps or overlaps, so DDP uses contiguous order.
    return torch.empty(parameter.shape, device="meta").stride()


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill their memory without gaps or overlaps, in any order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True

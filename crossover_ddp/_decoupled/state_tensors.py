"""The tensors in what an optimizer keeps of a parameter: dictionaries, lists and tuples of whatever it likes."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from .shares import strides_in_bucket


class TensorPlace(NamedTuple):
    """Stands for a tensor of which only the description travels."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    on_cpu: bool

    def empty(self, device: torch.device) -> torch.Tensor:
        """Return memory for such a tensor, without gaps."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors in ``value``, in one order on all ranks."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors_in(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors_in(each)


def described(value: Any) -> Any:
    """Return ``value`` with a description in the place of each tensor."""
    if isinstance(value, torch.Tensor):
        return TensorPlace(
            tuple(value.shape), tuple(strides_in_bucket(value)), value.dtype, value.device.type == "cpu"
        )
    if isinstance(value, dict):
        return {key: described(each) for key, each in value.items()}
    return _mapped(value, described) if isinstance(value, (list, tuple)) else value


def places_in(value: Any) -> Iterator[TensorPlace]:
    """Yield all descriptions in what `described` has returned, in the order of `tensors_in`."""
    if isinstance(value, TensorPlace):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from places_in(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from places_in(each)


def filled(value: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """Return ``value`` with the next tensor in the place of each description."""
    if isinstance(value, TensorPlace):
        return next(tensors)
    if isinstance(value, dict):
        return {key: filled(each, tensors) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return _mapped(value, lambda each: filled(each, tensors))
    return value


def in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of ``tensor`` in the order of memory, flat; a copy if there are gaps between them."""
    if tuple(tensor.stride()) != tuple(strides_in_bucket(tensor)):
        tensor = tensor.contiguous()
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def _mapped(value: list[Any] | tuple[Any, ...], function: Any) -> Any:
    mapped = [function(each) for each in value]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*mapped)
    return type(value)(mapped)

"""Sixteen bits for an element, and all of them."""

from dataclasses import dataclass
from typing import Final

import torch

from .codec import all_finite

_DTYPES: Final = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Half:
    """Send each element in half precision.

    Unlike torch's ``fp16_compress_hook`` the sum is made in float32, and what rounding takes away is sent with a later
    step. Magnitudes beyond the largest of ``dtype`` are cut to it, the rest follows later. Wire bytes over those of
    float32: 0.5. Source: torch's hooks of that name; the error feedback is our design.

    Args:
        dtype: ``torch.float16`` or ``torch.bfloat16``.

    Raises ``ValueError`` for another ``dtype``.
    """

    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise ValueError(f"expected dtype of {_DTYPES}, got dtype={self.dtype}; pass one of these")

    @property
    def multiple(self) -> int:
        """See `Codec.multiple`."""
        return 1

    def nbytes(self, numel: int) -> int:
        """Return the bytes of a message; see `Codec.nbytes`."""
        return numel * self.dtype.itemsize

    def encode(self, values: torch.Tensor, message: torch.Tensor, residual: torch.Tensor) -> None:
        """Write rounded values; see `Codec.encode`."""
        limit = torch.finfo(self.dtype).max
        _encode(values, values.clamp(-limit, limit), message.view(self.dtype), residual)

    def add_decoded(self, message: torch.Tensor, out: torch.Tensor) -> None:
        """Add the values; see `Codec.add_decoded`."""
        out.add_(message.view(self.dtype))


@dataclass(frozen=True)
class Whole:
    """Send each element as it is: between ranks that need no codec, and in a step that empties residuals."""

    @property
    def multiple(self) -> int:
        """See `Codec.multiple`."""
        return 1

    def nbytes(self, numel: int) -> int:
        """Return the bytes of a message; see `Codec.nbytes`."""
        return 4 * numel

    def encode(self, values: torch.Tensor, message: torch.Tensor, residual: torch.Tensor) -> None:
        """Write the values; see `Codec.encode`."""
        _encode(values, values, message.view(torch.float32), residual)

    def add_decoded(self, message: torch.Tensor, out: torch.Tensor) -> None:
        """Add the values; see `Codec.add_decoded`."""
        out.add_(message.view(torch.float32))


def _encode(values: torch.Tensor, sent: torch.Tensor, message: torch.Tensor, residual: torch.Tensor) -> None:
    finite = all_finite(values)
    message.copy_(sent)
    if finite is True:
        torch.sub(values, message, out=residual)
    elif finite is False:
        message.fill_(torch.nan)
    else:
        torch.where(finite, values - message, residual, out=residual)
        message.masked_fill_(finite.logical_not(), torch.nan)

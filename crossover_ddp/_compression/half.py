"""Sixteen bits for an element."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from .codec import Encoded

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

    def room(self, lengths: Sequence[int], wanted: int | None = None) -> int:
        """Return the bytes of a message; always the same."""
        return 2 * sum(lengths)

    def encode(
        self,
        values: torch.Tensor,
        lengths: Sequence[int],
        message: torch.Tensor,
        residual: torch.Tensor,
        memory: Any = None,
    ) -> Encoded:
        """Write rounded values; see `Codec.encode`."""
        # Of finite float32 the sum may overflow, so a second look decides.
        if not bool(torch.isfinite(values.sum())) and not bool(torch.isfinite(values).all()):
            return Encoded(False, values.numel(), None)
        halves = self._view(message, lengths)
        limit = torch.finfo(self.dtype).max
        halves.copy_(values.clamp(-limit, limit))
        torch.sub(values, halves, out=residual)
        return Encoded(True, values.numel(), None)

    def encode_on_device(
        self, values: torch.Tensor, lengths: Sequence[int], message: torch.Tensor, residual: torch.Tensor
    ) -> None:
        """Write rounded values; see `DeviceCodec.encode_on_device`."""
        finite, limit = torch.isfinite(values).all(), torch.finfo(self.dtype).max
        halves = self._view(message, lengths)
        halves.copy_(torch.where(finite, values.clamp(-limit, limit), torch.nan))
        torch.where(finite, values - halves, residual, out=residual)

    def add_decoded(self, message: torch.Tensor, lengths: Sequence[int], out: torch.Tensor) -> None:
        """Add the values; see `Codec.add_decoded`."""
        out.add_(self._view(message, lengths))

    def _view(self, message: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        return message[: 2 * sum(lengths)].view(self.dtype)

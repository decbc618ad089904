"""Sixteen bits for an element, and all of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from .codec import TILE_NUMEL, all_finite, scratch, tiles

_DTYPES: Final = (torch.float16, torch.bfloat16)


class _Rounded:
    """Each element in ``dtype``."""

    dtype: torch.dtype
    multiple = 1

    def nbytes(self, numel: int) -> int:
        """Return the bytes of a message; see `Codec.nbytes`."""
        return numel * self.dtype.itemsize

    def encode(self, values: torch.Tensor, message: torch.Tensor, residual: torch.Tensor) -> None:
        """Write rounded values; see `Codec.encode`."""
        rounded, limit, finite = message.view(self.dtype), torch.finfo(self.dtype).max, all_finite(values)
        if finite is False:
            rounded.fill_(torch.nan)
            return
        for piece, sent, kept in tiles(TILE_NUMEL, values, rounded, residual):
            sent.copy_(torch.clamp(piece, -limit, limit, out=scratch.like(piece)))
            if finite is True:
                torch.sub(piece, sent, out=kept)
            else:
                torch.where(finite, piece - sent, kept, out=kept)
        if finite is not True:
            rounded.masked_fill_(finite.logical_not(), torch.nan)

    def add_decoded(self, message: torch.Tensor, out: torch.Tensor) -> None:
        """Add the values; see `Codec.add_decoded`."""
        out.add_(message.view(self.dtype))

    def write_decoded(
        self, message: torch.Tensor, pieces: Sequence[torch.Tensor], starts: Sequence[int]
    ) -> None:
        """Write the values to ``pieces``; see `PieceWriter.write_decoded`."""
        for piece, start in zip(pieces, starts, strict=True):
            values = message.view(self.dtype)[start : start + len(piece)]
            for out, sent in tiles(TILE_NUMEL, piece, values):
                out.copy_(sent).add_(0.0)  # -0 becomes 0, as in `add_decoded`


@dataclass(frozen=True)
class Half(_Rounded):
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


@dataclass(frozen=True)
class Whole(_Rounded):
    """Send each element as it is: between ranks that need no codec, and in a step that empties residuals."""

    dtype = torch.float32

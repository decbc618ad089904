"""Eight bits for an element, and one scale for a block of elements. Our design; the scale is that of absmax codecs."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch

from .codec import Encoded

_LARGEST: Final = 127
# Elements that one operation works on, so that they stay in the core's cache from operation to operation.
_TILE_NUMEL: Final = 1 << 17
# Of a float32 scale; then the product with a code has at most 23 bits and is exact.
_DROPPED_BITS: Final = 8
_SMALLEST_SCALE: Final = 1e-36


def _rounded_down(scale: float) -> float:
    mantissa, exponent = math.frexp(scale)
    return math.ldexp(math.floor(math.ldexp(mantissa, 24 - _DROPPED_BITS)), exponent - 24 + _DROPPED_BITS)


# With a larger one the largest code would stand for infinity.
_LARGEST_SCALE: Final = _rounded_down(torch.finfo(torch.float32).max / _LARGEST)


@dataclass(frozen=True)
class Int8:
    """Send each element as one signed byte, with a float32 scale for each block of elements.

    Codes are rounded to nearest, and the scale is the block's largest magnitude over 127, so the error of an element
    is at most half of that. A block never holds elements of two parameters. Wire bytes over those of float32:
    1/4 + 1/block, 0.254 by default. Relative RMS error about 1 % on gradients. Source: our design.

    Args:
        block: number of elements that share a scale.

    Raises ``ValueError`` if ``block`` is smaller than 1.

    Example::

        model.register_comm_hook(CompressedState(codec=Int8()), compressed_hook)
    """

    block: int = 256

    def __post_init__(self) -> None:
        if not isinstance(self.block, int) or self.block < 1:
            raise ValueError(f"expected block >= 1, got block={self.block}; 256 is the default")

    def room(self, lengths: Sequence[int], wanted: int | None = None) -> int:
        """Return the bytes of a message; always the same."""
        return 4 * _blocks(tuple(lengths), self.block) + sum(lengths)

    def encode(
        self,
        values: torch.Tensor,
        lengths: Sequence[int],
        message: torch.Tensor,
        residual: torch.Tensor,
        memory: Any = None,
    ) -> Encoded:
        """Write scales and codes; see `Codec.encode`."""
        scales, codes = self._views(message, lengths)
        tiles = _tiles(tuple(lengths), self.block)
        scratch = values.new_empty(max((tile.numel for tile in tiles), default=0))
        largest = values.new_empty(scales.numel())
        for tile in tiles:  # torch.linalg.vector_norm(ord=inf) takes fifteen times as long
            magnitudes = torch.abs(tile.rows(values), out=tile.shaped(scratch))
            torch.amax(magnitudes, dim=1, out=largest[tile.first : tile.last])
        if not bool(torch.isfinite(largest).all()):
            return Encoded(False, values.numel(), None)
        scales.copy_(_rounded_up(largest.float() / _LARGEST))
        exact = scales.to(values.dtype)
        inverse = torch.where(exact > 0, 1 / exact, exact)
        for tile in tiles:
            rows, blocks = tile.rows(values), slice(tile.first, tile.last)
            rounded = tile.shaped(scratch)
            torch.mul(rows, inverse[blocks, None], out=rounded).round_()
            tile.rows(codes).copy_(rounded)
            torch.addcmul(rows, rounded, exact[blocks, None], value=-1, out=tile.rows(residual))
        return Encoded(True, values.numel(), None)

    def add_decoded(self, message: torch.Tensor, lengths: Sequence[int], out: torch.Tensor) -> None:
        """Add codes times scales; see `Codec.add_decoded`."""
        scales, codes = self._views(message, lengths)
        scales = scales.to(out.dtype)
        for tile in _tiles(tuple(lengths), self.block):
            rows = tile.rows(codes).to(out.dtype)
            tile.rows(out).addcmul_(rows, scales[tile.first : tile.last, None])

    def _views(self, message: torch.Tensor, lengths: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        head = 4 * _blocks(tuple(lengths), self.block)
        codes = message[head : head + sum(lengths)].view(torch.int8)
        return message[:head].view(torch.float32), codes


class _Tile(NamedTuple):
    """Elements ``start`` to ``stop`` in blocks ``first`` to ``last``, all of the same size."""

    start: int
    stop: int
    first: int
    last: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def rows(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the elements, a row for each block."""
        return flat[self.start : self.stop].view(self.last - self.first, -1)

    def shaped(self, scratch: torch.Tensor) -> torch.Tensor:
        """Return as many elements of ``scratch``, in the same rows."""
        return scratch[: self.numel].view(self.last - self.first, -1)


@lru_cache(maxsize=1024)
def _blocks(lengths: tuple[int, ...], block: int) -> int:
    return sum(-(-length // block) for length in lengths)


@lru_cache(maxsize=1024)
def _tiles(lengths: tuple[int, ...], block: int) -> tuple[_Tile, ...]:
    """Cut into tiles of whole blocks, and tiles of what is left at the end of a tensor.

    Tensors that end with a whole block share tiles with the next one: their blocks hold elements of one of them all
    the same.
    """
    return tuple(_cut(_runs(lengths, block), block))


def _runs(lengths: tuple[int, ...], block: int) -> Iterator[int]:
    """Join lengths that are whole blocks with what follows."""
    joined = 0
    for length in lengths:
        joined += length
        if joined % block:
            yield joined
            joined = 0
    if joined:
        yield joined


def _cut(runs: Iterator[int], block: int) -> Iterator[_Tile]:
    start = first = 0
    step = max(1, _TILE_NUMEL // block) * block
    for run in runs:
        left = run % block
        sizes = [min(step, run - left - begin) for begin in range(0, run - left, step)]
        for size in [*sizes, left] if left else sizes:
            last = first + -(-size // block)
            yield _Tile(start, start + size, first, last)
            start, first = start + size, last


def _rounded_up(scales: torch.Tensor) -> torch.Tensor:
    """Round float32 scales up to 16 significant bits, so that 127 reaches the largest; 0 for what is too small."""
    # The bits of a positive float32 are in the order of the numbers.
    mask = (1 << _DROPPED_BITS) - 1
    bits = scales.view(torch.int32).add(mask).bitwise_and_(~mask)
    rounded = bits.view(torch.float32).clamp_max_(_LARGEST_SCALE)
    return torch.where(scales > _SMALLEST_SCALE, rounded, torch.zeros_like(rounded))

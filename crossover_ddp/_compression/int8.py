"""Eight bits for an element, and one scale for a block of elements. Our design; the scale is that of absmax codecs."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch

from .codec import Encoded
from .message import views
from .scratch import Scratch

_LARGEST: Final = 127
# Elements that one operation works on, so that they stay in the core's cache from operation to operation.
_TILE_NUMEL: Final = 1 << 17
# Of a float32 scale; then the product with a code has at most 23 bits and is exact.
_DROPPED_BITS: Final = 8
_SMALLEST_SCALE: Final = 1e-36
# Of the size of a tile; no caller sees it. See [Note: used again].
_scratch: Final = Scratch()


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
        tiling = _tiling(tuple(lengths), self.block)
        rows_of, scratch = tiling.rows(values), tiling.scratch(values)
        largest = _largest(tiling, values, scales.numel())
        # Of finite float32 the sum may overflow, so a second look decides.
        if not math.isfinite(largest.sum()) and not bool(torch.isfinite(largest).all()):
            return Encoded(False, values.numel(), None)
        scales.copy_(_rounded_up(largest.float() / _LARGEST))
        exact = scales.to(values.dtype)
        inverse = exact.reciprocal().masked_fill_(exact.eq(0), 0)
        for rows, code, left, by, scale in zip(
            rows_of,
            tiling.rows(codes),
            tiling.rows(residual),
            tiling.columns(inverse),
            tiling.columns(exact),
            strict=True,
        ):
            rounded = torch.mul(rows, by, out=_shaped(scratch, rows)).round_()
            code.copy_(rounded)
            torch.addcmul(rows, rounded, scale, value=-1, out=left)
        return Encoded(True, values.numel(), None)

    def encode_on_device(
        self, values: torch.Tensor, lengths: Sequence[int], message: torch.Tensor, residual: torch.Tensor
    ) -> None:
        """Write scales and codes; see `DeviceCodec.encode_on_device`. The same bytes as `encode` writes."""
        scales, codes = self._views(message, lengths)
        tiling = _tiling(tuple(lengths), self.block, None)
        largest = _largest(tiling, values, scales.numel())
        finite = torch.isfinite(largest).all()
        by = largest.new_full((), _LARGEST, dtype=torch.float32)  # see `DeviceBucket`: not the number itself
        scales.copy_(torch.where(finite, _rounded_up(largest.float() / by), torch.nan))
        inverse = scales.reciprocal().masked_fill_(scales.eq(0), 0)
        for rows, code, left, by, scale in zip(
            tiling.rows(values),
            tiling.rows(codes),
            tiling.rows(residual),
            tiling.columns(inverse),
            tiling.columns(scales),
            strict=True,
        ):
            rounded = torch.mul(rows, by).round_()
            code.copy_(rounded.nan_to_num(0.0))  # what NaN is as a byte nobody defines
            torch.where(finite, torch.addcmul(rows, rounded, scale, value=-1), left, out=left)

    def add_decoded(self, message: torch.Tensor, lengths: Sequence[int], out: torch.Tensor) -> None:
        """Add codes times scales; see `Codec.add_decoded`."""
        scales, codes = self._views(message, lengths)
        tiling = _tiling(tuple(lengths), self.block)
        columns, scratch = tiling.columns(scales.to(out.dtype)), tiling.scratch(out)
        for rows, code, scale in zip(tiling.rows(out), tiling.rows(codes), columns, strict=True):
            rows.addcmul_(_shaped(scratch, rows).copy_(code), scale)

    def write_decoded(
        self, message: torch.Tensor, lengths: Sequence[int], pieces: Sequence[torch.Tensor]
    ) -> None:
        """Write codes times scales to ``pieces``; see `PieceWriter.write_decoded`."""
        scales, codes = self._views(message, lengths)
        tiling = _tiling(tuple(lengths), self.block)
        scratch = tiling.scratch(scales)
        for parts, code, scale in zip(tiling.parts, tiling.rows(codes), tiling.columns(scales), strict=True):
            places = [pieces[part.tensor][part.start : part.stop] for part in parts]
            is_direct = len(places) == 1 and places[0].dtype == scales.dtype
            rows = places[0].view_as(code) if is_direct else _shaped(scratch, code)
            rows.copy_(code).mul_(scale)
            if not is_direct:
                torch._foreach_copy_(places, views(rows.view(-1), [place.numel() for place in places]))

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


class _TilePart(NamedTuple):
    """Elements ``start`` to ``stop`` of one of the tensors."""

    tensor: int
    start: int
    stop: int


class _Tiling(NamedTuple):
    """All tiles of a message, and for each of them which elements of which tensors it holds."""

    tiles: tuple[_Tile, ...]
    parts: tuple[tuple[_TilePart, ...], ...]

    def rows(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the elements of each tile, a row for each block."""
        # All at once: many slices would take as long as what is done with them.
        pieces = views(flat, [tile.stop - tile.start for tile in self.tiles])
        return [
            piece.view(tile.last - tile.first, -1) for piece, tile in zip(pieces, self.tiles, strict=True)
        ]

    def blocks(self, of_blocks: torch.Tensor) -> list[torch.Tensor]:
        """Return what belongs to the blocks of each tile."""
        return views(of_blocks, [tile.last - tile.first for tile in self.tiles])

    def columns(self, of_blocks: torch.Tensor) -> list[torch.Tensor]:
        """Return the same as columns."""
        return self.blocks(of_blocks[:, None])

    def scratch(self, like: torch.Tensor) -> torch.Tensor:
        """Return this thread's memory for the elements of any tile."""
        numel = max((tile.stop - tile.start for tile in self.tiles), default=0)
        is_usual = like.dtype == torch.float32 and like.device.type == "cpu"
        return _scratch.take(numel) if is_usual else like.new_empty(numel)


def _largest(tiling: _Tiling, values: torch.Tensor, blocks: int) -> torch.Tensor:
    """Return each block's largest magnitude."""
    largest, smallest = values.new_empty(2, blocks)
    # torch.aminmax and torch.linalg.vector_norm(ord=inf) take ten times as long.
    for rows, most, least in zip(
        tiling.rows(values), tiling.blocks(largest), tiling.blocks(smallest), strict=True
    ):
        torch.amax(rows, dim=1, out=most)
        torch.amin(rows, dim=1, out=least)
    return torch.maximum(largest, smallest.neg_(), out=largest)


def _shaped(scratch: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return scratch[: like.numel()].view_as(like)


@lru_cache(maxsize=1024)
def _tiling(lengths: tuple[int, ...], block: int, numel: int | None = _TILE_NUMEL) -> _Tiling:
    """Cut into tiles of so many elements at most; None: as few tiles as there can be, for a device with many cores."""
    tiles = _tiles(lengths, block, sum(lengths) if numel is None else numel)
    return _Tiling(tiles, tuple(_parts(tiles, lengths)))


@lru_cache(maxsize=1024)
def _blocks(lengths: tuple[int, ...], block: int) -> int:
    return sum(-(-length // block) for length in lengths)


def _tiles(lengths: tuple[int, ...], block: int, numel: int) -> tuple[_Tile, ...]:
    """Cut into tiles of whole blocks, and tiles of what is left at the end of a tensor.

    Tensors that end with a whole block share tiles with the next one: their blocks hold elements of one of them all
    the same.
    """
    return tuple(_cut(_runs(lengths, block), block, numel))


def _parts(tiles: Sequence[_Tile], lengths: Sequence[int]) -> Iterator[tuple[_TilePart, ...]]:
    tensor = begin = 0  # where ``tensor`` begins
    for tile in tiles:
        parts, start = [], tile.start
        while start < tile.stop:
            stop = min(tile.stop, begin + lengths[tensor])
            if start < stop:
                parts.append(_TilePart(tensor, start - begin, stop - begin))
            start = stop
            if stop == begin + lengths[tensor]:
                begin, tensor = stop, tensor + 1
        yield tuple(parts)


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


def _cut(runs: Iterator[int], block: int, numel: int) -> Iterator[_Tile]:
    start = first = 0
    step = max(1, numel // block) * block
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
    return rounded.masked_fill_(scales.le(_SMALLEST_SCALE), 0)

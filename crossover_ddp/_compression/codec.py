"""Codecs, which write values into a message of a fixed size and keep what it does not hold; what users may pass.

[Note: error feedback] ``encode`` is given gradient plus residual, and leaves in the residual what the message does not
hold, so that nothing is lost, only late: values = decoded + residual. What a message decodes to is defined in float32,
so all ranks that decode the same bytes have the same numbers.
"""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol

import torch

from crossover_ddp._engine.links import all_finite

TILE_NUMEL = 1 << 17
"""Elements that one operation works on, so that they stay in the core's cache from operation to operation."""
_NEEDED: Final = ("nbytes", "encode", "add_decoded")


class Codec(Protocol):
    """How values become a message of bytes. Frozen and pure: from step to step goes nothing but the residual.

    Values are flat and float32. Those of each parameter begin at a multiple of ``multiple``, with zeros up to the next
    one's. A message is a flat tensor of bytes that begins at a multiple of 16 bytes. On a device whatever a codec looks
    at makes the host wait. A codec may have ``decode(message, out)``, which writes what `add_decoded` makes of zeros.
    """

    @property
    def multiple(self) -> int:
        """Number of elements that are encoded together."""
        return 1

    def nbytes(self, numel: int) -> int:
        """Return the bytes of a message of ``numel`` values, a multiple of ``multiple``; the same on all ranks."""

    def encode(self, values: torch.Tensor, message: torch.Tensor, residual: torch.Tensor) -> None:
        """Write ``values`` to ``message``, and what it does not hold to ``residual``.

        With a value that is infinite or NaN ``message`` decodes to NaN, and ``residual`` stays as it is.
        """

    def add_decoded(self, message: torch.Tensor, out: torch.Tensor) -> None:
        """Add what ``message`` holds to ``out``."""


def tiles(rows: int, *tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Cut all tensors alike, so many rows at a time, for a core; a device takes all at once."""
    first = tensors[0]
    if first.device.type != "cpu" or len(first) <= rows:
        return iter([tensors])
    return zip(*[each.split(rows) for each in tensors], strict=True)


class Scratch(threading.local):
    """Floats that a thread may use until it takes again: the kernel takes longer to map new ones than to write them."""

    _floats = torch.empty(0, dtype=torch.float32)

    def take(self, numel: int, device: torch.device) -> torch.Tensor:
        """Return ``numel`` float32 that hold anything."""
        if device.type != "cpu":
            return torch.empty(
                numel, dtype=torch.float32, device=device
            )  # torch keeps a device's memory itself
        if self._floats.numel() < numel:
            self._floats = torch.empty(numel, dtype=torch.float32)
        return self._floats[:numel]

    def like(self, values: torch.Tensor) -> torch.Tensor:
        return self.take(values.numel(), values.device).view(values.shape)


scratch = Scratch()
"""Of the size of a tile; no caller sees it."""


@dataclass(frozen=True)
class Half(Codec):
    """Send each element in half precision.

    Unlike torch's ``fp16_compress_hook`` the sum is made in float32, and what rounding takes away is sent with a later
    step. Magnitudes beyond the largest of ``dtype`` are cut to it, the rest follows later. Wire bytes over those of
    float32: 0.5. Source: torch's hooks of that name; the error feedback is our design.

    Args:
        dtype: ``torch.float16`` or ``torch.bfloat16``, the default; ``ValueError`` for another one.
    """

    dtype: torch.dtype = torch.bfloat16
    _allowed: ClassVar[tuple[torch.dtype, ...]] = (torch.float16, torch.bfloat16)

    def __post_init__(self) -> None:
        if self.dtype not in self._allowed:
            raise ValueError(
                f"expected dtype of {self._allowed}, got dtype={self.dtype}; pass one of these"
            )

    def nbytes(self, numel: int) -> int:
        return numel * self.dtype.itemsize

    def encode(self, values: torch.Tensor, message: torch.Tensor, residual: torch.Tensor) -> None:
        rounded, limit, finite = (
            message.view(self.dtype),
            torch.finfo(self.dtype).max,
            all_finite(values),
        )
        if finite is False:
            rounded.fill_(torch.nan)
            return
        before = residual if finite is True else residual.clone()
        for piece, sent, kept in tiles(TILE_NUMEL, values, rounded, residual):
            sent.copy_(torch.clamp(piece, -limit, limit, out=scratch.like(piece)))
            torch.sub(
                piece, scratch.like(piece).copy_(sent), out=kept
            )  # in two dtypes it would take longer
        if finite is not True:
            rounded.masked_fill_(finite.logical_not(), torch.nan)
            torch.where(finite, residual, before, out=residual)

    def add_decoded(self, message: torch.Tensor, out: torch.Tensor) -> None:
        out.add_(message.view(self.dtype))

    def decode(self, message: torch.Tensor, out: torch.Tensor) -> None:
        for piece, sent in tiles(TILE_NUMEL, out, message.view(self.dtype)):
            piece.copy_(sent).add_(0.0)  # -0 becomes 0, as in `add_decoded`


@dataclass(frozen=True)
class Whole(Half):
    """Send each element as it is, between ranks that need no codec."""

    dtype: torch.dtype = torch.float32
    _allowed: ClassVar[tuple[torch.dtype, ...]] = (torch.float32,)


_LARGEST: Final = 127
# Of a float32 scale; then the product with a code has at most 23 bits and is exact.
_DROPPED_BITS: Final = 8
_SMALLEST_SCALE: Final = 1e-36
# The largest float32 over 127, rounded down to as many bits: with a larger one 127 would stand for infinity.
_LARGEST_SCALE: Final = float.fromhex("0x1.0204p+121")


@dataclass(frozen=True)
class Int8(Codec):
    """Send each element as one signed byte, with a float32 scale for each block of elements.

    Codes are rounded to nearest, and the scale is the block's largest magnitude over 127, so the error of an element
    is at most half of that. A block never holds elements of two parameters: the last one of a parameter is filled up
    with zeros. Wire bytes over those of float32: 1/4 + 1/block, 0.254 by default. Relative RMS error about 1 % on
    gradients. Source: our design.

    Args:
        block: number of elements that share a scale; ``ValueError`` if it is smaller than 1. Default 256.
    """

    block: int = 256

    def __post_init__(self) -> None:
        if not isinstance(self.block, int) or self.block < 1:
            raise ValueError(f"expected block >= 1, got block={self.block}; 256 is the default")

    @property
    def multiple(self) -> int:
        return self.block

    def nbytes(self, numel: int) -> int:
        return numel // self.block * 4 + numel

    def encode(self, values: torch.Tensor, message: torch.Tensor, residual: torch.Tensor) -> None:
        scales, codes = self._views(message)
        rows, left = values.view(codes.shape), residual.view(codes.shape)
        largest = self._largest(rows)
        finite = all_finite(largest)
        if finite is False:
            scales.fill_(torch.nan)
            return
        by = largest.new_full(
            (), _LARGEST
        )  # CUDA multiplies by the reciprocal of a number of the host
        scales.copy_(_rounded_up(largest / by))
        inverse = scales.reciprocal().nan_to_num_(posinf=0.0)  # of a scale of 0
        if finite is not True:
            scales.masked_fill_(finite.logical_not(), torch.nan)
        before = left if finite is True else left.clone()
        for row, code, kept, factor, scale in tiles(
            self._tile_rows, rows, codes, left, inverse, scales
        ):
            rounded = torch.mul(row, factor, out=scratch.like(row)).round_()
            # What NaN is as a byte nobody defines.
            code.copy_(rounded if finite is True else rounded.nan_to_num(0.0))
            torch.addcmul(row, rounded, scale, value=-1, out=kept)
        if finite is not True:
            torch.where(finite, left, before, out=left)

    def add_decoded(self, message: torch.Tensor, out: torch.Tensor) -> None:
        scales, codes = self._views(message)
        for row, code, scale in tiles(self._tile_rows, out.view(codes.shape), codes, scales):
            row.addcmul_(scratch.like(row).copy_(code), scale)

    def decode(self, message: torch.Tensor, out: torch.Tensor) -> None:
        scales, codes = self._views(message)
        for row, code, scale in tiles(self._tile_rows, out.view(codes.shape), codes, scales):
            row.copy_(code).mul_(scale)

    def _views(self, message: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = message.numel() // (self.block + 4)
        scales, codes = message.split_with_sizes([4 * blocks, self.block * blocks])
        return scales.view(torch.float32)[:, None], codes.view(torch.int8).view(blocks, self.block)

    def _largest(self, rows: torch.Tensor) -> torch.Tensor:
        # torch.aminmax and torch.linalg.vector_norm(ord=inf) take ten times as long.
        largest = rows.new_empty(len(rows), 1)
        for row, most in tiles(self._tile_rows, rows, largest):
            torch.amax(torch.abs(row, out=scratch.like(row)), dim=1, keepdim=True, out=most)
        return largest

    @property
    def _tile_rows(self) -> int:
        return max(1, TILE_NUMEL // self.block)


def _rounded_up(scales: torch.Tensor) -> torch.Tensor:
    """Round scales of 0 or more up to 16 significant bits, so that 127 reaches the largest; 0 for what is too small."""
    # The bits of a positive float32 are in the order of the numbers.
    mask = (1 << _DROPPED_BITS) - 1
    rounded = scales.view(torch.int32).add(mask).bitwise_and_(~mask).view(torch.float32)
    return torch.threshold_(rounded.clamp_max_(_LARGEST_SCALE), _SMALLEST_SCALE, 0)


_HEAD_BYTES: Final = 4
_ENTRY_BYTES: Final = 8
# Room for so many times the elements that are wanted; what does not fit follows later.
_MOST: Final = 1.25
# A sixteenth of the elements, evenly spaced, but so many at least, and so many of those to be sent.
_SAMPLE_EVERY: Final = 16
_SAMPLE_NUMEL: Final = 1 << 14
_SAMPLE_SENT: Final = 128


@dataclass(frozen=True)
class SIDCo(Codec):
    """Send the elements whose magnitude is above a threshold that about ``rate`` of a sample exceeds.

    The sample has a sixteenth of the elements. A message holds places (int32) and values (float32), and has room for
    1.25 times the target; what does not fit follows later. Wire bytes over those of float32: 2.5 times ``rate``.
    Source: SIDCo (arXiv 2101.10761) for a threshold in place of a sort; it fits a distribution, where we look at a
    sample.

    Args:
        rate: part of the elements that is sent, 0 < rate < 1; ``ValueError`` for another one.
    """

    rate: float

    def __post_init__(self) -> None:
        if not 0 < self.rate < 1:
            raise ValueError(
                f"expected 0 < rate < 1, got rate={self.rate}; 0.01 sends a hundredth of the elements"
            )

    def nbytes(self, numel: int) -> int:
        return _HEAD_BYTES + _ENTRY_BYTES * min(numel, int(_MOST * self.rate * numel) + 1)

    def encode(self, values: torch.Tensor, message: torch.Tensor, residual: torch.Tensor) -> None:
        head, places, sent = _views(message)
        if not bool(all_finite(values)):
            head.fill_(torch.nan)
            return
        message.zero_()
        chosen = torch.nonzero(values.abs() >= self._threshold(values)).view(-1)
        picked = values[chosen]
        if len(chosen) > len(places):
            largest = torch.topk(picked.abs(), len(places), sorted=False).indices
            chosen, picked = chosen[largest], picked[largest]
        places[: len(chosen)] = chosen
        sent[: len(chosen)] = picked
        residual.copy_(values)
        residual[chosen] = 0

    def add_decoded(self, message: torch.Tensor, out: torch.Tensor) -> None:
        head, places, sent = _views(message)
        if bool(head.isnan()):
            out.fill_(torch.nan)
        else:
            out.index_add_(0, places, sent)

    def _threshold(self, values: torch.Tensor) -> float:
        """Return the magnitude that about ``rate`` of the elements reach: so many of a sample do."""
        least = max(_SAMPLE_NUMEL, int(_SAMPLE_SENT / self.rate))
        sample = values[:: min(_SAMPLE_EVERY, max(1, values.numel() // least))].abs()
        wanted = max(1, round(self.rate * sample.numel()))
        reached = float(torch.topk(sample, wanted, sorted=False).values.amin())
        return max(reached, torch.finfo(values.dtype).tiny)  # above 0, or zeros would be sent


class Threshold(SIDCo):
    """The same as `SIDCo`, under the name of DCT (arXiv 2010.08899), which keeps its threshold for long."""


def _views(message: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    half = (message.numel() - _HEAD_BYTES) // 2
    head, places, sent = message.split_with_sizes([_HEAD_BYTES, half, half])
    return head.view(torch.float32), places.view(torch.int32), sent.view(torch.float32)


@dataclass(frozen=True)
class PerPair:
    """Encode what goes to owners by the pair of ranks: near ranks weakly or not at all, far ones more.

    It is the first of a pair, ``codec=(PerPair(…), Int8())``: what owners send back goes over all links, and all ranks
    decode the same bytes. Our design.

    Args:
        codecs: a row for each rank of the group, and in it what it sends each rank with; None: float32. A single row,
            of one codec, is for all pairs. ``ValueError`` for a table that is not square.
    """

    codecs: tuple[tuple[Codec | None, ...], ...]

    def __post_init__(self) -> None:
        lengths = [len(row) for row in self.codecs]
        if not lengths or {*lengths} != {len(lengths)}:
            raise ValueError(
                f"expected as many codecs in each row as there are rows, got {lengths}; pass a row for each rank, with "
                "a codec for each rank"
            )

    @classmethod
    def by_node(cls, nodes: Sequence[Any], *, far: Codec, near: Codec | None = None) -> "PerPair":
        """Encode between nodes with ``far`` and inside of each with ``near``.

        Args:
            nodes: for each rank of the group, what names its node, such as ``[0, 0, 1, 1]``.
            far: for ranks on different nodes.
            near: for ranks on one node. Default: float32.
        """
        return cls(
            tuple([tuple([near if one == other else far for other in nodes]) for one in nodes])
        )

    def between(self, sender: int, owner: int) -> Codec:
        codec = self.codecs[sender % len(self.codecs)][owner % len(self.codecs)]
        return Whole() if codec is None else codec

    def all(self) -> list[Codec]:
        """Return what all pairs send with."""
        ranks = range(len(self.codecs))
        return [self.between(sender, owner) for sender in ranks for owner in ranks]


def in_words(codec: object) -> object:
    """Return what ranks compare of ``codec``; one of a user's own may not say what it is."""
    if isinstance(codec, (tuple, PerPair)):
        return [in_words(each) for each in (codec.codecs if isinstance(codec, PerPair) else codec)]
    if type(codec).__repr__ is object.__repr__:
        return type(codec).__qualname__, getattr(codec, "__dict__", {})
    return codec


# For both halves of an exchange, or a pair: push to owners, pull from owners.
CodecChoice = Codec | tuple[Codec | PerPair, Codec]


def codecs_of(codec: CodecChoice) -> tuple[PerPair, Codec]:
    """Return the codecs of each half; raise ``TypeError`` for what is none."""
    both = codec if isinstance(codec, tuple) else (codec, codec)
    push, pull = both if len(both) == 2 else (both, both)
    table = push if isinstance(push, PerPair) else PerPair(((push,),))
    for each in (*(table.all() if table is push else (push,)), pull):
        if isinstance(each, type) or not all(
            callable(getattr(each, name, None)) for name in _NEEDED
        ):
            raise TypeError(
                f"expected a codec such as Int8(), got codec={each!r} without {', '.join(_NEEDED)}; pass an object of "
                "crossover_ddp.codecs, two of them for the two halves, of which only the first may be a PerPair, or "
                "None for no compression"
            )
    return table, pull

"""Codecs, which encode values in a message of a fixed size. Users may pass their own codecs.

[Note: error feedback] The caller adds the residual to the gradient and passes the sum to
``encode``. ``encode`` stores whatever the message cannot hold in the residual:
values = decoded + residual. So nothing is lost; it only arrives later. Decoding is defined in
float32, so all ranks that decode the same bytes get the same numbers.
"""

import math
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol

import torch

from crossover_ddp._engine.links import all_finite

from .lossless import Lossless

_REQUIRED: Final = ("nbytes", "encode", "add_decoded")


class Codec(Protocol):
    """Converts values to a message of bytes and back.

    A codec is frozen and pure: only the residual is carried from one step to the next.

    Values are flat and float32. The values of each parameter begin at a multiple of ``multiple``;
    zeros fill the gap before the next parameter. A message is a flat tensor of bytes that begins
    at a multiple of 16 bytes. If a codec reads a device's values on the host, the host must wait.

    A codec may also define ``decode(message, out)``, which overwrites ``out`` with the values that
    `add_decoded` would add to zeros. And it may define ``is_local = True`` if the encoding of a value
    depends only on values among the same ``multiple``. Large tensors are then encoded in pieces that
    fit into a core's cache, which is faster.
    """

    @property
    def multiple(self) -> int:
        """The number of elements that are encoded together."""
        return 1

    def nbytes(self, numel: int) -> int:
        """Return the size in bytes of a message that holds ``numel`` values.

        ``numel`` is a multiple of ``multiple``. The size must be the same on all ranks.
        """

    def encode(self, values: torch.Tensor, message: torch.Tensor, residual: torch.Tensor) -> None:
        """Encode ``values`` in ``message``, and write the encoding error to ``residual``.

        If any value is infinite or NaN, ``message`` must decode to NaN, and ``residual`` must not
        change.
        """

    def add_decoded(self, message: torch.Tensor, out: torch.Tensor) -> None:
        """Add the decoded values of ``message`` to ``out``."""


class Scratch(threading.local):
    """Reusable per-thread memory for intermediate floats. Every `take` returns the same memory.

    Allocating new memory would be slower: the kernel takes longer to map it than a codec takes to
    fill it.
    """

    def __init__(self) -> None:
        self._floats = torch.empty(0, dtype=torch.float32)
        # For each shape, its tensor: making a view takes as long as a pass over a tile.
        self._made: dict[Sequence[int], torch.Tensor] = {}

    def take(self, numel: int, device: torch.device) -> torch.Tensor:
        """Return ``numel`` uninitialized float32 values."""
        return self._shaped((numel,), device)

    def like(self, values: torch.Tensor) -> torch.Tensor:
        return self._shaped(values.shape, values.device)

    def _shaped(self, shape: Sequence[int], device: torch.device) -> torch.Tensor:
        if device.type != "cpu":
            # torch caches a device's memory itself.
            return torch.empty(shape, dtype=torch.float32, device=device)
        found = self._made.get(shape)
        if found is None:
            numel = math.prod(shape)
            if self._floats.numel() < numel:
                self._floats = torch.empty(numel, dtype=torch.float32)
                self._made.clear()
            found = self._floats[:numel].view(shape)
            self._made[shape] = found
        return found


scratch = Scratch()
"""Codecs use it only within a single call."""


@dataclass(frozen=True)
class Half(Codec):
    """Send each element in half precision.

    torch's ``fp16_compress_hook`` adds in half precision and drops the rounding error. This codec
    adds in float32 and sends the rounding error with a later step. A value too large for ``dtype``
    is clamped, and the excess is sent later. A message takes half as many bytes as float32.
    Source: torch's hooks of that name; the error feedback is our own design.

    Args:
        dtype: ``torch.float16`` or ``torch.bfloat16``. Default: ``torch.bfloat16``. Any other dtype
            raises ``ValueError``.
    """

    is_local: ClassVar[bool] = True
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
        rounded = message.view(self.dtype)
        limit = torch.finfo(self.dtype).max
        is_small = values.device.type == "cpu" and float(values.dot(values)) < limit**2
        finite = is_small or all_finite(values)
        if finite is False:
            rounded.fill_(torch.nan)
            return
        # On a device `finite` is a tensor that the host does not read, so both results are kept.
        former = residual if finite is True else residual.clone()
        if is_small:  # and so is every element
            rounded.copy_(values)
        else:
            rounded.copy_(torch.clamp(values, -limit, limit, out=scratch.like(values)))
        # Subtracting tensors with different dtypes would be slower than this copy to float32.
        torch.sub(values, scratch.like(values).copy_(rounded), out=residual)
        if finite is not True:
            rounded.masked_fill_(finite.logical_not(), torch.nan)
            torch.where(finite, residual, former, out=residual)

    def add_decoded(self, message: torch.Tensor, out: torch.Tensor) -> None:
        out.add_(scratch.like(out).copy_(message.view(self.dtype)))

    def decode(self, message: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(message.view(self.dtype))


@dataclass(frozen=True)
class Whole(Half):
    """Send each element in float32. Used between ranks that need no codec."""

    dtype: torch.dtype = torch.float32
    _allowed: ClassVar[tuple[torch.dtype, ...]] = (torch.float32,)


# Products of a smaller scale could be subnormal, and some processors flush those to zero.
_SMALLEST_SCALE: Final = 1e-36


@dataclass(frozen=True)
class _Blocks(Codec):
    """Send each element as a code of a few bits, with a scale for each block of elements.

    The scale is the block's largest magnitude divided by the largest code, rounded up to a few
    significant bits. So the product of a scale and a code is exact, and no code exceeds the
    largest. Codes are rounded to nearest.
    """

    is_local: ClassVar[bool] = True
    block: int = 256
    _largest_code: ClassVar[int]
    # Scales are sent in this dtype.
    _scale_dtype: ClassVar[torch.dtype]
    # A scale does not use this many of float32's 24 significant bits.
    _dropped_bits: ClassVar[int]
    # The largest float32 divided by the largest code, rounded down to the bits of a scale. With a
    # larger scale, the largest code would decode to infinity.
    _largest_scale: ClassVar[float]
    _codes_per_byte: ClassVar[int]

    def __post_init__(self) -> None:
        if not isinstance(self.block, int) or self.block < 1:
            default = type(self)()
            raise ValueError(
                f"expected block >= 1, got block={self.block}; {default.block} is the default"
            )

    @property
    def multiple(self) -> int:
        return self.block * self._codes_per_byte

    def nbytes(self, numel: int) -> int:
        return numel // self.block * self._scale_dtype.itemsize + numel // self._codes_per_byte

    def encode(self, values: torch.Tensor, message: torch.Tensor, residual: torch.Tensor) -> None:
        sent_scales, codes = self._views(message)
        rows = values.view(-1, self.block)
        rest_rows = residual.view(rows.shape)
        # torch.aminmax and torch.linalg.vector_norm(ord=inf) take ten times as long.
        largest = torch.amax(torch.abs(rows, out=scratch.like(rows)), dim=1, keepdim=True)
        finite = all_finite(largest)
        if finite is False:
            sent_scales.fill_(torch.nan)
            return
        # Divide by a tensor: for a Python number, CUDA would multiply by its reciprocal.
        divisor = largest.new_full((), self._largest_code)
        scales = self._rounded_up(largest / divisor)
        inverse = scales.reciprocal().nan_to_num_(posinf=0.0)  # 0 for a scale of 0
        sent_scales.copy_(scales)
        if finite is not True:
            sent_scales.masked_fill_(finite.logical_not(), torch.nan)
        # On a device `finite` is a tensor that the host does not read, so both results are kept.
        former = rest_rows if finite is True else rest_rows.clone()
        rounded = torch.mul(rows, inverse, out=scratch.like(rows)).round_()
        torch.addcmul(rows, rounded, scales, value=-1, out=rest_rows)
        if finite is not True:
            torch.where(finite, rest_rows, former, out=rest_rows)
            # The conversion of NaN to a byte is undefined.
            rounded.nan_to_num_(0.0)
        self._pack(rounded, codes)

    def add_decoded(self, message: torch.Tensor, out: torch.Tensor) -> None:
        scales, codes = self._views(message)
        rows = out.view(-1, self.block)
        rows.addcmul_(self._unpack(codes, scratch.like(rows)), scales.float())

    def decode(self, message: torch.Tensor, out: torch.Tensor) -> None:
        scales, codes = self._views(message)
        self._unpack(codes, out.view(-1, self.block)).mul_(scales.float())

    def _pack(self, rounded: torch.Tensor, codes: torch.Tensor) -> None:
        """Write the codes, given as floats with a row per block. They may be overwritten."""
        codes.copy_(rounded)

    def _unpack(self, codes: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Write the codes of a message to ``rows``, as floats, and return ``rows``."""
        return rows.copy_(codes)

    def _views(self, message: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of a message's scales and codes. A row of codes has as many as a block."""
        scale_bytes = self._scale_dtype.itemsize
        rows = message.numel() // (self._codes_per_byte * scale_bytes + self.block)
        lengths = [rows * self._codes_per_byte * scale_bytes, rows * self.block]
        scales, codes = message.split_with_sizes(lengths)
        return scales.view(self._scale_dtype)[:, None], codes.view(torch.int8).view(rows, -1)

    def _rounded_up(self, scales: torch.Tensor) -> torch.Tensor:
        """Round non-negative scales up to fewer significant bits, and limit them to the valid range.

        They are rounded up so that the largest code can reach the largest magnitude. A scale that
        is too small becomes 0, so that the whole block stays in the residual.
        """
        # The bit patterns of positive float32 numbers are in the same order as the numbers. So
        # adding to the bits and masking them rounds the number up.
        mask = (1 << self._dropped_bits) - 1
        rounded = scales.view(torch.int32).add(mask).bitwise_and_(~mask).view(torch.float32)
        return torch.threshold_(rounded.clamp_max_(self._largest_scale), _SMALLEST_SCALE, 0)


@dataclass(frozen=True)
class Int8(_Blocks):
    """Send each element as one signed byte, with a float32 scale for each block of elements.

    The scale is the block's largest magnitude divided by 127, and codes are rounded to nearest. So
    the error of an element is at most half the scale. A block never spans two parameters: the last
    block of each parameter is padded with zeros. A message takes 1/4 + 1/block times as many bytes
    as float32, 0.254 times by default. On gradients, the relative RMS error is about 1 %. Source:
    our own design.

    Args:
        block: the number of elements that share a scale. Default: 256. A value smaller than 1
            raises ``ValueError``.
    """

    _largest_code: ClassVar[int] = 127
    # 16 bits of a scale and 7 of a code: a product is exact.
    _scale_dtype: ClassVar[torch.dtype] = torch.float32
    _dropped_bits: ClassVar[int] = 8
    _largest_scale: ClassVar[float] = float.fromhex("0x1.0204p+121")
    _codes_per_byte: ClassVar[int] = 1


# Two codes -7..7 are sent as low + 16 · high, -119..119. Floats hold it exactly, and torch has no
# operations for halves of a byte.
_HIGH: Final = 16


@dataclass(frozen=True)
class Int4(_Blocks):
    """Send each element in half a byte, with a bfloat16 scale for each block of elements.

    The scale is the block's largest magnitude divided by 7, rounded up to bfloat16. Codes are
    rounded to nearest, so the error of an element is at most half the scale, and zeros stay zeros.
    A block never spans two parameters: each parameter is padded with zeros to a multiple of two
    blocks. A message takes 1/8 + 1/(2·block) times as many bytes as float32, 0.133 times by
    default. On gradients, the relative RMS error is about 18 %, so it needs error feedback. With
    AdamW short trainings fall behind; see docs/codecs.md. Source: our own design.

    Args:
        block: the number of elements that share a scale. Default: 64. A value smaller than 1
            raises ``ValueError``.
    """

    block: int = 64
    _largest_code: ClassVar[int] = 7
    # 8 bits of a scale and 3 of a code: a product is exact.
    _scale_dtype: ClassVar[torch.dtype] = torch.bfloat16
    _dropped_bits: ClassVar[int] = 16
    _largest_scale: ClassVar[float] = float.fromhex("0x1.24p+125")
    _codes_per_byte: ClassVar[int] = 2

    def _pack(self, rounded: torch.Tensor, codes: torch.Tensor) -> None:
        # The two codes of a byte are half a message apart, so that both halves are contiguous.
        low, high = rounded.chunk(2)
        codes.copy_(low.add_(high, alpha=_HIGH))

    def _unpack(self, codes: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        low, high = rows.chunk(2)
        low.copy_(codes)
        # A low code is at most 7/16 of a high one's unit. (Rounding could make -0.0 of it.)
        torch.add(low.new_full((), 0.5), low, alpha=1 / _HIGH, out=high).floor_()
        low.sub_(high, alpha=_HIGH)
        return rows


_HEAD_BYTES: Final = 4
_ENTRY_BYTES: Final = 8
# A message has room for 1.25 times the target number of elements. The rest are sent later.
_ROOM: Final = 1.25
# The sample is every sixteenth element. For short tensors it is denser, so that it has at least
# 16384 elements, and enough of them for 128 to exceed the threshold.
_SAMPLE_EVERY: Final = 16
_SAMPLE_NUMEL: Final = 1 << 14
_SAMPLE_SENT: Final = 128


@dataclass(frozen=True)
class SIDCo(Codec):
    """Send the elements whose magnitude exceeds a threshold.

    The threshold is chosen so that about a fraction ``rate`` of a sample exceeds it. The sample is
    every sixteenth element, or more of a small tensor. A message holds indices (int32) and values
    (float32), and has room for 1.25 times the target number of elements. Elements that do not fit
    are sent later. A message takes 2.5 × ``rate`` times as many bytes as float32. Source: SIDCo
    (arXiv 2101.10761), which also uses a threshold instead of a sort. SIDCo fits a distribution,
    whereas this codec takes the threshold from a sample.

    Args:
        rate: the fraction of elements to send, 0 < rate < 1. Any other value raises ``ValueError``.
    """

    rate: float

    def __post_init__(self) -> None:
        if not 0 < self.rate < 1:
            raise ValueError(
                f"expected 0 < rate < 1, got rate={self.rate}; "
                "0.01 sends a hundredth of the elements"
            )

    def nbytes(self, numel: int) -> int:
        return _HEAD_BYTES + _ENTRY_BYTES * min(numel, int(_ROOM * self.rate * numel) + 1)

    def encode(self, values: torch.Tensor, message: torch.Tensor, residual: torch.Tensor) -> None:
        head, indices, sent = _views(message)
        if not bool(all_finite(values)):
            head.fill_(torch.nan)
            return
        # Unused entries add 0 to element 0.
        message.zero_()
        chosen = torch.nonzero(values.abs() >= self._threshold(values)).view(-1)
        picked = values[chosen]
        if len(chosen) > len(indices):
            largest = torch.topk(picked.abs(), len(indices), sorted=False).indices
            chosen = chosen[largest]
            picked = picked[largest]
        indices[: len(chosen)] = chosen
        sent[: len(chosen)] = picked
        residual.copy_(values)
        residual[chosen] = 0

    def add_decoded(self, message: torch.Tensor, out: torch.Tensor) -> None:
        head, indices, sent = _views(message)
        if bool(head.isnan()):
            out.fill_(torch.nan)
        else:
            out.index_add_(0, indices, sent)

    def _threshold(self, values: torch.Tensor) -> float:
        """Estimate, from a sample, the magnitude that a fraction ``rate`` of the elements reach."""
        least = max(_SAMPLE_NUMEL, int(_SAMPLE_SENT / self.rate))
        sample = values[:: min(_SAMPLE_EVERY, max(1, values.numel() // least))].abs()
        wanted = max(1, round(self.rate * sample.numel()))
        reached = float(torch.topk(sample, wanted, sorted=False).values.amin())
        # A threshold of 0 would choose all zeros.
        return max(reached, torch.finfo(values.dtype).tiny)


class Threshold(SIDCo):
    """The same codec as `SIDCo`, for those who know it from DCT (arXiv 2010.08899).

    DCT keeps a threshold for many steps. This codec chooses a new one for each message.
    """


def _views(message: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return views of a message's head, indices and values.

    The head is NaN if any value was not finite.
    """
    half = (message.numel() - _HEAD_BYTES) // 2
    head, indices, sent = message.split_with_sizes([_HEAD_BYTES, half, half])
    return head.view(torch.float32), indices.view(torch.int32), sent.view(torch.float32)


@dataclass(frozen=True)
class PerPair:
    """Choose the codec for messages to owners by the pair of ranks. Deprecated.

    The next version will remove it. Where nodes have several ranks, every codec is used between
    nodes only; see docs/nodes.md. With a table, all ranks exchange with each other directly.

    Ranks that are near each other can use a weak codec or none, and distant ranks a stronger one.
    ``PerPair`` can only come first in ``codec``, as in ``codec=(PerPair(…), Int8())``: the messages
    that owners send back travel over all links, and all ranks decode the same bytes. This is our
    own design.

    Args:
        codecs: a square table with a row for each rank of the group. The row lists the codecs for
            that rank's messages to each rank; None means float32. A single row with one codec
            applies to all pairs. A table that is not square raises ``ValueError``.
    """

    codecs: tuple[tuple[Codec | None, ...], ...]

    def __post_init__(self) -> None:
        lengths = [len(row) for row in self.codecs]
        if not lengths or {*lengths} != {len(lengths)}:
            raise ValueError(
                f"expected as many codecs in each row as there are rows, got {lengths}; "
                "pass a row for each rank, with a codec for each rank"
            )
        if len(lengths) > 1:
            warnings.warn(
                "PerPair will be removed in the next version, since codecs are used between nodes only; pass the codec "
                "itself",
                FutureWarning,
                stacklevel=3,
            )

    @classmethod
    def by_node(cls, nodes: Sequence[Any], *, far: Codec, near: Codec | None = None) -> "PerPair":
        """Return a table that uses ``far`` between nodes and ``near`` within a node.

        Args:
            nodes: the node of each rank in the group, such as ``[0, 0, 1, 1]``.
            far: the codec between two ranks on different nodes.
            near: the codec between two ranks on the same node. Default: None, which means float32.
        """
        rows = []
        for node in nodes:
            rows.append(tuple([near if node == other else far for other in nodes]))
        return cls(tuple(rows))

    def between(self, sender: int, owner: int) -> Codec:
        codec = self.codecs[sender % len(self.codecs)][owner % len(self.codecs)]
        return Whole() if codec is None else codec

    def all(self) -> list[Codec]:
        """Return the codecs of all pairs."""
        ranks = range(len(self.codecs))
        return [self.between(sender, owner) for sender in ranks for owner in ranks]


def in_words(codec: object) -> object:
    """Return a description of ``codec`` that ranks can compare.

    A user's codec may not define ``__repr__``. The default one contains an address, which differs
    from rank to rank.
    """
    if isinstance(codec, PerPair):
        codec = codec.codecs
    if isinstance(codec, tuple):
        return [in_words(each) for each in codec]
    if type(codec).__repr__ is object.__repr__:
        return type(codec).__qualname__, getattr(codec, "__dict__", {})
    return codec


# One codec for both halves of an exchange, or a pair: one to owners, one from owners to all ranks.
CodecChoice = Codec | tuple[Codec | PerPair, Codec]
# The same where updated parameters return.
OwnersChoice = CodecChoice | Lossless | tuple[Codec | PerPair, Lossless]


def without_lossless(codec: OwnersChoice | None) -> tuple[CodecChoice | None, bool]:
    """Return the choice without `Lossless`, and whether it had that as the way back.

    If parameters return without loss, the second codec of a pair is not used.
    """
    if isinstance(codec, Lossless):
        return None, True
    if isinstance(codec, tuple) and len(codec) == 2 and isinstance(codec[1], Lossless):
        return (codec[0], Whole()), True
    return codec, False


def codecs_of(codec: CodecChoice) -> tuple[PerPair, Codec]:
    """Return the codecs of both halves; raise ``TypeError`` for an object that is not a codec."""
    both = codec if isinstance(codec, tuple) else (codec, codec)
    # A tuple of any other length is refused below, because it lacks a codec's methods.
    to_owners, to_all = both if len(both) == 2 else (both, both)
    if isinstance(to_owners, PerPair):
        table = to_owners
        given: list[Any] = [*table.all(), to_all]
    else:
        table = PerPair(((to_owners,),))
        given = [to_owners, to_all]
    if any(isinstance(each, Lossless) for each in given):
        raise TypeError(
            f"expected codecs of gradients, got codec={codec!r}: Lossless() compresses updated "
            "parameters, which only owners send back; pass it to OwnerState alone or second in a "
            "pair, and another codec here"
        )
    for each in given:
        if isinstance(each, type) or not _has_methods(each):
            raise TypeError(
                f"expected a codec such as Int8(), got codec={each!r} without "
                f"{', '.join(_REQUIRED)}; pass an object of crossover_ddp.codecs, two of them for "
                "the two halves, of which only the first may be a PerPair, or None for no "
                "compression; PowerSGD() suits CompressedState, CrossoverState and AutoState, alone"
            )
    return table, to_all


def _has_methods(codec: object) -> bool:
    return all(callable(getattr(codec, name, None)) for name in _REQUIRED)

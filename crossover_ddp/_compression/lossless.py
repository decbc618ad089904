"""Lossless compression of updated parameters, on their way from their owners to all ranks.

[Note: differences of bits] A step changes the lower bits of most parameters. So an owner sends the
difference of two integers: the bits of a new parameter minus those of the old one, which all ranks
have. Differences are small and of either sign. They are zigzag encoded, so that their upper bytes
are zero, and divided into planes: all bytes of equal significance together. zstd compresses the
planes. A float32 parameter takes about 27 + log2(|change| / |parameter|) bits. Integers wrap
around, so that the new bits are exact for all values, NaN included. Our design.

[Note: messages of any size] The size of a message depends on its content. So the ranks first gather
the sizes. If a message would not be shorter than the plain planes, these are sent, as their size
shows.
"""

import ctypes
import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from crossover_ddp._engine.buckets import bits_of
from crossover_ddp._engine.links import Layout, Link, LinkAround, parts
from crossover_ddp.errors import UnsupportedConfigurationError

from . import compiled

_LEVEL: Final = 1


class _Zstd(NamedTuple):
    compress: Callable[[Any], bytes]
    # Takes a message and the largest number of bytes to return.
    decompress: Callable[[Any, int], bytes]


@functools.cache
def _zstd() -> _Zstd:
    """Return zstd's functions, with a checksum in each message."""
    try:
        zstd = importlib.import_module("compression.zstd")  # Python 3.14
    except ImportError:
        pass
    else:
        parameter = zstd.CompressionParameter
        options = {parameter.compression_level: _LEVEL, parameter.checksum_flag: 1}
        return _Zstd(
            lambda plain: zstd.compress(plain, options=options),
            lambda message, most: zstd.ZstdDecompressor().decompress(message, most),
        )
    try:
        zstandard = importlib.import_module("zstandard")
    except ImportError as error:
        raise UnsupportedConfigurationError(
            "expected zstd for Lossless(), which Python has from 3.14 on, or the package "
            "zstandard, got neither; install crossover_ddp[lossless]"
        ) from error
    return _Zstd(
        lambda plain: zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).compress(plain),
        lambda message, most: zstandard.ZstdDecompressor().stream_reader(message).read(most),
    )


@dataclass(frozen=True)
class Lossless:
    """Send updated parameters back from their owners in fewer bytes, without changing a bit.

    Only `OwnerState` accepts it: alone, so that gradients travel exactly and all parameters equal
    those without it, or second in a pair, as in ``codec=(Int8(), Lossless())``, where the first is
    a codec for gradients. Owners send the differences between the bits of new and old parameters,
    compressed by zstd. So the size of a message depends on how much parameters change: a float32
    parameter takes about 27 + log2(|change| / |parameter|) bits. Parameters are CPU tensors over
    gloo, of any floating-point type. Our design.

    On failure: ``UnsupportedConfigurationError`` if Python is older than 3.14 and the package
    ``zstandard`` is missing, which ``crossover_ddp[lossless]`` installs.
    """

    def __post_init__(self) -> None:
        _zstd()


def encoded(changes: Tensor) -> Tensor:
    """Return the message of some differences; see [Note: differences of bits].

    Args:
        changes: flat integers on the CPU.
    """
    planes = torch.empty(changes.nbytes, dtype=torch.uint8)
    if not compiled.to_planes(changes, planes):
        itemsize = changes.itemsize
        zigzag = (changes << 1).bitwise_xor_(changes >> (8 * itemsize - 1))
        planes.view(itemsize, -1).copy_(zigzag.view(torch.uint8).view(-1, itemsize).T)
    if not len(planes):
        return planes
    message = _zstd().compress(_memory(planes))
    if len(message) >= len(planes):
        return planes
    return torch.frombuffer(bytearray(message), dtype=torch.uint8)


def add_decoded(message: Tensor, values: Tensor) -> None:
    """Add the differences in a message to integers, in place.

    Args:
        message: the result of `encoded`.
        values: as many integers of the same type.

    On failure: ``ValueError`` if the message is corrupt or truncated.
    """
    itemsize = values.itemsize
    planes = message if len(message) == values.nbytes else _decompressed(message, values.nbytes)
    if compiled.add_planes(planes, values):
        return
    # A copy in any case: a message may begin at any address.
    interleaved = planes.view(itemsize, -1).T.clone(memory_format=torch.contiguous_format)
    zigzag = interleaved.view(-1).view(values.dtype)
    # `>>` keeps the sign, which the mask removes.
    magnitudes = (zigzag >> 1).bitwise_and_(torch.iinfo(values.dtype).max)
    values.add_(magnitudes.bitwise_xor_(zigzag.bitwise_and_(1).neg_()))


def _decompressed(message: Tensor, nbytes: int) -> Tensor:
    try:
        plain = _zstd().decompress(_memory(message), nbytes + 1) if len(message) else b""
    except Exception as error:  # the packages have different errors
        raise ValueError(f"{_WRONG}: {error}") from error
    if len(plain) != nbytes:
        raise ValueError(f"{_WRONG}: expected {nbytes} bytes, got {len(plain)}")
    return torch.frombuffer(bytearray(plain), dtype=torch.uint8)


_WRONG: Final = "a message of updated parameters is corrupt or truncated"


def _memory(flat: Tensor) -> Any:
    """Return a tensor's bytes as an object that shares its memory."""
    return (ctypes.c_uint8 * flat.nbytes).from_address(flat.data_ptr())


@dataclass
class Traffic:
    """Bytes that this rank has sent, and those of the same parts without compression."""

    to_owners_bytes: int = 0  # without a codec
    returned_bytes: int = 0
    exact_bytes: int = 0

    def stats(self, coded: dict[str, float] | None) -> dict[str, float]:
        """Return the statistics of both halves.

        Args:
            coded: the statistics of a codec for gradients, or None.
        """
        first = coded or {"rate": 1.0, "sent_bytes": self.to_owners_bytes, "residual_bytes": 0}
        rate = self.returned_bytes / self.exact_bytes if self.exact_bytes else 1.0
        return {
            **first,
            "rate": (first["rate"] + rate) / 2,
            "sent_bytes": first["sent_bytes"] + self.returned_bytes,
        }


class LosslessLink(LinkAround):
    """Gathers updated parameters in compressed messages; see [Note: messages of any size].

    Before `all_gather`, the part of this rank holds the differences between the bits of new and old
    parameters. The other parts hold old parameters, which are replaced by new ones in place. This
    rank's part does not change.

    Args:
        link: the link of the bucket, with or without a codec for gradients.
        traffic: counts the bytes.
    """

    def __init__(self, link: Link, traffic: Traffic) -> None:
        super().__init__(link)
        self._traffic = traffic

    @property
    def exact(self) -> Link:
        return self._link.exact

    async def all_gather(self, flat: Tensor, layout: Layout) -> None:
        await self.compute()  # encoding must not delay the training thread
        values = parts(bits_of(flat), layout)
        own = encoded(values[self.rank])
        sizes = torch.zeros(self.size, dtype=torch.int64)
        sizes[self.rank] = len(own)
        await self.exact.all_gather(sizes, [1] * self.size)
        lengths = sizes.tolist()
        received = torch.empty(sum(lengths), dtype=torch.uint8)
        messages = parts(received, lengths)
        messages[self.rank].copy_(own)
        self._count(values, len(own))
        await self.exact.all_gather(received, lengths)
        for rank, message in enumerate(messages):
            if rank != self.rank:
                add_decoded(message, values[rank])

    def _count(self, values: list[Tensor], own_bytes: int) -> None:
        traffic = self._traffic
        others = self.size - 1
        nbytes = values[self.rank].nbytes
        traffic.to_owners_bytes += sum(each.nbytes for each in values) - nbytes
        traffic.returned_bytes += others * own_bytes
        traffic.exact_bytes += others * nbytes

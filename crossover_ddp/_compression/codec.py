"""What a codec is: it writes values into a message of a fixed size, and keeps what the message does not hold.

[Note: error feedback] ``encode`` is given gradient plus residual, and leaves in the residual what the message does not
hold, so that nothing is lost but only late: values = decoded + residual. What a message decodes to is defined in
float32, so all ranks that decode the same bytes have the same numbers.
"""

import math
import threading
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

TILE_NUMEL = 1 << 17
"""Elements that one operation works on, so that they stay in the core's cache from operation to operation."""
_HOST = torch.device("cpu")
_HEAD_BYTES = 16


class Codec(Protocol):
    """How values become a message of bytes. Frozen and pure: from step to step goes nothing but the residual.

    Values are flat and float32. Those of each parameter begin at a multiple of ``multiple``, with zeros up to the next
    one's. A message is a flat tensor of bytes that begins at a multiple of 16 bytes.

    On a device whatever a codec looks at makes the host wait.
    """

    @property
    def multiple(self) -> int:
        """Number of elements that are encoded together."""

    def nbytes(self, numel: int) -> int:
        """Return the bytes of a message of ``numel`` values, a multiple of ``multiple``; the same on all ranks."""

    def encode(self, values: torch.Tensor, message: torch.Tensor, residual: torch.Tensor) -> None:
        """Write ``values`` to ``message``, and what it does not hold to ``residual``.

        With a value that is infinite or NaN ``message`` decodes to NaN, and ``residual`` stays as it is.
        """

    def add_decoded(self, message: torch.Tensor, out: torch.Tensor) -> None:
        """Add what ``message`` holds to ``out``."""


@runtime_checkable
class PieceWriter(Protocol):
    """A codec that also decodes straight to where values belong, which saves two passes over memory."""

    def write_decoded(
        self, message: torch.Tensor, pieces: Sequence[torch.Tensor], starts: Sequence[int]
    ) -> None:
        """Write to each of ``pieces``, flat and float32, what ``message`` holds from the place of ``starts`` on.

        The same numbers as `Codec.add_decoded` makes of zeros.
        """


def all_finite(values: torch.Tensor) -> bool | torch.Tensor:
    """Tell whether no value is infinite or NaN; of a device's values by a tensor, so that the host need not wait."""
    if values.device.type != "cpu":
        return torch.isfinite(values).all()
    # Of finite float32 the sum may overflow, so a second look decides.
    return math.isfinite(values.sum()) or bool(torch.isfinite(values).all())


def tiles(rows: int, *tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Cut all tensors alike, into so many rows, for a core; a device takes all at once."""
    return zip(*[each.split(rows) if each.device.type == "cpu" else [each] for each in tensors], strict=True)


class Scratch(threading.local):
    """Floats for a moment: each thread has its own of the host's, which grow as needed.

    The kernel maps a fresh tensor of megabytes page by page, which takes longer than to write it. A thread may use what
    it took until it takes again.
    """

    def __init__(self) -> None:
        self._floats = torch.empty(0)

    def take(self, numel: int, device: torch.device = _HOST) -> torch.Tensor:
        """Return ``numel`` float32 that hold anything."""
        if device.type != "cpu":
            return torch.empty(numel, device=device)  # torch keeps a device's memory itself
        if self._floats.numel() < numel:
            self._floats = torch.empty(numel)
        return self._floats[:numel]

    def like(self, values: torch.Tensor) -> torch.Tensor:
        """Return as many float32 as there are ``values``, in their shape."""
        return self.take(values.numel(), values.device).view(values.shape)


scratch = Scratch()
"""Of the size of a tile; no caller sees it."""


# --- codecs as former versions took them ---------------------------------------------------------------------------


class Encoded(NamedTuple):
    """What an encoder of former versions says of one message.

    Args:
        finite: False: the values hold Inf or NaN, neither the message nor the residual was written.
        wanted: how many elements the codec would have sent, had there been room.
        memory: for the next message of the same values; any object, or None.
    """

    finite: bool
    wanted: int
    memory: Any


@dataclass(frozen=True)
class Former:
    """A codec with ``room``, and with ``encode`` and ``add_decoded`` of lengths; without its memory. On the CPU."""

    codec: Any
    multiple: int = 1

    @classmethod
    def of(cls, codec: Any) -> "Former":
        """Serve ``codec``, and warn."""
        warnings.warn(
            f"{type(codec).__name__} has room(lengths, wanted), which codecs of the next version do not have: its "
            "messages have one size from now on, and its memory is not kept; give it multiple, nbytes(numel), "
            "encode(values, message, residual) and add_decoded(message, out), see crossover_ddp.codecs.Codec",
            FutureWarning,
            stacklevel=2,
        )
        return cls(codec)

    def nbytes(self, numel: int) -> int:
        """Return the bytes of a message."""
        return _HEAD_BYTES + int(self.codec.room([numel]))

    def encode(self, values: torch.Tensor, message: torch.Tensor, residual: torch.Tensor) -> None:
        """Write a message whose head is 0, or NaN."""
        encoded = self.codec.encode(values, [values.numel()], message[_HEAD_BYTES:], residual)
        message[:4].view(torch.float32).fill_(0.0 if encoded.finite else torch.nan)

    def add_decoded(self, message: torch.Tensor, out: torch.Tensor) -> None:
        """Add what a message holds."""
        if message[:4].view(torch.float32).isnan():
            out.fill_(torch.nan)
        else:
            self.codec.add_decoded(message[_HEAD_BYTES:], [out.numel()], out)

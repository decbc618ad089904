"""What a codec is: it writes some tensors into a message and says what the message does not hold.

[Note: error feedback] ``encode`` is given gradient plus residual, and leaves in the residual what the message does not
hold, so that nothing is lost but only late: values = decoded + residual. What a message decodes to is defined in
float32, whatever the values are, so all ranks that decode the same bytes have the same numbers.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch


class Encoded(NamedTuple):
    """What an encoder says of one message.

    Args:
        finite: False: the values hold Inf or NaN, neither the message nor the residual was written.
        wanted: how many elements the codec would have sent, had there been room.
        memory: for the next message of the same values; any object, or None.
    """

    finite: bool
    wanted: int
    memory: Any


class Codec(Protocol):
    """How tensors become a message of bytes. Frozen and pure: what changes from step to step is ``memory``.

    The tensors of a message come as one flat tensor ``values`` and their ``lengths`` in it. A message is a tensor of
    bytes that begins at a multiple of 16 bytes.
    """

    def room(self, lengths: Sequence[int], wanted: int | None = None) -> int:
        """Return how many bytes the next message gets, given what the last one wanted; None: there was none."""

    def encode(
        self,
        values: torch.Tensor,
        lengths: Sequence[int],
        message: torch.Tensor,
        residual: torch.Tensor,
        memory: Any = None,
    ) -> Encoded:
        """Write ``values`` into ``message``, and what it does not hold into ``residual``."""

    def add_decoded(self, message: torch.Tensor, lengths: Sequence[int], out: torch.Tensor) -> None:
        """Add what ``message`` holds to ``out``, a flat tensor of all lengths."""


@runtime_checkable
class PieceWriter(Protocol):
    """A codec that also decodes straight to where values belong, which saves two passes over memory."""

    def write_decoded(
        self, message: torch.Tensor, lengths: Sequence[int], pieces: Sequence[torch.Tensor]
    ) -> None:
        """Write what ``message`` holds to ``pieces``, one flat tensor for each of ``lengths``, of any dtype.

        The same numbers as `Codec.add_decoded` makes of zeros.
        """


@runtime_checkable
class DeviceCodec(Protocol):
    """A codec whose messages have one size, and whose work the host launches without a look at any value.

    The host of a GPU runs ahead of it; whatever it wants to know of a tensor it has to wait for.
    """

    def encode_on_device(
        self, values: torch.Tensor, lengths: Sequence[int], message: torch.Tensor, residual: torch.Tensor
    ) -> None:
        """As `Codec.encode`, but values with Inf or NaN leave a message that decodes to NaN, and the residual alone."""

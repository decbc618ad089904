"""One message of a bucket: from a rank to an owner, or from an owner to all.

[Note: the header] Two int32: the first says whether the values are finite, the second how many bytes the codec has in
the *next* message of the same way. So a receiver knows the size of what comes without asking for it. A message whose
values hold Inf or NaN has nothing but its header; it decodes to NaN, which GradScaler looks for.
"""

from collections.abc import Sequence

import torch

from .cut import Part, Shape

_FINITE, _NEXT_ROOM = 0, 1


class CodedMessage:
    """A message's bytes, and where its parts are.

    Args:
        part: what it is about.
        room: bytes of the codec.
        memory: to hold it, of `total` bytes.
    """

    def __init__(self, part: Part, room: int, memory: torch.Tensor) -> None:
        self._part = part
        self._shape = Shape.of(part, room)
        self.bytes = memory

    @property
    def used(self) -> torch.Tensor:
        """For each coded segment whether its parameter is in use: not 0."""
        return self.bytes[self._shape.used : self._shape.used + len(self._part.coded)]

    @property
    def exact(self) -> torch.Tensor:
        """Values that travel in float32."""
        begin = self._shape.exact
        return self.bytes[begin : begin + 4 * self._part.exact_numel].view(torch.float32)

    @property
    def coded(self) -> torch.Tensor:
        """The codec's bytes."""
        return self.bytes[self._shape.coded :]

    def seal(self, *, finite: bool, next_room: int) -> None:
        """Write the header, see [Note: the header]."""
        header = self._header
        header[_FINITE], header[_NEXT_ROOM] = int(finite), next_room

    def opened(self) -> tuple[bool, int]:
        """Return what `seal` wrote."""
        header = self._header.tolist()
        return bool(header[_FINITE]), int(header[_NEXT_ROOM])

    @property
    def _header(self) -> torch.Tensor:
        return self.bytes[:8].view(torch.int32)


def total(part: Part, room: int) -> int:
    """Return the bytes of a message."""
    return Shape.of(part, room).stop


def views(flat: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
    """Cut a flat tensor into consecutive pieces."""
    # Tensor.split does the same with several times the overhead.
    return list(flat.split_with_sizes(list(lengths))) if lengths else []

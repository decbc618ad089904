"""Increments: the change of a rank's parameters since it last sent them.

[Note: increments] With a codec, a rank does not send its parameters x but u = x - c. The vector c is
common to all ranks: the parameters before the first local step or at the last average, plus all
results since. Owners return y, the mean of u, coded as well. When y arrives, c becomes c + y. The
rank adds y - u to its parameters, which keeps its progress in the meantime. With exact messages this
is the delta rule. A codec's error is small beside an increment, but not beside a parameter. All
ranks decode the same y, so c has the same bits everywhere.

A message's residual is kept for the next message. Until then it is in no rank's parameters, so
residuals are added to them before an exact average.

With an outer optimizer y is the change of z, the parameters after the last outer step, so that c is
z without the owners' residuals. Buffers are averaged as they are.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from crossover_ddp._engine.buckets import Run
from crossover_ddp._engine.links import Layout, Link


class VectorCodec(Protocol):
    """The codec of one vector, with its residuals; see `CodedVector` of the codecs."""

    # The bytes that this rank has sent, and those that it would have sent without a codec.
    sent_bytes: int
    exact_bytes: int

    def around(self, values: torch.Tensor, layout: Layout, link: Link) -> Link:
        """Encode ``values``, and return the link that carries the messages."""

    def add_left_out(self, values: torch.Tensor) -> None:
        """Add the residuals to ``values``. Their mean over the ranks is missing so far."""

    def forget(self) -> None:
        """Drop the residuals."""

    @property
    def nbytes(self) -> int:
        """The size of the residuals in bytes."""


MakeCodec = Callable[[Sequence[Run]], VectorCodec]


class Increments:
    """The increments of one slice of a block.

    Args:
        common: the vector c, for the slice's parameters.
        codec: their codec.
    """

    def __init__(self, common: torch.Tensor, codec: VectorCodec) -> None:
        self.common = common
        self.codec = codec

    def take(self, values: torch.Tensor) -> None:
        """Replace the parameters at the beginning of ``values`` by increments."""
        values[: len(self.common)].sub_(self.common)

    def land(self, result: torch.Tensor) -> None:
        """Add the result of an exchange to c."""
        self.common.add_(result[: len(self.common)])

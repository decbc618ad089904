"""Increments: the progress of a rank's parameters since the last exchange.

[Note: increments] With a codec, a rank does not send its parameters x but u = x - c. The vector c is
common to all ranks: the parameters before the first local step, plus all results so far. Owners
return y, the mean of u, coded as well, and both halves keep their errors for the next exchange. When
y arrives, c becomes c + y. The rank adds y - u to its parameters, which keeps the progress made
meanwhile. Without a codec this is the delta rule. A codec's error is small beside an increment, but
not beside a parameter. Since all ranks decode the same y, c has the same bits everywhere.

With an outer optimizer c is z, the parameters after the last outer step, and y is the change of z.
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

    def forget(self) -> None:
        """Drop the residuals."""

    @property
    def nbytes(self) -> int:
        """The size of the residuals in bytes."""


MakeCodec = Callable[[Sequence[Run]], VectorCodec]


class Increments:
    """The increments of one slice of the flat parameters.

    Args:
        common: the vector c, which the caller may still fill.
        codec: the codec of the slice. Default: increments travel exactly.
    """

    def __init__(self, common: torch.Tensor, codec: VectorCodec | None = None) -> None:
        self.common = common
        self.codec = codec

    def around(self, values: torch.Tensor, layout: Layout, link: Link) -> Link:
        """Encode increments, and return the link that carries them."""
        return link if self.codec is None else self.codec.around(values, layout, link)

    def forget(self) -> None:
        """Drop the residuals: all ranks are about to get the same exact parameters."""
        if self.codec is not None:
            self.codec.forget()

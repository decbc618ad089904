"""The largest elements by a threshold that is kept for long: DCT."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .codec import Encoded
from .sparse_message import add_chosen, next_room, write_chosen

# Between two refreshes the number of elements above the threshold drifts, and the room with it, as far as this.
_MOST = 4.0


class _Kept(NamedTuple):
    threshold: float
    age: int


@dataclass(frozen=True)
class Threshold:
    """Send the elements above a threshold, which is the exact one for ``rate`` every ``refresh_steps`` messages.

    Eight bytes for each element sent, so wire bytes over those of float32 are about twice ``rate``. The number sent
    drifts until the next refresh, up to four times ``rate``. Source: DCT (arXiv 2010.08899).

    Args:
        rate: part of the elements that is sent, 0 < rate < 1.
        refresh_steps: messages from one exact threshold to the next one; 2000 as in the paper.

    Raises ``ValueError`` for other values.
    """

    rate: float
    refresh_steps: int = 2000

    def __post_init__(self) -> None:
        check_rate(self.rate)
        if self.refresh_steps < 1:
            raise ValueError(
                f"expected refresh_steps >= 1, got refresh_steps={self.refresh_steps}; 2000 is the default"
            )

    def room(self, lengths: Sequence[int], wanted: int | None = None) -> int:
        """Return the bytes of the next message; see `Codec.room`."""
        return next_room(lengths, self.rate, wanted, _MOST)

    def encode(
        self,
        values: torch.Tensor,
        lengths: Sequence[int],
        message: torch.Tensor,
        residual: torch.Tensor,
        memory: Any = None,
    ) -> Encoded:
        """Write the elements above the threshold; ``memory`` keeps it. See `Codec.encode`."""
        if memory is None or memory.age >= self.refresh_steps:
            memory = _Kept(_exact(values.abs(), self.rate), 0)
        written = write_chosen(values, memory.threshold, message, residual)
        return written._replace(memory=memory._replace(age=memory.age + 1) if written.finite else None)

    def add_decoded(self, message: torch.Tensor, lengths: Sequence[int], out: torch.Tensor) -> None:
        """Add the elements; see `Codec.add_decoded`."""
        add_chosen(message, out)


def check_rate(rate: float) -> None:
    """Raise if ``rate`` is no part."""
    if not 0 < rate < 1:
        raise ValueError(f"expected 0 < rate < 1, got rate={rate}; 0.01 sends one element of a hundred")


def _exact(magnitudes: torch.Tensor, rate: float) -> float:
    """Return the largest magnitude that is not among the ``rate`` largest; 0 of nothing."""
    count = int(rate * magnitudes.numel()) + 1
    if count > magnitudes.numel():
        return 0.0
    return float(torch.topk(magnitudes, count).values[-1])

"""All of the values, in float32: what travels in a step that empties residuals."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .codec import Encoded


@dataclass(frozen=True)
class Whole:
    """Send each element as it is."""

    def room(self, lengths: Sequence[int], wanted: int | None = None) -> int:
        """Return the bytes of a message; always the same."""
        return 4 * sum(lengths)

    def encode(
        self,
        values: torch.Tensor,
        lengths: Sequence[int],
        message: torch.Tensor,
        residual: torch.Tensor,
        memory: Any = None,
    ) -> Encoded:
        """Write the values; see `Codec.encode`."""
        if not bool(torch.isfinite(values).all()):
            return Encoded(False, values.numel(), None)
        self._view(message, lengths).copy_(values)
        residual.zero_()
        return Encoded(True, values.numel(), None)

    def add_decoded(self, message: torch.Tensor, lengths: Sequence[int], out: torch.Tensor) -> None:
        """Add the values; see `Codec.add_decoded`."""
        out.add_(self._view(message, lengths))

    def _view(self, message: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        return message[: 4 * sum(lengths)].view(torch.float32)

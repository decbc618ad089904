"""A codec of a user's own: values travel as they are."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from crossover_ddp.codecs import Encoded


@dataclass(frozen=True)
class Identity:
    """Values as they are."""

    def room(self, lengths: Sequence[int], wanted: int | None = None) -> int:
        return 4 * sum(lengths)

    def encode(
        self,
        values: torch.Tensor,
        lengths: Sequence[int],
        message: torch.Tensor,
        residual: torch.Tensor,
        memory: Any = None,
    ) -> Encoded:
        message[: 4 * sum(lengths)].view(torch.float32).copy_(values)
        residual.zero_()
        return Encoded(True, values.numel(), None)

    def add_decoded(self, message: torch.Tensor, lengths: Sequence[int], out: torch.Tensor) -> None:
        out.add_(message[: 4 * sum(lengths)].view(torch.float32))

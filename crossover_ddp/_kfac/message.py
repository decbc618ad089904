"""What each rank sends to all others at the end of a step, see [Note: messages] in `payload`."""

from typing import NamedTuple

import torch
from torch import Tensor


class Message(NamedTuple):
    """A rank's share of the KL clip's sum, and the numbers of its columns."""

    kl_sum: Tensor
    counts: Tensor

    @staticmethod
    def size_bytes(count_numel: int) -> int:
        """Return the size: eight bytes, and four for each count, in multiples of eight."""
        return 8 + -(-4 * count_numel // 8) * 8

    def pack(self, out: Tensor) -> None:
        """Write the raw bytes."""
        size = out.numel() * out.itemsize
        raw = torch.zeros(size, dtype=torch.uint8, device=out.device)
        raw[:8] = self.kl_sum.reshape(1).view(torch.uint8)
        raw[8 : 8 + self.counts.numel() * 4] = self.counts.view(torch.uint8)
        out.copy_(raw.view(out.dtype))

    @classmethod
    def unpack(cls, message: Tensor, count_numel: int) -> "Message":
        """Read them again."""
        raw = message.clone().view(torch.uint8)
        return cls(
            raw[:8].clone().view(torch.float64), raw[8 : 8 + 4 * count_numel].clone().view(torch.int32)
        )

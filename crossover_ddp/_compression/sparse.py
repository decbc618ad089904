"""The largest elements, by a threshold that one look at a sample finds."""

from dataclasses import dataclass
from typing import ClassVar, Final

import torch

from crossover_ddp._engine.links import all_finite

_HEAD_BYTES: Final = 4
_ENTRY_BYTES: Final = 8
# Room for so many times the elements that are wanted; what does not fit follows later.
_MOST: Final = 1.25
# A sixteenth of the elements, evenly spaced, but so many at least, and so many of those to be sent.
_SAMPLE_EVERY: Final = 16
_SAMPLE_NUMEL: Final = 1 << 14
_SAMPLE_SENT: Final = 128


@dataclass(frozen=True)
class SIDCo:
    """Send the elements whose magnitude is above a threshold that about ``rate`` of a sample exceeds.

    The sample has a sixteenth of the elements. A message holds places (int32) and values (float32), and has room for
    1.25 times the target; what does not fit follows later. Wire bytes over those of float32: 2.5 times ``rate``.
    Source: SIDCo (arXiv 2101.10761) for a threshold in place of a sort; it fits a distribution, where we look at a
    sample.

    Args:
        rate: part of the elements that is sent, 0 < rate < 1.

    Raises ``ValueError`` for another ``rate``.
    """

    rate: float
    multiple: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if not 0 < self.rate < 1:
            raise ValueError(
                f"expected 0 < rate < 1, got rate={self.rate}; 0.01 sends a hundredth of the elements"
            )

    def nbytes(self, numel: int) -> int:
        """Return the bytes of a message; see `Codec.nbytes`."""
        return _HEAD_BYTES + _ENTRY_BYTES * min(numel, int(_MOST * self.rate * numel) + 1)

    def encode(self, values: torch.Tensor, message: torch.Tensor, residual: torch.Tensor) -> None:
        """Write the elements above the threshold; see `Codec.encode`."""
        head, places, sent = _views(message)
        if not bool(all_finite(values)):
            head.fill_(torch.nan)
            return
        message.zero_()
        chosen = torch.nonzero(values.abs() >= self._threshold(values)).view(-1)
        picked = values[chosen]
        if len(chosen) > len(places):
            largest = torch.topk(picked.abs(), len(places), sorted=False).indices
            chosen, picked = chosen[largest], picked[largest]
        places[: len(chosen)] = chosen
        sent[: len(chosen)] = picked
        residual.copy_(values)
        residual[chosen] = 0

    def add_decoded(self, message: torch.Tensor, out: torch.Tensor) -> None:
        """Add the elements; see `Codec.add_decoded`."""
        head, places, sent = _views(message)
        if bool(head.isnan()):
            out.fill_(torch.nan)
        else:
            out.index_add_(0, places, sent)

    def _threshold(self, values: torch.Tensor) -> float:
        """Return the magnitude that about ``rate`` of the elements reach: so many of a sample do."""
        least = max(_SAMPLE_NUMEL, int(_SAMPLE_SENT / self.rate))
        sample = values[:: min(_SAMPLE_EVERY, max(1, values.numel() // least))].abs()
        wanted = max(1, round(self.rate * sample.numel()))
        reached = float(torch.topk(sample, wanted, sorted=False).values.amin())
        return max(reached, torch.finfo(values.dtype).tiny)  # above 0, or zeros would be sent


class Threshold(SIDCo):
    """The same as `SIDCo`, under the name of DCT (arXiv 2010.08899), which keeps its threshold for long."""


def _views(message: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    half = (message.numel() - _HEAD_BYTES) // 2
    head, places, sent = message.split_with_sizes([_HEAD_BYTES, half, half])
    return head.view(torch.float32), places.view(torch.int32), sent.view(torch.float32)

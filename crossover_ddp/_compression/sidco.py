"""The largest elements by a threshold that a fitted distribution predicts: SIDCo."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch

from .codec import Encoded
from .sparse_message import add_chosen, next_room, write_chosen
from .threshold import check_rate

_FIRST_RATE: Final = 0.25
_MOST: Final = 1.25
_PATIENCE: Final = 5
_MIN_STAGES, _MAX_STAGES = 1, 6
_FIRST_STAGES: Final = 3
# A fit reads a sixteenth of the elements, evenly spaced, but so many at least, and so many of those to be sent.
_SAMPLE_EVERY: Final = 16
_SAMPLE_NUMEL: Final = 1 << 14
_SAMPLE_SENT: Final = 128
# A threshold that so much more or less of the sample exceeds is fitted once more, with the aim corrected.
_GOOD: Final = (0.9, 1.12)
_FITS: Final = 3
# With fewer elements a fit says less than the elements themselves.
_FEW: Final = 32
_MOST_AIM: Final = 8.0


class _Fitted(NamedTuple):
    """What the next message needs to know.

    ``aim`` corrects the rate that the fit is asked for: it is what the fit has turned into the target lately.
    """

    stages: int = _FIRST_STAGES
    aim: float = 1.0
    calls: int = 0
    achieved: float = 0.0


@dataclass(frozen=True)
class SIDCo:
    """Send the elements above a threshold that a generalised Pareto distribution predicts for ``rate``.

    The distribution is fitted to a sixteenth of the magnitudes in a few stages, each on what exceeds the threshold of
    the one before. Every five messages there is one stage fewer if too much was sent, one more if too little. A message
    has room for 1.25 times the target; what does not fit follows later. Wire bytes over those of float32: about twice
    ``rate``. Source: SIDCo (arXiv 2101.10761), its "SPP" of Pareto; the sample, and that the aim is corrected by what
    was achieved, are our design.

    Args:
        rate: part of the elements that is sent, 0 < rate < 1.

    Raises ``ValueError`` for another ``rate``.
    """

    rate: float

    def __post_init__(self) -> None:
        check_rate(self.rate)

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
        """Write the elements above the threshold; ``memory`` keeps how it is found. See `Codec.encode`."""
        fitted = _Fitted() if memory is None else memory
        sample = _sample(values, self.rate).abs().double()  # squares of float32 may overflow
        for _ in range(_FITS):
            threshold = pareto_threshold(sample, min(1.0, self.rate * fitted.aim), fitted.stages)
            if not math.isfinite(threshold):
                return Encoded(False, values.numel(), memory)
            share = int(sample.gt(threshold).sum()) / max(1.0, self.rate * sample.numel())
            if _GOOD[0] <= share <= _GOOD[1]:
                break
            fitted = fitted._replace(aim=_corrected(fitted.aim, share))
        written = write_chosen(values, threshold, message, residual)
        if not written.finite:
            return written._replace(memory=memory)
        return written._replace(
            memory=_adapted(fitted, written.wanted / max(1.0, self.rate * values.numel()))
        )

    def add_decoded(self, message: torch.Tensor, lengths: Sequence[int], out: torch.Tensor) -> None:
        """Add the elements; see `Codec.add_decoded`."""
        add_chosen(message, out)


def pareto_threshold(magnitudes: torch.Tensor, rate: float, stages: int) -> float:
    """Return the magnitude that about ``rate`` of the elements exceed.

    NaN or infinity if there is one among them, or if nothing can be said.

    Args:
        magnitudes: a sample, not negative, in float64.
        rate: 0 < rate <= 1.
        stages: number of fits, at least 1.
    """
    left = magnitudes
    if stages == 1 or rate >= _FIRST_RATE:
        rates = [rate]
    else:
        rates = [_FIRST_RATE] + [(rate / _FIRST_RATE) ** (1 / (stages - 1))] * (stages - 1)
    floor, wanted = 0.0, rate * left.numel()
    for each in rates:
        if left.numel() < _FEW:
            return _kth(left, wanted, floor)
        floor += _excess(left - floor if floor else left, each)
        left = left[left.gt(floor)] if math.isfinite(floor) else left[:0]
    return floor


def _excess(excesses: torch.Tensor, rate: float) -> float:
    """Return what ``rate`` of a generalised Pareto distribution exceeds, fitted by its first two moments."""
    # torch.var_mean takes ten times as long; in float64 the difference of squares is exact enough.
    mean = float(excesses.sum()) / excesses.numel()
    variance = float(excesses.dot(excesses)) / excesses.numel() - mean * mean
    if not math.isfinite(mean) or not math.isfinite(variance):
        return math.nan
    if variance <= 1e-12 * mean * mean:
        return mean * (1 - 1e-6)
    ratio = mean * mean / variance
    shape, scale = (ratio - 1) / 2, mean * (ratio + 1) / 2
    if abs(shape) < 1e-6:
        return -scale * math.log(rate)
    return float(scale * (1 - rate**shape) / shape)


def _kth(left: torch.Tensor, wanted: float, floor: float) -> float:
    """Return the largest magnitude that is not among the ``wanted`` largest."""
    count = int(wanted) + 1
    return floor if count > left.numel() else float(torch.topk(left, count).values[-1])


def _sample(values: torch.Tensor, rate: float) -> torch.Tensor:
    least = max(_SAMPLE_NUMEL, int(_SAMPLE_SENT / rate))
    return values[:: min(_SAMPLE_EVERY, max(1, values.numel() // least))]


def _corrected(aim: float, ratio: float) -> float:
    return min(_MOST_AIM, max(1 / _MOST_AIM, aim / min(2.0, max(0.5, ratio))))


def _adapted(fitted: _Fitted, ratio: float) -> _Fitted:
    """Correct the number of stages now and then by what the fit achieved on its own."""
    achieved, calls, stages = fitted.achieved + ratio / fitted.aim, fitted.calls + 1, fitted.stages
    if calls < _PATIENCE:
        return fitted._replace(calls=calls, achieved=achieved)
    mean = achieved / calls
    stages += (mean < 0.8) - (mean > 1.2)
    return _Fitted(min(_MAX_STAGES, max(_MIN_STAGES, stages)), fitted.aim)

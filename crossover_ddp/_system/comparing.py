"""Decides which of several ways to train is faster, by blocks of steps in each way.

[Note: scatter] Times of steps scatter, by 1 % on an idle machine and by a factor of two on a busy
one. So no fixed difference is enough to decide. The callers compare blocks that follow each other
closely, because the machine's pace changes, and measure how much these differences scatter. A
decision is made as soon as it would not change if the true difference were two standard errors
away. An evaluation, or a busy minute, changes few of the differences. It increases their scatter,
so more blocks are measured, and it hardly changes their median. Our design.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Final

LAST_PAIR: Final = 8
"""After this many pairs of blocks, `is_faster` decides even if the difference is small."""
FIRST_PAIR: Final = 2
"""With fewer pairs of blocks nothing is known of their scatter, and nothing is decided."""
HYSTERESIS: Final = math.log(1.02)
"""The current way is kept unless the other way is faster by more than this. It is the logarithm of
a ratio of times."""
_STANDARD_ERRORS: Final[Mapping[int, float]] = {2: 6.0, 3: 3.0, 4: 2.4}
"""By the number of measurements: how many standard errors are enough. The scatter of a few
measurements is not well known; these are about Student's quantiles for 95 %."""


def scatter_of(differences: Sequence[float]) -> float:
    """Return the standard deviation of ``differences``; infinity if there are fewer than two."""
    return statistics.stdev(differences) if len(differences) >= FIRST_PAIR else math.inf


def usual_scatter_of(differences: Sequence[float]) -> float:
    """Return the standard deviation of ``differences``, of which a few outliers do not count."""
    middle = statistics.median(differences)
    # The factor holds for a normal distribution.
    return 1.48 * statistics.median([abs(each - middle) for each in differences])


def uncertainty(scatter: float, count: int) -> float:
    """Return how far the mean or median of ``count`` measurements may be from the true value.

    ``scatter`` is their standard deviation.
    """
    if count < FIRST_PAIR:
        return math.inf
    return _STANDARD_ERRORS.get(count, 2.0) * scatter / math.sqrt(count)


def is_faster(gain: float, pairs: int, scatter: float, needed: float = HYSTERESIS) -> bool | None:
    """Return whether the second way is faster than the first, or None to measure another pair.

    Args:
        gain: the logarithm of the first way's step time divided by the second way's.
        pairs: how many blocks were measured in each way.
        scatter: the standard deviation of the gain from pair to pair; see `scatter_of`.
        needed: the gain that the second way must exceed. Pass a negative value if the second way is
            the current one.
    """
    if pairs < LAST_PAIR and abs(gain - needed) <= uncertainty(scatter, pairs):
        return None
    return gain > needed

"""Decides which of two ways to train is faster, by comparing alternating blocks of steps.

The caller runs one block of steps in each way, and calls `is_faster` after each pair of blocks.
Our design.
"""

import math
from collections.abc import Mapping
from typing import Final

LAST_PAIR: Final = 8
"""After this many pairs of blocks, `is_faster` decides even if the difference is small."""
PLAIN: Final[Mapping[int, float]] = {2: 0.40, 3: 0.20, 4: 0.10, 6: 0.05}
"""The difference that is enough to decide after each number of pairs, as the logarithm of a ratio
of times."""
HYSTERESIS: Final = math.log(1.02)
"""The current way is kept unless the other way is faster by more than this. It is the logarithm of
a ratio of times."""


def is_faster(gain: float, pairs: int, needed: float = HYSTERESIS) -> bool | None:
    """Return whether the second way is faster than the first, or None to measure another pair.

    Args:
        gain: the logarithm of the first way's step time divided by the second way's.
        pairs: how many blocks were measured in each way.
        needed: the gain that the second way must exceed after the last pair. Pass a negative value
            if the second way is the current one.
    """
    if pairs >= LAST_PAIR:
        return gain > needed
    plain = min((each for count, each in PLAIN.items() if pairs >= count), default=math.inf)
    return None if abs(gain) < plain else gain > 0

"""Decides which of two ways to train is faster, from alternating blocks of steps. Our design.

The caller runs a block of steps of each kind, and calls `is_faster` after each pair of blocks.
"""

import math
from collections.abc import Mapping
from typing import Final

LAST_PAIR: Final = 8
"""After this many pairs of blocks any difference decides."""
PLAIN: Final[Mapping[int, float]] = {2: 0.40, 3: 0.20, 4: 0.10, 6: 0.05}
"""Difference that decides after each number of pairs, as the logarithm of a ratio of times."""
HYSTERESIS: Final = math.log(1.02)
"""The current way is kept unless the other one is faster by more than this."""


def is_faster(gain: float, pairs: int, needed: float = HYSTERESIS) -> bool | None:
    """Return whether the second way is faster than the first. None means: measure another pair.

    Args:
        gain: logarithm of the ratio of two step times, the first way's over the second's.
        pairs: how many blocks of each kind were measured.
        needed: least gain that decides after the last pair. Pass a negative one if the second way
            is the current one.
    """
    if pairs >= LAST_PAIR:
        return gain > needed
    plain = min((each for count, each in PLAIN.items() if pairs >= count), default=math.inf)
    return None if abs(gain) < plain else gain > 0

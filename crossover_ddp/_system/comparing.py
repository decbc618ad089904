"""When is it plain which of two ways to train is faster? Our design.

Blocks of steps of both kinds alternate, and after each pair of blocks somebody asks.
"""

import math
from collections.abc import Mapping
from typing import Final

LAST_PAIR: Final = 8
"""After so many blocks of each kind any difference decides."""
PLAIN: Final[Mapping[int, float]] = {2: 0.40, 3: 0.20, 4: 0.10, 6: 0.05}
"""After so many blocks of each kind so large a difference decides, as the logarithm of a ratio of times."""
HYSTERESIS: Final = math.log(1.02)
"""What is done now is left for what is faster by so much."""


def is_faster(gain: float, pairs: int, needed: float = HYSTERESIS) -> bool | None:
    """Return whether the second way is faster than the first; None while that is not plain.

    Args:
        gain: the logarithm of a step's time in the first way over that in the second.
        pairs: how many blocks of each kind were measured.
        needed: the gain that decides after the last pair; negative if the second way is what is done now.
    """
    if pairs >= LAST_PAIR:
        return gain > needed
    plain = min((each for count, each in PLAIN.items() if pairs >= count), default=math.inf)
    return None if abs(gain) < plain else gain > 0

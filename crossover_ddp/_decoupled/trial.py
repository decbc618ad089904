"""Times deferred and undeferred steps by the host's clock to see which are faster. Our own design.

[Note: trial of deferring] Deferring costs processor time. It saves only time that would otherwise
be spent waiting: none on a fast link, and little if there are few buckets. Only training shows
whether the cost or the gain is larger. So once buckets have settled, blocks of steps are
alternately deferred and not. As soon as the difference is clear, all ranks keep the kind that was
faster for the slowest rank. Deferring must save at least 2 %, because it also costs processor time
that is not measured. A step that is not deferred runs like the split hook's, with the same
additions as a deferred step. So the results are the same, bit for bit, whichever kind is chosen.
The trial counts backward passes because all ranks run the same number of them, whatever else a rank
does.
"""

import logging
import math
import statistics
import time
from typing import Final

import torch

from crossover_ddp._engine.exchange import Exchange
from crossover_ddp._system.comparing import is_faster

logger = logging.getLogger(__name__)

WARM_UP: Final = 6
"""The number of backward passes on settled buckets to skip: the first ones record and check."""
BLOCK: Final = 5
"""The length of a block in backward passes. The first is not timed: it ends the previous kind."""


class Trial:
    """Decides which backward passes are deferred."""

    _clock = staticmethod(time.monotonic)

    def __init__(self) -> None:
        # Whether the next backward pass is deferred; the same on all ranks.
        self.defers = True
        # Whether the trial has decided.
        self.is_over = False
        # The number of backward passes on settled buckets, and the time when the block began.
        self._count = 0
        self._begin_s = 0.0
        # The seconds per step in each block: deferred blocks first, then the others.
        self._step_s: tuple[list[float], list[float]] = ([], [])

    def backward_ended(self, exchange: Exchange, device: torch.device) -> None:
        """Record the end of a backward pass on settled buckets; the gradients are on ``device``.

        This is **collective** after each pair of blocks.
        """
        if self.is_over:
            return
        block, place = divmod(self._count - WARM_UP, BLOCK)
        if block >= 0 and place in (0, BLOCK - 1):
            if device.type == "cuda":  # on a CPU the host waits anyway
                torch.cuda.synchronize(device)
            now_s = self._clock()
            if place:
                self._step_s[block % 2].append((now_s - self._begin_s) / place)
            self._begin_s = now_s
        self._count += 1
        block, place = divmod(self._count - WARM_UP, BLOCK)
        self.defers = block < 0 or block % 2 == 0
        if place or not self.defers or block <= 0:
            return
        # The low median, because an evaluation may have slowed down some of the blocks.
        numbers = exchange.gather_numbers([*map(statistics.median_low, self._step_s)], device)
        deferred_s, whole_s = map(max, zip(*numbers, strict=True))
        faster = is_faster(math.log(whole_s / deferred_s), block // 2)
        if faster is None:
            return
        self.defers = faster
        self.is_over = True
        logger.info(
            "decoupled: a step takes %.4f s deferred and %.4f s not deferred; from now on steps "
            "are %sdeferred",
            deferred_s,
            whole_s,
            "" if self.defers else "not ",
        )

"""Tries whether deferring is worth it: steps of both kinds by the host's clock. Our design.

[Note: trial of deferring] Deferring costs processor time. It gains only time that would otherwise
be spent waiting: nothing on a fast link, little where buckets are few. Only training shows which of
them is larger. So when buckets have settled, blocks of steps are alternately deferred and not. All
ranks keep the kind that was faster for the slowest rank, as soon as the difference is plain.
Deferring must save at least 2 %, since it also costs processor time that is not measured. A step
that is not deferred is that of the split hook, whose additions are those of a deferred step: the
results are the same, bit for bit, whatever is chosen. The trial counts backward passes, whose
number is the same on all ranks, whatever else a rank does.
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
"""Backward passes on settled buckets before the trial: the first ones record and check."""
BLOCK: Final = 5
"""Backward passes of one kind in a row. The first one still ends the former kind: not timed."""


class Trial:
    """Decides which backward passes are deferred."""

    _clock = staticmethod(time.monotonic)

    def __init__(self) -> None:
        # Whether the next backward pass is deferred; the same on all ranks.
        self.defers = True
        # Whether that is decided.
        self.is_over = False
        # Number of backward passes on settled buckets, and the moment when the block began.
        self._count = 0
        self._begin_s = 0.0
        # Seconds per step of each block, deferred and not.
        self._step_s: tuple[list[float], list[float]] = ([], [])

    def backward_ended(self, exchange: Exchange, device: torch.device) -> None:
        """Note the end of a backward pass on settled buckets, whose gradients are on ``device``.

        **Collective** after each pair of blocks.
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
        # The lower of two blocks: an evaluation may be in the other.
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

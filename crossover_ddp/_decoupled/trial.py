"""Is deferring worth it? Steps of both kinds by the host's clock. Our design.

[Note: trial of deferring] Deferring costs processor time, and gains only what would otherwise be waited for: nothing
on a fast link, little where buckets are few. Which it is shows only in training. So when buckets have settled, some
steps are deferred and some are not, in turns, and all ranks keep what was faster for the slowest of them, as soon as
that is plain. Deferring must gain something, for it costs processor time in what is not measured, too. What is not
deferred goes the way of the split hook: the additions are those of a deferred step, so that results are the same to
the last bit, whatever is chosen. What counts is the number of backward passes, which is the same on all ranks,
whatever else one of them does.
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
"""Backward passes of one kind in a row. The first of them still ends the former kind, and is not counted."""


class Trial:
    """Decides which backward passes are deferred.

    ``defers``: whether the next one is; the same on all ranks. ``is_over``: whether that is decided for good.
    """

    _clock = staticmethod(time.monotonic)

    def __init__(self) -> None:
        self.defers, self.is_over = True, False
        self._count, self._begin_s = 0, 0.0
        self._step_s: tuple[list[float], list[float]] = [], []  # deferred, and not: of each block

    def backward_ended(self, exchange: Exchange, device: torch.device) -> None:
        """Note the end of a backward pass on settled buckets, whose gradients are on ``device``.

        **Collective** after each pair of blocks.
        """
        if self.is_over:
            return
        block, place = divmod(self._count - WARM_UP, BLOCK)
        if block >= 0 and place in (0, BLOCK - 1):
            if device.type == "cuda":  # elsewhere the host waits anyway
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
        # Of two the one without an evaluation in it.
        numbers = exchange.gather_numbers([*map(statistics.median_low, self._step_s)], device)
        deferred_s, whole_s = map(max, zip(*numbers, strict=True))
        faster = is_faster(math.log(whole_s / deferred_s), block // 2)
        if faster is None:
            return
        self.defers, self.is_over = faster, True
        text = "decoupled: a step takes %.4f s deferred and %.4f s not deferred; from now on steps are %sdeferred"
        logger.info(text, deferred_s, whole_s, "" if self.defers else "not ")

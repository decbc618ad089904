"""Is deferring worth it? Steps of both kinds by the host's clock. Our design.

[Note: trial of deferring] Deferring costs processor time, and gains only what would otherwise be waited for: nothing on
a fast link, little where buckets are few. Which it is shows only in training. So when buckets have settled, some steps
are deferred and some are not, in turns, and all ranks keep what was faster for the slowest of them. What is not
deferred goes the way of the split hook: the additions are those of a deferred step, so that results are the same to the
last bit, whatever is chosen. What counts is the number of backward passes, which is the same on all ranks, whatever
else one of them does.
"""

import logging
import time
from typing import Final

import torch

from crossover_ddp._engine.exchange import Exchange

logger = logging.getLogger(__name__)

WARM_UP: Final = 6
"""Backward passes on settled buckets before the trial: the first ones record and check."""
BLOCK: Final = 5
"""Backward passes of one kind in a row. The first of them still ends the former kind, and is not counted."""
BLOCKS: Final = 4
"""Deferred, not deferred, and so again: one of each kind may contain something else, such as an evaluation."""
END: Final = WARM_UP + BLOCK * BLOCKS
_WORTH_IT: Final = 0.99
"""Not deferring must take less than this part of the time: where both are alike, defer."""


class Trial:
    """Decides which backward passes are deferred.

    ``defers``: whether the next one is; the same on all ranks. ``is_over``: whether that is decided for good.
    """

    _clock = staticmethod(time.monotonic)

    def __init__(self) -> None:
        self.defers, self.is_over = True, False
        self._count, self._begin_s = 0, 0.0
        self._step_s: list[float] = []

    def backward_ended(self, exchange: Exchange, device: torch.device) -> None:
        """Note the end of a backward pass on settled buckets, whose gradients are on ``device``.

        **Collective** at the end of the trial.
        """
        if self.is_over:
            return
        block, place = divmod(self._count - WARM_UP, BLOCK)
        if block >= 0 and place in (0, BLOCK - 1):
            if device.type == "cuda":  # elsewhere the host waits anyway
                torch.cuda.synchronize(device)
            now_s = self._clock()
            if place:
                self._step_s.append((now_s - self._begin_s) / place)
            self._begin_s = now_s
        self._count += 1
        if self._count < END:
            self.defers = max(0, self._count - WARM_UP) // BLOCK % 2 == 0
            return
        own = min(self._step_s[::2]), min(self._step_s[1::2])
        deferred_s, whole_s = map(max, zip(*exchange.gather_numbers(own, device), strict=True))
        self.defers, self.is_over = whole_s > _WORTH_IT * deferred_s, True
        text = "decoupled: a step takes %.4f s deferred and %.4f s not deferred; from now on steps are %sdeferred"
        logger.info(text, deferred_s, whole_s, "" if self.defers else "not ")

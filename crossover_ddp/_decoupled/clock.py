"""Steps by the host's clock: is deferring worth it, and what would a codec change? Our design.

[Note: trial of deferring] Deferring costs processor time, and gains only what would otherwise be waited for: nothing on
a fast link, little where buckets are few. Which it is shows only in training. So when buckets have settled, some steps
are deferred and some are not, in turns, and all ranks keep what was faster for the slowest of them. What is not
deferred goes the way of the split hook: the additions are those of a deferred step, so that results are the same to the
last bit, whatever is chosen. What counts is the number of backward passes, which is the same on all ranks, whatever
else one of them does.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from crossover_ddp._tuning.model import BucketTimes, Workload

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

STEPS_KEPT: Final = 16

Agree = Callable[[Sequence[float]], list[list[float]]]


class Trial:
    """Decides which backward passes are deferred.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.defers = True
        """Whether the next backward pass is deferred; the same on all ranks."""
        self.is_over = False
        self._clock = clock
        self._count = 0
        self._begin_s = 0.0
        self._step_s: list[float] = []

    def backward_ended(self, agree: Agree, settle: Callable[[], None]) -> None:
        """Note the end of a backward pass on settled buckets.

        Args:
            agree: exchanges some numbers, and returns those of every rank by rank. **Collective**; called once.
            settle: makes the device finish what it was given, so that the host's clock shows how long it took.
        """
        if self.is_over:
            return
        place = (self._count - WARM_UP) % BLOCK
        if self._count >= WARM_UP and place in (0, BLOCK - 1):
            settle()
            now_s = self._clock()
            if place:
                self._step_s.append((now_s - self._begin_s) / place)
            self._begin_s = now_s
        self._count += 1
        if self._count == END:
            self._decide(agree)
        elif self._count >= WARM_UP:
            self.defers = (self._count - WARM_UP) // BLOCK % 2 == 0

    def _decide(self, agree: Agree) -> None:
        own = min(self._step_s[::2]), min(self._step_s[1::2])
        deferred_s, whole_s = map(max, zip(*agree(own), strict=True))
        self.defers, self.is_over = whole_s > _WORTH_IT * deferred_s, True
        logger.info(
            "decoupled: a step takes %.4f s deferred and %.4f s not deferred; from now on steps are %sdeferred",
            deferred_s,
            whole_s,
            "" if self.defers else "not ",
        )


class RecordedStep(NamedTuple):
    """Moments of a step whose buckets all came, and were updated, in its forward.

    ``forward_s``: when forward began and ended. By bucket: ``updates``, when forward asked for one, it had come, and it
    was done; ``ready``, its bytes, and when backward had made it.
    """

    forward_s: tuple[float, float]
    updates: Sequence[tuple[float, float, float]]
    ready: Sequence[tuple[int, float]]

    def work(self) -> Workload:
        """Return what was computed, without waits and updates."""
        (begin_s, end_s), updates = self.forward_s, self.updates

        def computed_s(until_s: float) -> float:
            return until_s - begin_s - sum([done - asked for asked, _, done in updates if asked < until_s])

        buckets = [
            BucketTimes(size_bytes, ready_s - end_s, computed_s(asked), done - came)
            for (size_bytes, ready_s), (asked, came, done) in zip(self.ready, updates, strict=True)
        ]
        return Workload(computed_s(end_s), max([each.ready_s for each in buckets]), tuple(buckets))


def typical(steps: Sequence[RecordedStep]) -> Workload | None:
    """Return the work of median compute; None without any."""
    works = sorted([step.work() for step in steps], key=lambda each: each.compute_s)
    return works[len(works) // 2] if works else None

"""Steps by the host's clock: is deferring worth it, and how large should buckets be? Our design.

[Note: trial of deferring] Deferring costs processor time, and gains only what would otherwise be waited for: nothing on
a fast link, little where buckets are few. Which it is shows only in training. So when buckets have settled, some steps
are deferred and some are not, in turns, and all ranks keep what was faster for the slowest of them. What is not
deferred goes the way of the split hook: the additions are those of a deferred step, so that results are the same to the
last bit, whatever is chosen. What counts is the number of backward passes, which is the same on all ranks, whatever
else one of them does.
"""

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import torch
import torch.distributed as dist

from crossover_ddp._tuning.link_probe import recorded_by_all
from crossover_ddp._tuning.model import BucketPlan, BucketTimes, Workload, plan_buckets
from crossover_ddp.errors import UnsupportedConfigurationError

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
    was done; ``ready``, its bytes, and when backward had made it. ``cpu_s``: processor time of other threads.
    """

    forward_s: tuple[float, float]
    updates: Sequence[tuple[float, float, float]]
    ready: Sequence[tuple[int, float]]
    cpu_s: float

    def work(self) -> tuple[Workload, float]:
        """Return what was computed, without waits and updates, and ``cpu_s`` for each half of a bucket's exchange."""
        (begin_s, end_s), updates = self.forward_s, self.updates

        def computed_s(until_s: float) -> float:
            return until_s - begin_s - sum([done - asked for asked, _, done in updates if asked < until_s])

        buckets = [
            BucketTimes(size_bytes, ready_s - end_s, computed_s(asked), done - came)
            for (size_bytes, ready_s), (asked, came, done) in zip(self.ready, updates, strict=True)
        ]
        work = Workload(computed_s(end_s), max([each.ready_s for each in buckets]), tuple(buckets))
        return work, self.cpu_s / (2 * len(buckets))


def typical(steps: Sequence[RecordedStep]) -> tuple[Workload, float] | None:
    """Return the work of median compute; None without any."""
    works = sorted([step.work() for step in steps], key=lambda each: each[0].compute_s)
    return works[len(works) // 2] if works else None


def plan_from(steps: Sequence[RecordedStep], group: dist.ProcessGroup, device: torch.device) -> BucketPlan:
    """Return rank 0's plan on all ranks; see `DecoupledState.plan_buckets`. **Collective**."""
    if device.type != "cpu":
        raise UnsupportedConfigurationError(
            f"expected CPU devices to plan for, got device={device}; choose bucket_cap_mb by hand: "
            "a sixteenth of the model is a good start"
        )
    step = typical(steps)
    if step is not None and torch.get_num_threads() > 1:  # torch's own threads were counted
        step = step[0], 0.0
    recorded, link = recorded_by_all(
        group,
        step,
        "train some ten steps before, without reading parameters between step() and forward, or choose bucket_cap_mb "
        "by hand: a sixteenth of the model is a good start",
    )
    work, cpu_s = recorded[0]
    return plan_buckets(work, dataclasses.replace(link, cpu_s=cpu_s))

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
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

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

_STEPS_KEPT: Final = 16

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


@dataclass
class RecordedStep:
    """One recorded step; seconds since its forward began, of which ``lost_s`` were no compute."""

    begin_s: float
    forward_end_s: float = 0.0
    lost_s: float = 0.0
    reached_s: dict[int, float] = field(default_factory=dict)  # by bucket: when forward needs it
    update_s: dict[int, float] = field(default_factory=dict)
    ready_s: list[float] = field(default_factory=list)  # by bucket: when backward completed it
    buckets: list[int] = field(default_factory=list)  # their bytes
    cpu_s: float = 0.0
    """Processor time of other threads."""


class StepTimes:
    """Record the last steps; not thread-safe, all calls come from the training threads, one after the other.

    Attributes:
        steps: the recorded ones, which all had the same buckets.
    """

    def __init__(self) -> None:
        self.steps: deque[RecordedStep] = deque(maxlen=_STEPS_KEPT)
        self._current: RecordedStep | None = None

    def begin(self) -> None:
        """A forward of the model begins to compute; of several per step the last one counts."""
        self._current = RecordedStep(time.monotonic(), cpu_s=-_other_threads_s())

    def updated(self, number: int, begin_s: float, waited_s: float) -> None:
        """A bucket was asked for at ``begin_s``, had come at ``waited_s``, and has been updated now."""
        step = self._current
        if step is not None and not step.forward_end_s:
            now_s = time.monotonic()
            step.reached_s[number] = begin_s - step.begin_s - step.lost_s
            step.update_s[number] = now_s - waited_s
            step.lost_s += now_s - begin_s

    def forward_ends(self) -> None:
        """Forward has computed."""
        if self._current is not None:
            self._current.forward_end_s = time.monotonic() - self._current.begin_s

    def bucket_ready(self, size_bytes: int) -> None:
        """The next bucket of backward is complete."""
        step = self._current
        if step is not None:
            step.ready_s.append(time.monotonic() - step.begin_s)
            step.buckets.append(size_bytes)

    def end(self) -> None:
        """Backward has computed its last bucket; keep the step only if forward reached every bucket."""
        step, self._current = self._current, None
        if step is None or not len(step.reached_s) == len(step.buckets) > 0:
            return
        step.cpu_s += _other_threads_s()
        # Other buckets: what was recorded before says nothing of them.
        if self.steps and self.steps[-1].buckets != step.buckets:
            self.steps.clear()
        self.steps.append(step)

    def forget(self) -> None:
        """Drop everything: the buckets have changed."""
        self.steps.clear()
        self._current = None


def _other_threads_s() -> float:
    return time.process_time() - time.thread_time()


def plan_from(times: StepTimes, group: dist.ProcessGroup, device: torch.device) -> BucketPlan:
    """Return rank 0's plan on all ranks; see `DecoupledState.plan_buckets`. **Collective**."""
    workload = workload_of(times)
    if device.type != "cpu":
        raise UnsupportedConfigurationError(
            f"expected CPU devices to plan for, got device={device}; choose bucket_cap_mb by hand: "
            "a sixteenth of the model is a good start"
        )
    cpu_s = cpu_s_of(times) if torch.get_num_threads() == 1 else 0.0  # torch's own threads would be counted
    recorded, link = recorded_by_all(
        group,
        None if workload is None else (workload, cpu_s),
        "train some ten steps before, without reading parameters between step() and forward, or choose bucket_cap_mb "
        "by hand: a sixteenth of the model is a good start",
    )
    work, cpu_s = recorded[0]
    return plan_buckets(work, dataclasses.replace(link, cpu_s=cpu_s))


def workload_of(times: StepTimes) -> Workload | None:
    """Return the medians over the recorded steps, or None if there is none."""
    steps = list(times.steps)
    if not steps:
        return None
    buckets = tuple(
        [
            BucketTimes(
                size_bytes,
                statistics.median(step.ready_s[place] - step.forward_end_s for step in steps),
                statistics.median(step.reached_s[place] for step in steps),
                statistics.median(step.update_s[place] for step in steps),
            )
            for place, size_bytes in enumerate(steps[-1].buckets)
        ]
    )
    forward_s = statistics.median(step.forward_end_s - step.lost_s for step in steps)
    return Workload(forward_s, max(bucket.ready_s for bucket in buckets), buckets)


def cpu_s_of(times: StepTimes) -> float:
    """Return the processor time of other threads per half of a bucket's exchange; 0 if nothing is recorded."""
    if not times.steps:
        return 0.0
    return statistics.median(step.cpu_s / (2 * len(step.buckets)) for step in times.steps)

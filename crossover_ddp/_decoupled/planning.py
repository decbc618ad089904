"""Steps of decoupled training by the host's clock, as the cost model wants them; bucket sizes chosen by them."""

import dataclasses
import statistics
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Final

import torch
import torch.distributed as dist

from crossover_ddp._tuning.link_probe import recorded_by_all
from crossover_ddp._tuning.model import BucketPlan, BucketTimes, Workload, plan_buckets
from crossover_ddp.errors import UnsupportedConfigurationError

_STEPS_KEPT: Final = 16


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

"""Recorded steps of decoupled training as the cost model wants them, and bucket sizes chosen by them."""

import dataclasses
import statistics
from typing import Any, cast

import torch
import torch.distributed as dist

from crossover_ddp._tuning.link_probe import measure_link
from crossover_ddp._tuning.model import BucketPlan, BucketTimes, Workload, plan_buckets
from crossover_ddp.errors import UnsupportedConfigurationError

from .step_times import StepTimes


def plan_from(times: StepTimes, group: dist.ProcessGroup, device: torch.device) -> BucketPlan:
    """Return rank 0's plan on all ranks; see `DecoupledState.plan_buckets`. **Collective**."""
    workload = workload_of(times)
    if device.type != "cpu":
        raise UnsupportedConfigurationError(
            f"expected CPU devices to plan for, got device={device}; choose bucket_cap_mb by hand: "
            "a sixteenth of the model is a good start"
        )
    recorded: list[Any] = [None] * group.size()
    dist.all_gather_object(recorded, workload is not None, group=group)
    if workload is None or not all(recorded):
        raise UnsupportedConfigurationError(
            f"expected deferred steps recorded on all ranks, got {recorded}; train some ten steps before, without "
            "reading parameters between step() and forward, or choose bucket_cap_mb by hand: a sixteenth of the "
            "model is a good start"
        )
    link = measure_link(group)
    if torch.get_num_threads() == 1:  # else torch's own threads would be counted
        link = dataclasses.replace(link, cpu_s=cpu_s_of(times))
    choice: list[Any] = [plan_buckets(workload, link)]
    dist.broadcast_object_list(choice, group=group, group_src=0)
    return cast(BucketPlan, choice[0])


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

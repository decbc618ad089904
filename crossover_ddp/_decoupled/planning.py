"""Choose bucket sizes for decoupled training from recorded steps and a measured link."""

import dataclasses
from typing import Any, cast

import torch
import torch.distributed as dist

from crossover_ddp._exchange.link_probe import measure_link
from crossover_ddp._exchange.step_times import StepTimes
from crossover_ddp._planning import BucketPlan, plan_buckets
from crossover_ddp.errors import UnsupportedConfigurationError

from .workload import cpu_s_of, workload_of


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

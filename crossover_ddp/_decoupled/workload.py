"""What recorded steps of decoupled training say to the cost model: when buckets are ready, and when they are needed."""

import statistics

from crossover_ddp._exchange.step_times import StepTimes
from crossover_ddp._planning import BucketTimes, Workload


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

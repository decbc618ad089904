"""The time of a hand-over, from the release of a turn to the sibling's start, on one machine.

Two jobs of one rank each, pinned to one core or to two, take turns. In a second benchmark one of
them waits for a second, to measure the cost of waiting.
"""

import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist

from crossover_ddp.gpu_mutex import GPUMutex
from tests.harness import run_ranks
from tests.harness.groups import new_group

MEDIAN_LIMIT_S = 0.2e-3
P99_LIMIT_S = 2e-3
WAITING_CPU_LIMIT = 0.005
COMPUTE_S = 1e-3
LEASE_S = 20.0


@contextmanager
def mutex_on(core: int, group: str) -> Iterator[GPUMutex]:
    """Make a mutex for this process alone, pinned to a core.

    The process is in a process group with the other job, which the mutex must not find.
    """
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "is_initialized", lambda: False)
            mutex = GPUMutex(group, device="dev0", lease=LEASE_S)
        yield mutex
        dist.barrier()
        mutex.close()
    finally:  # the process serves other tests afterwards
        os.sched_setaffinity(0, cores)


def _compute(seconds: float) -> None:
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        pass


def _alternate(
    rank: int, world_size: int, group: str, cores: list[int], turns: int
) -> dict[str, Any]:
    with mutex_on(cores[rank], group) as mutex:
        dist.barrier()
        for _ in range(turns):
            mutex.acquire()
            _compute(COMPUTE_S)
            mutex.release()
        return mutex.stats()


def _wait_for_long(
    rank: int, world_size: int, group: str, core: int, wait_s: float
) -> tuple[float, float]:
    """Return the part of a core that this job's wait used, and how long it waited."""
    with mutex_on(core, group) as mutex:
        if rank == 0:
            mutex.acquire()
        dist.barrier()
        if rank == 0:
            time.sleep(wait_s)
            mutex.release()
            return 0.0, 0.0
        cpu_s, begin_s = time.thread_time(), time.monotonic()
        mutex.acquire()
        waited_s = time.monotonic() - begin_s
        return (time.thread_time() - cpu_s) / waited_s, waited_s


@pytest.mark.parametrize("core_count", [1, 2])
def test_a_hand_over_takes_well_under_a_millisecond(
    core_count: int, is_full: bool, benchmark: Any
) -> None:
    cores, turns = sorted(os.sched_getaffinity(0)), 2000 if is_full else 50
    if len(cores) < core_count:
        pytest.skip(f"needs {core_count} cores")
    arguments = (new_group(), [cores[0], cores[core_count - 1]], turns)
    stats = benchmark.pedantic(run_ranks, (_alternate, 2), {"args": arguments}, rounds=1)
    assert all(each["disabled_because"] is None and each["turns"] == turns for each in stats)
    assert all(each["handovers"] for each in stats), "no job ever waited"
    median_s = statistics.median(each["handover_median_s"] for each in stats)
    p99_s = max(each["handover_p99_s"] for each in stats)
    benchmark.extra_info.update(
        core_count=core_count, handover_median_s=median_s, handover_p99_s=p99_s
    )
    assert not is_full or (median_s < MEDIAN_LIMIT_S and p99_s < P99_LIMIT_S)


def test_waiting_for_a_turn_takes_no_cpu(is_full: bool, benchmark: Any) -> None:
    wait_s = 1.0 if is_full else 0.2
    arguments = (new_group(), min(os.sched_getaffinity(0)), wait_s)
    _, (share, waited_s) = benchmark.pedantic(
        run_ranks, (_wait_for_long, 2), {"args": arguments}, rounds=1
    )
    assert waited_s > wait_s / 2
    benchmark.extra_info.update(waiting_cpu_share=share)
    assert not is_full or share < WAITING_CPU_LIMIT

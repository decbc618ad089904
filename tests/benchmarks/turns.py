"""Jobs of one rank each that take turns on a core, for the benchmarks of turns."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch.distributed as dist

from crossover_ddp.gpu_mutex import GPUMutex

LEASE_S = 20.0


@contextmanager
def pinned(core: int) -> Iterator[None]:
    """Run on one core; the process serves other tests afterwards."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def lone_mutex(group: str) -> Iterator[GPUMutex]:
    """Make a mutex for this process alone, although it is in a process group with the other job."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "is_initialized", lambda: False)
        mutex = GPUMutex(group, device="dev0", lease=LEASE_S)
    yield mutex
    dist.barrier()
    mutex.close()

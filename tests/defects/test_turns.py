"""Known defects of turns, by their numbers (redesign: turns; strangers); see `tests.defects`."""

import datetime
import os
import signal
import threading
import time
from typing import Any

import pytest
import torch.distributed as dist

from crossover_ddp.gpu_mutex import GPUMutex
from tests.harness import run_ranks
from tests.harness.groups import new_group
from tests.harness.waiting import eventually

SOON_S = 10.0  # far more than what blocks nobody takes on a busy machine


def join_over(rank: int, world_size: int, store: dist.Store | None = None, timeout_s: float = 40.0) -> dist.Store:
    """Make the default group again, on a store that rank 0 serves; returns the store."""
    ports = [0]
    if store is None:
        if rank == 0:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            ports = [store.port]
        dist.broadcast_object_list(ports)
        if store is None:
            store = dist.TCPStore("127.0.0.1", ports[0], is_master=False)
    dist.barrier()
    dist.destroy_process_group()
    limit = datetime.timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
    return store


def take_turns(mutex: GPUMutex, count: int, seconds: float) -> None:
    for _ in range(count):
        mutex.acquire()
        time.sleep(seconds)
        dist.barrier()
        mutex.release()
    dist.barrier()


# --- the store ----------------------------------------------------------------------------------------------------


def _give_long_turns_back(rank: int, world_size: int, group: str) -> tuple[int, int, bool]:
    """Return the store's keys after short and after long turns, and whether `release` ends beside a stopped rank 0."""
    store = join_over(rank, world_size)
    pids: list[Any] = [None] * world_size
    dist.all_gather_object(pids, os.getpid())
    mutex = GPUMutex(group, device=f"dev{rank}")
    take_turns(mutex, 3, 0.0)
    before = store.num_keys()
    take_turns(mutex, 2, 1.3)
    eventually(lambda: store.num_keys() <= before, 2.0)
    after = store.num_keys()
    mutex.acquire()
    time.sleep(1.3)
    dist.barrier()
    ended = True
    if rank == 1:
        os.kill(pids[0], signal.SIGSTOP)
        releasing = threading.Thread(target=mutex.release)
        releasing.start()
        releasing.join(SOON_S)
        ended = not releasing.is_alive()
        os.kill(pids[0], signal.SIGCONT)
        releasing.join()
    dist.barrier()
    mutex.close()
    return before, after, ended


@pytest.mark.defect("turns-1")
@pytest.mark.defect("turns-2")
@pytest.mark.defect("strangers-33")
def test_a_long_turn_is_given_back_without_the_job_s_store() -> None:
    """`release` never waits for another process, and turns leave nothing in the job's store."""
    found = run_ranks(_give_long_turns_back, 2, args=(new_group(),))
    assert all(ended for _, _, ended in found)
    assert all(after <= before for before, after, _ in found)

"""The mutex in jobs of several ranks where these meet with a problem; how they take turns: `tests.faults`."""

import datetime
import os
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from crossover_ddp._turns.rules import Member
from crossover_ddp._turns.segment import TurnSegment
from crossover_ddp.errors import SegmentError
from crossover_ddp.gpu_mutex import GPUMutex
from tests.harness import Job, in_ranks, run_jobs
from tests.harness.groups import files_of, new_group
from tests.harness.oracles import heard
from tests.harness.waiting import eventually
from tests.unit.turns.mutexes import membership_of

LEASE_S = 100.0  # longer than any test: a turn that overlaps another one was not forgiven
TIMEOUT_S = 60.0


def take_turns(mutex: GPUMutex, count: int, group: dist.ProcessGroup | None = None) -> float:
    """Take turns with a collective inside, as DDP's broadcast of buffers is; return the longest wait for one."""
    longest_s = 0.0
    for _ in range(count):
        begin_s = time.monotonic()
        mutex.acquire()
        longest_s = max(longest_s, time.monotonic() - begin_s)
        dist.barrier(group)
        mutex.release()
    return longest_s


@in_ranks(2)
def test_a_siblings_lease_never_outlasts_the_own_groups_timeout(rank: int) -> None:
    """Rank 1's sibling never gives its turn back, and has published a lease of an hour."""
    with heard() as warnings:
        own = dist.new_group(timeout=datetime.timedelta(seconds=12))
        sibling = TurnSegment(os.environ["CROSSOVER_GROUP"], f"dev{rank}")
        sibling.join(Member(job=9, lead=sibling.machine, rank=rank, world_size=2, lease_s=3600.0))
        if rank == 0:
            sibling.publish_returned(sibling.draw_turn())
        dist.barrier()
        mutex = GPUMutex(device=f"dev{rank}", process_group=own)
        longest_s = take_turns(mutex, 3, own)
        expired = mutex.stats()["leases_expired"]
        dist.barrier()
        mutex.close()
        sibling.leave()
    assert (expired, len(warnings)) == (rank, rank), "once"
    if rank:
        assert 2.9 <= longest_s < 10.0, "a quarter of the timeout"
        assert "a quarter of its process group's timeout" in warnings[0]


@in_ranks(2)
def test_ranks_that_cannot_join_all_raise(rank: int) -> str:
    """What others have put there stays, the rest goes; on a good file a lead rank that closes first is heard out."""
    group = f"{os.environ['CROSSOVER_GROUP']}-broken"
    segment = TurnSegment(group, "dev1")
    segment.forget()
    dist.barrier()
    if rank == 0:
        os.truncate(segment.path, 100)
    dist.barrier()
    begin_s = time.monotonic()
    with pytest.raises(SegmentError, match="rank 0 cannot take turns: expected slots of") as caught:
        GPUMutex(group, device=f"dev{rank}")
    assert time.monotonic() - begin_s < TIMEOUT_S / 2
    dist.barrier()
    assert files_of(group) == [Path(segment.path)]
    dist.barrier()
    with heard() as warnings:
        if rank == 0:
            os.unlink(segment.path)
        dist.barrier()
        mutex = GPUMutex(group, device=f"dev{rank}", lease=LEASE_S)
        for _ in range(3):
            time.sleep(0.1 * rank)
            with mutex:
                pass
        assert mutex.stats()["turns"] == 3
        mutex.close()
    dist.barrier()
    assert not files_of(group)
    assert warnings == []
    return str(caught.value)


@pytest.mark.parametrize("bad_rank", [0, 1])
@in_ranks(2)
def test_a_job_whose_turns_break_on_one_device_goes_on_without(rank: int, bad_rank: int) -> None:
    with heard() as warnings:
        mutex = GPUMutex(device=f"dev{rank}", lease=LEASE_S)
        take_turns(mutex, 5)
        if rank == bad_rank:
            os.truncate(membership_of(mutex).segment.path, 100)
        longest_s = take_turns(mutex, 5)
        dist.barrier()
        mutex.close()
    assert longest_s < LEASE_S / 2
    assert len(warnings) <= 1
    assert rank != bad_rank or "trains on without" in warnings[0]


def share_an_idle_turn(
    rank: int, world_size: int, group: str, signs: str, trial: bool, is_first: bool
) -> bool:
    """Do nothing inside the first turn until the sibling is in its own, or has not come for long; did it come?"""
    waits, inside = Path(signs) / "waits", Path(signs) / "inside"
    mutex = GPUMutex(group, device="dev0", lease=LEASE_S, trial=trial)
    if is_first:
        eventually(lambda: mutex.stats()["siblings"] == 1)
        mutex.acquire()
        waits.touch()
        came = eventually(inside.exists, timeout_s=TIMEOUT_S / 2 if trial else 1.0)
        mutex.release()
    else:
        came = eventually(waits.exists, timeout_s=TIMEOUT_S / 2)
        mutex.acquire()
        inside.touch()
        assert mutex.stats()["leases_expired"] == 0
    mutex.close()
    return came


@pytest.mark.parametrize("trial", [True, False])
def test_a_turn_in_which_nothing_is_computed_is_lent_where_that_is_wanted(
    tmp_path: Path, trial: bool
) -> None:
    group = new_group()
    jobs = [Job(share_an_idle_turn, 1, (group, str(tmp_path), trial, is_first)) for is_first in (True, False)]
    assert run_jobs(jobs, timeout_s=TIMEOUT_S) == [[trial], [True]]

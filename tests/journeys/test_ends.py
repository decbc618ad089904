"""Hooks end with their process group and their process, and survive forks; in real processes."""

import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.harness import close_pools, in_ranks, run_ranks, spawn_script
from tests.harness.campaign import IN_CAMPAIGN
from tests.harness.oracles import error_of
from tests.harness.training import WAYS, Training, waited_for_by_nobody
from tests.harness.turn import RecordingTurn
from tests.harness.waiting import eventually

WORKER = Path(__file__).with_name("ends_worker.py")
LIVES, LAST_ONE = (Path(__file__).with_name(f"{name}_worker.py") for name in ("lives", "last_one"))
IMPATIENT_S = 60.0


# Each needs an interpreter of its own, which imports torch. The short form has only one.
ENDS = [(way, how) for way in ("split", "int8") for how in ("exit", "fall off the end", "destroy")]


@pytest.mark.parametrize(("way", "how"), ENDS if IN_CAMPAIGN else ENDS[:1])
def test_a_process_ends_although_its_threads_wait_for_a_peer(way: str, how: str) -> None:
    # Rank 0's interpreter ends as usual. Its peer only has to exist, so it may be forked.
    with spawn_script(WORKER, 2, args=[way, how], forked=[1]) as ranks:
        ranks.wait_for_output(0, "leaving", 120)
        begin_s = time.monotonic()
        output, _ = ranks.wait(90, deaths={1: signal.SIGKILL})
    assert time.monotonic() - begin_s < IMPATIENT_S
    for word in ("Traceback", "terminate", "Fatal"):
        assert word not in output


def fork_uses_the_hook(
    rank: int, world_size: int, way: str, forks: bool
) -> tuple[int, list[float]]:
    """Train, also in a fork of this process. Return the fork's status and this one's losses."""
    training = Training(way, rank, mutex=RecordingTurn()).run(2)
    status = 0
    if forks:
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            try:
                os._exit(0 if "fork" in error_of(lambda: training.run(2)) else 2)
            finally:
                os._exit(1)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    dist.barrier()
    losses = [training.step() for _ in range(2)]
    training.close()
    return status, losses


# The split with a single rank needs neither a thread nor a peer, so that a fork may use it.
@pytest.mark.parametrize(("way", "world_size"), [("crossover", 1), ("split", 2), ("kfac", 2)])
def test_a_fork_that_uses_the_hook_gets_an_error_and_harms_no_parent(
    way: str, world_size: int
) -> None:
    # Ranks that have run other tests may have autograd's threads. A fork would not survive them.
    close_pools()
    with_fork = run_ranks(fork_uses_the_hook, world_size, args=(way, True))
    without_fork = run_ranks(fork_uses_the_hook, world_size, args=(way, False))
    assert with_fork == without_fork


@pytest.mark.parametrize("way", WAYS)
@in_ranks(2)
def test_idle_threads_keep_nothing_alive(rank: int, way: str) -> None:
    training = Training(way, rank).run(3)
    training.close()
    kept = {
        "module": training.model.module,
        "optimizer": training.optimizers[0],
        "state": training.state,
    }
    seen = {name: weakref.ref(each) for name, each in kept.items() if each is not None}
    del training, kept

    def left() -> list[str]:
        gc.collect()
        return [name for name, each in seen.items() if each() is not None]

    assert eventually(lambda: not left()), left()


def threads_left(before: Sequence[threading.Thread]) -> list[str]:
    """Return the names of the threads that are not in ``before``, once they had time to end."""
    eventually(lambda: {*threading.enumerate()} <= {*before})
    return [thread.name for thread in threading.enumerate() if thread not in before]


# Without elastic averaging: its thread may be in a round with a rank that has left.
@pytest.mark.parametrize("way", [way for way in WAYS if way != "elastic"])
@in_ranks(2)
def test_threads_end_with_the_group_although_model_and_state_live_on(rank: int, way: str) -> None:
    before = threading.enumerate()
    training = Training(way, rank).run(3)
    dist.barrier()
    begin_s = time.monotonic()
    dist.destroy_process_group()
    assert time.monotonic() - begin_s < IMPATIENT_S
    assert threads_left(before) == []
    assert training.model is not None


@pytest.mark.parametrize("way", ["crossover", "wrapped"])
@in_ranks(2)
def test_the_end_of_a_group_does_not_wait_for_a_thread_that_waits_for_a_turn(
    rank: int, way: str
) -> None:
    before = threading.enumerate()
    gate = threading.Event()
    turn = RecordingTurn(at_acquire=gate.wait)
    training = Training(way, rank, mutex=turn, around=waited_for_by_nobody)
    training.backward()
    dist.barrier()
    time.sleep(0.2)
    begin_s = time.monotonic()
    dist.destroy_process_group()
    seconds = time.monotonic() - begin_s
    gate.set()
    # It waits 30 s for work that other ranks may need. Here they need none.
    assert seconds < 20
    assert threads_left(before) == []


# One rank is late to leave each group. The other one must not read keys of that group in the store.
@pytest.mark.parametrize("way", WAYS if IN_CAMPAIGN else ["crossover", "elastic"])
def test_a_process_trains_in_one_group_after_the_other(way: str) -> None:
    with spawn_script(LIVES, 2, args=[way, "001110"], forked=True) as ranks:
        assert ["lived 6 lives" in output for output in ranks.wait(120)] == [True, True]


@pytest.mark.parametrize("lost", [0, 1])  # rank 0's process serves the store
@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_a_group_is_destroyed_although_a_rank_is_dead_or_stopped(lost: int, how: str) -> None:
    others = [rank for rank in range(3) if rank != lost]
    with spawn_script(LAST_ONE, 3, args=[str(lost), how], forked=True) as ranks:
        for rank in others:
            ranks.wait_for_output(rank, "destroyed", IMPATIENT_S)
        ranks.processes[lost].signal_session(signal.SIGCONT)
        ranks.wait(IMPATIENT_S, deaths={lost: signal.SIGKILL} if how == "SIGKILL" else {})

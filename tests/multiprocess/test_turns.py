"""Turns of jobs with several ranks: the job's store, its hooks, its machines, and the trial."""

import itertools
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from crossover_ddp import (
    CrossoverState,
    DecoupledState,
    crossover_hook,
    crossover_wrapper,
    decoupled_hook,
)
from crossover_ddp.averaging_hooks import LocalSGDState, local_sgd_hook
from crossover_ddp.errors import UnsupportedConfigurationError
from crossover_ddp.gpu_mutex import GPUMutex
from tests.harness import Job, in_ranks, inside, run_jobs
from tests.harness.groups import join_over, new_group
from tests.harness.oracles import heard
from tests.harness.training import Training
from tests.harness.turn import RecordingTurn
from tests.harness.waiting import eventually

SOON_S = 60.0  # far longer than a call takes that does not block, even on a busy machine


def take_turns(mutex: GPUMutex, count: int, seconds: float) -> None:
    for _ in range(count):
        mutex.acquire()
        time.sleep(seconds)
        dist.barrier()
        mutex.release()
    dist.barrier()


@pytest.mark.defect("turns-1", "turns-2", "strangers-24", "strangers-33")
@in_ranks(3)
def test_turns_are_given_back_and_taken_while_the_store_does_not_answer(rank: int) -> None:
    """Rank 2 serves the store and is stopped, together with one peer.

    Turns also leave no keys behind in the store.
    """
    server = None
    if rank == 2:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    known: list[Any] = [None] * 3
    dist.all_gather_object(known, (os.getpid(), server and server.port))
    if server is not None:
        server.wait(["done"], timedelta(seconds=SOON_S))
        return
    pids = [pid for pid, _ in known]
    store = dist.TCPStore("127.0.0.1", known[2][1], is_master=False)
    join_over(rank, 2, store)
    mutex = GPUMutex(device=f"dev{rank}")
    with inside.grants_kept(2):
        take_turns(mutex, 4, 0.0)
        # A turn that begins alone receives its number later.
        assert eventually(lambda: mutex.stats()["turn"] == 4)
        before = store.num_keys()
        dist.barrier()  # or `before` might include a key of the other rank's next turn
        take_turns(mutex, 3, 1.3)
        assert eventually(lambda: store.num_keys() <= before)
        dist.barrier()
    mutex.acquire()
    time.sleep(1.3)
    # Rank 2 stays stopped until the end.
    for alone, stopped in ((1, pids[::2]), (0, pids[2:])):
        dist.barrier()
        if rank == alone:
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)
            thread = threading.Thread(target=lambda: (mutex.release(), mutex.acquire()))
            thread.start()
            thread.join(SOON_S / 4)
            has_returned = not thread.is_alive()
            os.kill(stopped[0], signal.SIGCONT)
    dist.barrier()
    mutex.close()
    store.set("done", "")
    assert has_returned


STATES: list[tuple[Callable[..., Any], Any]] = [
    (lambda _, group, mutex: CrossoverState(group, mutex=mutex), crossover_hook),
    (
        lambda _, group, mutex: CrossoverState(group, mutex=mutex, hook_state=group),
        crossover_wrapper(allreduce_hook),
    ),
    (lambda sgd, group, mutex: DecoupledState(sgd, group, mutex=mutex), decoupled_hook),
    (
        lambda _, group, mutex: LocalSGDState(2, process_group=group, mutex=mutex),
        local_sgd_hook,
    ),
]


@pytest.mark.defect("turns-3")
@in_ranks(2)
def test_a_mutex_of_other_ranks_than_the_model_is_refused(rank: int) -> None:
    join_over(rank, 2)
    mutex = GPUMutex(device=f"dev{rank}")
    alone = dist.new_group([1])
    for make, hook in STATES if rank else ():
        training = Training(
            lambda _, opts, mutex, make=make, hook=hook: (make(opts[0], alone, mutex), hook),
            mutex=mutex,
            process_group=alone,
        )
        message = r"(?s)expected a mutex of the ranks \[1\].*process_group"
        with pytest.raises(UnsupportedConfigurationError, match=message):
            training.backward()
    take_turns(mutex, 1, 0.0)
    assert mutex.stats()["disabled_because"] is None
    mutex.close()


@pytest.mark.defect("turns-9")
@in_ranks(2)
def test_an_exchange_without_a_turn_completes_while_another_model_waits_for_its_turn(
    rank: int,
) -> None:
    """Exchanges of the job need the network, not the device."""
    gate = threading.Event()
    turn = RecordingTurn(at_acquire=gate.wait)
    waiting = Training("crossover", rank, mutex=turn)
    other = Training("split", rank)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(waiting.backward)
        assert eventually(lambda: "release" in turn.order)
        dist.barrier()
        ended = eventually(threads.submit(other.backward).done, SOON_S / 4)
        dist.barrier()
        gate.set()
        first.result()
    waiting.close()
    assert ended


def look_for_siblings(
    rank: int, world_size: int, group: str, places: list[Path], meeting: Path
) -> tuple[list[tuple[float, float]], list[str]]:
    """Return the begins and ends of a rank's turns, and its warnings.

    Each rank sees only its own directory of shared memory, as on a machine of its own.
    """
    store = dist.FileStore(str(meeting), 2 * world_size)
    turns = []

    def meet(word: str) -> None:
        store.add(word, 1)
        assert eventually(lambda: store.add(word, 0) == 2 * world_size)

    with heard() as warnings, inside.shared_memory_at(str(places[rank])):
        mutex = GPUMutex(group, device=f"dev{rank}")
        meet("joined")
        for _ in range(5):
            with mutex:
                begin_s = time.monotonic()
                time.sleep(0.02)
                turns.append((begin_s, time.monotonic()))
        meet("seen")
        mutex.close()
    return turns, warnings


@pytest.mark.defect("turns-13")
def test_siblings_that_share_only_some_machines_are_in_order_or_warn(tmp_path: Path) -> None:
    group = new_group()
    first, second, shared = (tmp_path / name for name in "abc")
    for place in (first, second, shared):
        place.mkdir()
    jobs = [
        Job(look_for_siblings, 2, (group, [own, shared], tmp_path / "meet"))
        for own in (first, second)
    ]
    found = run_jobs(jobs)
    turns = sorted(turn for job in found for turn in job[1][0])
    in_order = all(end_s <= begin_s for (_, end_s), (begin_s, _) in itertools.pairwise(turns))
    warnings = [warning for job in found for _, warnings in job for warning in warnings]
    assert in_order or any("in no common order" in warning for warning in warnings)


def wait_for_data(rank: int, world_size: int) -> tuple[bool | None, int]:
    """Train a model that waits for data in every step, until a trial has ended.

    Return its verdict, and how many lines were logged about it.
    """
    training = Training("crossover", rank)
    known = torch.zeros(1)
    ends_s = time.monotonic() + SOON_S / 2
    with heard(logging.INFO) as lines:
        while not known and time.monotonic() < ends_s:
            for _ in range(10):
                time.sleep(0.01)
                training.backward()
            known[0] = training.state.stats()["turns_pay"] is not None
            dist.all_reduce(known, dist.ReduceOp.MIN)
        # The thread that receives the verdict writes its line before it takes another turn.
        training.backward()
        training.backward()
    pays = training.state.stats()["turns_pay"]
    dist.barrier()
    training.close()
    return pays, sum("side by side with 1 sibling(s); from now on" in line for line in lines)


@pytest.mark.defect("turns-14")
def test_siblings_find_out_whether_turns_pay() -> None:
    group = new_group()
    variables = [{"CROSSOVER_GROUP": group, "CROSSOVER_DEVICE": f"dev{rank}"} for rank in range(2)]
    jobs = [Job(wait_for_data, 2, environment=variables, name=name) for name in "ab"]
    found = run_jobs(jobs, timeout_s=SOON_S)
    pays = found[0][0][0]
    assert pays is not None
    assert found == [[(pays, 1), (pays, 0)]] * 2

"""Known defects of turns, by their numbers (redesign: turns; strangers); see `tests.defects`."""

import datetime
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp import (
    CrossoverState,
    DecoupledState,
    crossover_hook,
    crossover_wrapper,
    decoupled_hook,
)
from crossover_ddp.averaging_hooks import ElasticState, LocalSGDState, elastic_hook, local_sgd_hook
from crossover_ddp.codecs import CompressedState, Int8, compressed_hook
from crossover_ddp.errors import TurnError, UnsupportedConfigurationError
from crossover_ddp.gpu_mutex import GPUMutex
from crossover_ddp.kfac_hooks import KFACState, kfac_hook
from crossover_ddp.muon_hooks import MuonState, muon_hook
from tests.harness import run_ranks
from tests.harness.groups import new_group
from tests.harness.waiting import eventually

SOON_S = 10.0  # far more than what blocks nobody takes on a busy machine


def join_over(
    rank: int, world_size: int, store: dist.Store | None = None, timeout_s: float = 40.0
) -> dist.Store:
    """Make the default group again, on a store that rank 0 serves; returns the store."""
    ports = [0]
    if store is None:
        if rank == 0:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            ports = [store.port]
        dist.broadcast_object_list(ports)
        if store is None:
            store = dist.TCPStore("127.0.0.1", ports[0], is_master=False)
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


def _live_three_times(rank: int, world_size: int, group: str) -> list[str]:
    """Return each life's job as this rank knows it; rank 0 comes last, so that others find what is old first."""
    store, jobs = None, []
    for _ in range(3):
        store = join_over(rank, world_size, store)
        time.sleep(0.0 if rank else 0.3)
        mutex = GPUMutex(group, device=f"dev{rank}")
        jobs.append(mutex.stats()["job"])
        for _ in range(2):
            with mutex:
                assert mutex.holding
        mutex.close()
    return jobs


@pytest.mark.defect("turns-5")
@pytest.mark.defect("strangers-21")
def test_a_group_made_again_on_the_same_store_is_one_job_on_all_its_ranks() -> None:
    """What an earlier life has left in the store is nobody's answer."""
    # gloo itself finds addresses of the life before in the store; lazily it connects with the first collective only.
    lazy = {"TORCH_GLOO_LAZY_INIT": "1"}
    first, second = run_ranks(_live_three_times, 2, args=(new_group(),), environment=lazy)
    assert first == second
    assert len(set(first)) == 3


# --- a mutex for some of the ranks --------------------------------------------------------------------------------


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


# Every hook whose state takes a mutex.
STATES: dict[str, tuple[Callable[..., Any], Any]] = {
    "crossover": (lambda _, **given: CrossoverState(**given), crossover_hook),
    "wrapper": (
        lambda _, **given: CrossoverState(**given, hook_state=given["process_group"]),
        crossover_wrapper(default_hooks.allreduce_hook),
    ),
    "codec": (lambda _, **given: CompressedState(Int8(), **given), compressed_hook),
    "decoupled": (lambda model, **given: DecoupledState(sgd(model), **given), decoupled_hook),
    "owners": (lambda model, **given: DecoupledState(sgd(model), owners="layers", **given), decoupled_hook),
    "kfac": (lambda model, **given: KFACState(model, sgd(model), **given), kfac_hook),
    "muon": (lambda model, **given: MuonState(torch.optim.Muon(model.parameters()), **given), muon_hook),
    "local_sgd": (lambda _, **given: LocalSGDState(2, **given), local_sgd_hook),
    "elastic": (lambda _, **given: ElasticState(2, mode="sync", **given), elastic_hook),
}


def _train_a_model_of_one_rank(rank: int, world_size: int, group: str) -> dict[str, str]:
    join_over(rank, world_size, timeout_s=4.0)
    mutex, alone = GPUMutex(group, device=f"dev{rank}"), dist.new_group([1])
    errors = {}
    for name, (make, hook) in STATES.items() if rank else ():
        module = torch.nn.Linear(4, 4, bias=False)
        model = DistributedDataParallel(module, process_group=alone, gradient_as_bucket_view=True)
        model.register_comm_hook(make(module, process_group=alone, mutex=mutex), hook)
        try:
            model(torch.ones(2, 4)).sum().backward()
        except UnsupportedConfigurationError as error:
            errors[name] = str(error)
    take_turns(mutex, 1, 0.0)
    assert mutex.stats()["disabled_because"] is None
    mutex.close()
    return errors


@pytest.mark.defect("turns-3")
def test_a_mutex_of_other_ranks_than_the_model_s_is_refused() -> None:
    """Every state that takes ``mutex=`` says at the first ``backward()`` whose turns a model's ranks can take."""
    _, errors = run_ranks(_train_a_model_of_one_rank, 2, args=(new_group(),))
    assert errors.keys() == STATES.keys()
    assert all(
        "expected a mutex of the ranks [1]" in text and "process_group" in text for text in errors.values()
    )


# --- two mutexes of one process -----------------------------------------------------------------------------------


@pytest.mark.defect("turns-4")
@pytest.mark.defect("strangers-22")
def test_two_mutexes_of_one_process_never_wait_for_each_other() -> None:
    """The second one is refused, with the cure, until the first one is closed; another group is another matter."""
    group = new_group()
    first, elsewhere = GPUMutex(group, device="dev0"), GPUMutex(f"{group}-b", device="dev0")
    with pytest.raises(TurnError, match=r"expected one GPUMutex of a process.*mutex=.*close\(\)"):
        GPUMutex(group, device="dev0").close()
    first.close()
    GPUMutex(group, device="dev0").close()
    elsewhere.close()


@pytest.mark.defect("turns-4")
@pytest.mark.usefixtures("process_group")
def test_a_hook_beside_a_mutex_of_the_user_s_own_says_how_to_share_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It trains on without turns, instead of waiting for the own process's turn, and names the cure."""
    monkeypatch.setenv("CROSSOVER_GROUP", new_group())
    with GPUMutex(lease=SOON_S) as mutex:
        model = DistributedDataParallel(torch.nn.Linear(4, 4))
        model.register_comm_hook(CrossoverState(), crossover_hook)
        model(torch.ones(2, 4)).sum().backward()
    assert "mutex=" in caplog.text
    mutex.close()

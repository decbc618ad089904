"""Known defects of turns, by their numbers (redesign: turns; strangers); see `tests.defects`."""

import itertools
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
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
    reduce_scatter_all_gather_hook,
)
from crossover_ddp._turns import joining
from crossover_ddp.averaging_hooks import ElasticState, LocalSGDState, elastic_hook, local_sgd_hook
from crossover_ddp.codecs import CompressedState, Int8, compressed_hook
from crossover_ddp.errors import TurnError, UnsupportedConfigurationError
from crossover_ddp.gpu_mutex import GPUMutex
from crossover_ddp.kfac_hooks import KFACState, kfac_hook
from crossover_ddp.muon_hooks import MuonState, muon_hook
from tests.harness import Job, in_ranks, inside, run_jobs, run_ranks
from tests.harness._preloaded import context
from tests.harness.groups import files_of, join_over, new_group
from tests.harness.oracles import heard
from tests.harness.waiting import eventually
from tests.unit.turns.mutexes import Nowhere, held_up

SOON_S = 60.0  # far more than what blocks nobody takes on a busy machine


def take_turns(mutex: GPUMutex, count: int, seconds: float) -> None:
    for _ in range(count):
        mutex.acquire()
        time.sleep(seconds)
        dist.barrier()
        mutex.release()
    dist.barrier()


# --- the store ----------------------------------------------------------------------------------------------------


@pytest.mark.defect("turns-1", "turns-2", "strangers-33")
@in_ranks(2)
def test_a_long_turn_is_given_back_without_the_job_s_store(rank: int, world_size: int) -> None:
    """`release` never waits for another process, here a stopped rank 0, and turns do not fill the job's store."""
    store = join_over(rank, world_size)
    pids: list[Any] = [None] * world_size
    dist.all_gather_object(pids, os.getpid())
    mutex = GPUMutex(device=f"dev{rank}")
    with inside.grants_kept(2):
        take_turns(mutex, 4, 0.0)
        assert eventually(lambda: mutex.stats()["turn"] == 4)  # a turn alone has its number later
        before = store.num_keys()
        dist.barrier()  # or the other rank's next turn is counted, too
        take_turns(mutex, 3, 1.3)
        eventually(lambda: store.num_keys() <= before)
        after = store.num_keys()
        dist.barrier()
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
    assert ended
    assert after <= before


@pytest.mark.defect("turns-5", "strangers-21")
# gloo itself finds addresses of the life before in the store; lazily it connects with the first collective only.
@in_ranks(2, environment={"TORCH_GLOO_LAZY_INIT": "1"})
def test_a_group_made_again_on_the_same_store_is_one_job_on_all_its_ranks(
    rank: int, world_size: int
) -> list[str]:
    """What an earlier life has left in the store is nobody's answer, which others find first: rank 0 comes last."""
    store, jobs = None, []
    for _ in range(3):
        store = join_over(rank, world_size, store)
        time.sleep(0.0 if rank else 0.3)
        mutex = GPUMutex(device=f"dev{rank}")
        jobs.append(mutex.stats()["job"])
        for _ in range(2):
            with mutex:
                assert mutex.holding
        mutex.close()
    assert len(set(jobs)) == 3
    return jobs


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


@pytest.mark.defect("turns-3")
@in_ranks(2)
def test_a_mutex_of_other_ranks_than_the_model_s_is_refused(rank: int, world_size: int) -> None:
    """Every state that takes ``mutex=`` says at the first ``backward()`` whose turns a model's ranks can take."""
    join_over(rank, world_size)
    mutex, alone = GPUMutex(device=f"dev{rank}"), dist.new_group([1])
    for make, hook in STATES.values() if rank else ():
        module = torch.nn.Linear(4, 4, bias=False)
        model = DistributedDataParallel(module, process_group=alone, gradient_as_bucket_view=True)
        model.register_comm_hook(make(module, process_group=alone, mutex=mutex), hook)
        message = r"(?s)expected a mutex of the ranks \[1\].*process_group"
        with pytest.raises(UnsupportedConfigurationError, match=message):
            model(torch.ones(2, 4)).sum().backward()
    take_turns(mutex, 1, 0.0)
    assert mutex.stats()["disabled_because"] is None
    mutex.close()


# --- two mutexes of one process -----------------------------------------------------------------------------------


@pytest.mark.defect("turns-4", "strangers-22")
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


# --- one process, several threads ---------------------------------------------------------------------------------


@pytest.fixture
def two_jobs(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[GPUMutex, GPUMutex]]:
    """Two jobs on one device, as if each had a process of its own; the first one holds its turn."""
    monkeypatch.setattr(joining, "_places", Nowhere())
    group = new_group()
    holder, waiting = (GPUMutex(group, device="dev0", lease=SOON_S) for _ in range(2))
    holder.acquire()
    yield holder, waiting
    assert [mutex.stats()["leases_expired"] for mutex in (holder, waiting)] == [0, 0]
    for mutex in (holder, waiting):
        mutex.close()


@pytest.mark.defect("turns-6")
def test_a_release_beside_a_thread_that_waits_gives_nothing_back(
    two_jobs: tuple[GPUMutex, GPUMutex],
) -> None:
    """`release` outside a turn does nothing, at once; the turn that comes is the waiting thread's."""
    holder, mutex = two_jobs
    with ThreadPoolExecutor(2) as threads:
        with held_up(threads, mutex):
            releasing = threads.submit(mutex.release)
            ended = eventually(releasing.done, SOON_S / 4)
            holder.release()
        releasing.result()
    assert ended
    assert mutex.holding


@pytest.mark.defect("strangers-33")
def test_nobody_waits_for_a_turn_whose_wait_was_interrupted(two_jobs: tuple[GPUMutex, GPUMutex]) -> None:
    """Ctrl-C in `acquire` leaves no turn behind for which siblings would wait."""
    holder, mutex = two_jobs
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    with pytest.raises(KeyboardInterrupt):
        mutex.acquire()
    signal.signal(signal.SIGALRM, before)
    holder.release()
    holder.acquire()


def _meet(path: str, count: int) -> Callable[[str], None]:
    """Return how processes of several jobs meet: each says a word and waits until all have said it."""
    store = dist.FileStore(path, count)

    def meet(word: str) -> None:
        store.add(word, 1)
        assert eventually(lambda: store.add(word, 0) == count)

    return meet


def _train_another_model_meanwhile(rank: int, world_size: int, group: str, path: str, holds: bool) -> bool:
    """One job holds its turn; a model of the other one waits for it, and another model, without turns, trains."""
    meet = _meet(path, 2 * world_size)
    mutex, ended = GPUMutex(group, device=f"dev{rank}", lease=60.0), True
    if holds:
        mutex.acquire()
    meet("held")
    if holds:
        meet("trained")
        mutex.release()
    else:
        begun = threading.Event()

        def noted(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            future = crossover_hook(state, bucket)
            begun.set()
            return future

        models = [DistributedDataParallel(torch.nn.Linear(4, 4)) for _ in range(2)]
        models[0].register_comm_hook(CrossoverState(mutex=mutex), noted)
        models[1].register_comm_hook(None, reduce_scatter_all_gather_hook)
        losses = [model(torch.ones(2, 4)).sum() for model in models]
        passes = [threading.Thread(target=loss.backward) for loss in losses]
        passes[0].start()
        assert begun.wait(SOON_S)
        dist.barrier()
        passes[1].start()
        passes[1].join(SOON_S / 4)
        ended = not passes[1].is_alive()
        meet("trained")
        for each in passes:
            each.join()
    mutex.close()
    return ended


@pytest.mark.defect("turns-9")
def test_what_needs_no_turn_goes_on_while_a_model_waits_for_one(tmp_path: Path) -> None:
    """A job's exchanges behind the last bucket need the wire, not the device: they do not wait for the turn."""
    group, meet = new_group(), f"{tmp_path}/meet"
    found = run_jobs(
        [Job(_train_another_model_meanwhile, 2, (group, meet, holds)) for holds in (True, False)]
    )
    assert found == [[True, True], [True, True]]


# --- what may go wrong around a job -------------------------------------------------------------------------------


def _serve_store(told: Any) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    told.send((os.getpid(), server.port))
    told.recv()


def _take_a_turn_beside_a_silent_store(rank: int, world_size: int, group: str, pid: int, port: int) -> bool:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    join_over(rank, world_size, store)
    mutex = GPUMutex(group, device=f"dev{rank}")
    take_turns(mutex, 2, 0.0)
    if rank == 0:
        os.kill(pid, signal.SIGSTOP)
    dist.barrier()
    mutex.acquire()
    dist.barrier()
    if rank == 0:
        os.kill(pid, signal.SIGCONT)
    goes_on = mutex.holding
    mutex.close()
    return goes_on


@pytest.mark.defect("strangers-24")
def test_a_lone_job_takes_turns_beside_a_store_that_is_silent() -> None:
    """Without siblings nobody waits for a grant: plain DDP does not notice such a store."""
    ours, theirs = context.Pipe()
    server = context.Process(target=_serve_store, args=(theirs,))
    server.start()
    try:
        pid, port = ours.recv()
        found = run_ranks(_take_a_turn_beside_a_silent_store, 2, args=(new_group(), pid, port), backend=None)
    finally:
        server.kill()
        server.join()
    assert found == [True, True]


@pytest.mark.defect("strangers-25")
def test_files_removed_under_way_are_missed_aloud(caplog: pytest.LogCaptureFixture) -> None:
    """Turns go on, or the one warning says who removes such files and what to do."""
    group = new_group()
    mutex = GPUMutex(group, device="dev0")
    with mutex:
        for path in files_of(group):
            path.unlink()
    mutex.acquire()
    assert mutex.holding or "loginctl enable-linger" in caplog.text
    mutex.close()


def _look_for_siblings(
    rank: int, world_size: int, group: str, bases: list[str], path: str
) -> tuple[list[tuple[float, float]], list[str]]:
    """Return a rank's turns, which sees its own place of shared memory, and what is said."""
    meet, turns = _meet(path, 2 * world_size), []
    with heard() as warnings, inside.shared_memory_at(bases[rank]):
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
def test_siblings_on_some_machines_only_are_in_order_or_told(tmp_path: Path) -> None:
    """Jobs that meet on some machines only take turns there, or somebody says that they do not."""
    group, places = new_group(), [tmp_path / name for name in ("first", "second", "shared")]
    for place in places:
        place.mkdir()
    first, second, shared = map(str, places)
    jobs = [Job(_look_for_siblings, 2, (group, [own, shared], f"{tmp_path}/meet")) for own in (first, second)]
    first_job, second_job = run_jobs(jobs)
    turns = sorted([*first_job[1][0], *second_job[1][0]])
    in_order = all(end_s <= begin_s for (_, end_s), (begin_s, _) in itertools.pairwise(turns))
    assert in_order or any(
        "in no common order" in said for _, told in [*first_job, *second_job] for said in told
    )


# --- what turns promise -------------------------------------------------------------------------------------------


def _device_on(cores: set[int]) -> str | None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    mutex = GPUMutex(new_group())
    os.sched_setaffinity(0, before)
    mutex.close()
    return mutex.device


@pytest.mark.defect("turns-7", "strangers-34")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_jobs_pinned_to_different_cores_share_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would compute half of the time each, and could both compute all of it."""
    monkeypatch.delenv("CROSSOVER_DEVICE", raising=False)
    first, second = sorted(os.sched_getaffinity(0))[:2]
    devices = [_device_on(cores) for cores in ({first}, {second}, {first}, os.sched_getaffinity(0))]
    assert devices[0] == devices[2]
    assert len(set(devices)) == 3


def wait_for_data(rank: int, world_size: int) -> tuple[bool | None, list[str]]:
    """Train a small net that waits for data in every step until turns were tried; return what stats and the log say."""
    logging.getLogger("crossover_ddp").setLevel(logging.INFO)
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    state = CrossoverState()
    model.register_comm_hook(state, crossover_hook)
    known, ends_s = torch.zeros(1), time.monotonic() + SOON_S / 2
    with heard(logging.INFO) as said:
        while not known and time.monotonic() < ends_s:
            for _ in range(10):
                time.sleep(0.01)
                model(torch.ones(4, 64)).sum().backward()
            known = torch.tensor([float(state.stats()["turns_pay"] is not None)])
            dist.all_reduce(known, dist.ReduceOp.MIN)
    logging.getLogger("crossover_ddp").setLevel(logging.NOTSET)
    pays = state.stats()["turns_pay"]
    dist.barrier()
    state.close()
    return pays, [words for words in said if "side by side with 1 sibling(s); from now on" in words]


@pytest.mark.defect("turns-14")
def test_siblings_find_out_whether_turns_pay() -> None:
    """Siblings try turns against running side by side, and all ranks say what they keep."""
    group = new_group()
    variables = [{"CROSSOVER_GROUP": group, "CROSSOVER_DEVICE": f"dev{rank}"} for rank in range(2)]
    jobs = run_jobs(
        [Job(wait_for_data, 2, environment=variables, name=name) for name in "ab"], timeout_s=SOON_S
    )
    found = {pays for job in jobs for pays, _ in job}
    assert found in ({True}, {False}), "all ranks of all jobs keep the same"
    assert [len(words) for job in jobs for _, words in job] == [1, 0, 1, 0], "the lead rank says so once"

"""Known defects of turns and of the command, by their numbers (redesign: turns; strangers); see `tests.defects`."""

import itertools
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
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
from crossover_ddp._turns import joining
from crossover_ddp.averaging_hooks import LocalSGDState, local_sgd_hook
from crossover_ddp.errors import TurnError, UnsupportedConfigurationError
from crossover_ddp.gpu_mutex import GPUMutex
from tests.harness import Job, in_ranks, inside, run_jobs
from tests.harness.groups import files_of, join_over, new_group
from tests.harness.oracles import heard
from tests.harness.scripts import ROOT
from tests.harness.training import Training
from tests.harness.turn import RecordingTurn
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


@pytest.mark.defect("turns-1", "turns-2", "strangers-24", "strangers-33")
@in_ranks(3)
def test_a_long_turn_is_given_back_without_the_job_s_store(rank: int) -> None:
    """Nor is the next one taken by it, nor do turns fill it: rank 2, which serves it, and a peer are stopped."""
    server = (
        dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 2 else None
    )
    known: list[Any] = [None] * 3
    dist.all_gather_object(known, (os.getpid(), server and server.port))
    if server is not None:
        server.wait(["done"], timedelta(seconds=SOON_S))
        return
    pids, store = (
        [pid for pid, _ in known],
        dist.TCPStore("127.0.0.1", known[2][1], is_master=False),
    )
    join_over(rank, 2, store)
    mutex = GPUMutex(device=f"dev{rank}")
    with inside.grants_kept(2):
        take_turns(mutex, 4, 0.0)
        assert eventually(lambda: mutex.stats()["turn"] == 4)  # a turn alone has its number later
        before = store.num_keys()
        dist.barrier()  # or the other rank's next turn is counted, too
        take_turns(mutex, 3, 1.3)
        assert eventually(lambda: store.num_keys() <= before)
        dist.barrier()
    mutex.acquire()
    time.sleep(1.3)
    for alone, stopped in ((1, pids[::2]), (0, pids[2:])):  # rank 2 is stopped until the end
        dist.barrier()
        if rank == alone:
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)
            thread = threading.Thread(target=lambda: (mutex.release(), mutex.acquire()))
            thread.start()
            thread.join(SOON_S / 4)
            went_on = not thread.is_alive()
            os.kill(stopped[0], signal.SIGCONT)
    dist.barrier()
    mutex.close()
    store.set("done", "")
    assert went_on


@pytest.mark.defect("turns-5", "strangers-21")
# gloo itself finds addresses of the life before in the store; lazily it connects with the first collective only.
@in_ranks(2, environment={"TORCH_GLOO_LAZY_INIT": "1"})
def test_a_group_made_again_on_the_same_store_is_one_job_on_all_its_ranks(rank: int) -> list[str]:
    """What an earlier life has left in the store is nobody's answer, which others find first: rank 0 comes last."""
    store, jobs = None, []
    for _ in range(3):
        store = join_over(rank, 2, store)
        time.sleep(0.0 if rank else 0.3)
        mutex = GPUMutex(device=f"dev{rank}")
        jobs.append(mutex.stats()["job"])
        for _ in range(2):
            with mutex:
                assert mutex.holding
        mutex.close()
    assert len(set(jobs)) == 3
    return jobs


STATES: list[tuple[Callable[..., Any], Any]] = [
    (lambda _, g, mutex: CrossoverState(g, mutex=mutex), crossover_hook),
    (
        lambda _, g, mutex: CrossoverState(g, mutex=mutex, hook_state=g),
        crossover_wrapper(allreduce_hook),
    ),
    (lambda sgd, g, mutex: DecoupledState(sgd, g, mutex=mutex), decoupled_hook),
    (lambda _, g, mutex: LocalSGDState(2, process_group=g, mutex=mutex), local_sgd_hook),
]


@pytest.mark.defect("turns-3")
@in_ranks(2)
def test_a_mutex_of_other_ranks_than_the_model_s_is_refused(rank: int) -> None:
    join_over(rank, 2)
    mutex, alone = GPUMutex(device=f"dev{rank}"), dist.new_group([1])
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


@pytest.mark.defect("turns-4", "strangers-22")
def test_two_mutexes_of_one_process_never_wait_for_each_other() -> None:
    """The second one is refused, with the cure, until the first one is closed; another group is another matter."""
    group = new_group()
    first, elsewhere = GPUMutex(group, device="dev0"), GPUMutex(f"{group}-b", device="dev0")
    with pytest.raises(TurnError, match=r"this process already has a GPUMutex.*mutex=.*close\(\)"):
        GPUMutex(group, device="dev0").close()
    first.close()
    GPUMutex(group, device="dev0").close()
    elsewhere.close()


@pytest.mark.defect("turns-4")
@pytest.mark.usefixtures("process_group")
def test_a_hook_beside_a_mutex_of_the_user_s_says_how_to_share_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It trains on without turns, instead of waiting for the own process's turn, and names the cure."""
    monkeypatch.setenv("CROSSOVER_GROUP", new_group())
    with heard() as said, GPUMutex(lease=SOON_S) as mutex:
        Training("crossover").backward()
    assert "mutex=" in "".join(said)
    mutex.close()


@pytest.fixture
def two_jobs(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[GPUMutex, GPUMutex]]:
    """Two jobs on one device, as if each had a process of its own; the first one holds its turn."""
    monkeypatch.setattr(joining, "_claims", Nowhere())
    group = new_group()
    holder, waiting = (GPUMutex(group, device="dev0", lease=SOON_S) for _ in range(2))
    holder.acquire()
    yield holder, waiting
    for mutex in (holder, waiting):
        assert mutex.stats()["leases_expired"] == 0
        mutex.close()


@pytest.mark.defect("turns-6")
def test_a_release_beside_a_waiting_thread_gives_nothing_back(
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
def test_nobody_waits_for_a_turn_whose_wait_was_interrupted(
    two_jobs: tuple[GPUMutex, GPUMutex],
) -> None:
    holder, mutex = two_jobs
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    with pytest.raises(KeyboardInterrupt):
        mutex.acquire()
    signal.signal(signal.SIGALRM, before)
    holder.release()
    holder.acquire()


@pytest.mark.defect("turns-9")
@in_ranks(2)
def test_what_needs_no_turn_goes_on_while_a_model_waits_for_one(rank: int) -> None:
    """A job's exchanges behind the last bucket need the wire, not the device: they do not wait for the turn."""
    gate = threading.Event()
    turn = RecordingTurn(at_acquire=gate.wait)
    waiting, other = Training("crossover", rank, mutex=turn), Training("split", rank)
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
    rank: int, world_size: int, group: str, places: list[Path], meeting: Path
) -> Any:
    """Return a rank's turns, which sees its own place of shared memory, and what is said."""
    store, turns = dist.FileStore(str(meeting), 2 * world_size), []

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
def test_siblings_on_some_machines_only_are_in_order_or_told(tmp_path: Path) -> None:
    group, (first, second, shared) = new_group(), (tmp_path / name for name in "abc")
    for place in (first, second, shared):
        place.mkdir()
    jobs = [
        Job(_look_for_siblings, 2, (group, [own, shared], tmp_path / "meet"))
        for own in (first, second)
    ]
    found = run_jobs(jobs)
    turns = sorted(turn for job in found for turn in job[1][0])
    in_order = all(end_s <= begin_s for (_, end_s), (begin_s, _) in itertools.pairwise(turns))
    assert in_order or any(
        "in no common order" in said for job in found for _, told in job for said in told
    )


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


def wait_for_data(rank: int, world_size: int) -> tuple[bool | None, int]:
    """Train a net that waits for data in every step until turns were tried; return what is kept, and how often told."""
    training = Training("crossover", rank)
    known, ends_s = torch.zeros(1), time.monotonic() + SOON_S / 2
    with heard(logging.INFO) as said:
        while not known and time.monotonic() < ends_s:
            for _ in range(10):
                time.sleep(0.01)
                training.backward()
            known[0] = training.state.stats()["turns_pay"] is not None
            dist.all_reduce(known, dist.ReduceOp.MIN)
    pays = training.state.stats()["turns_pay"]
    dist.barrier()
    training.close()
    return pays, sum("side by side with 1 sibling(s); from now on" in words for words in said)


@pytest.mark.defect("turns-14")
def test_siblings_find_out_whether_turns_pay() -> None:
    group = new_group()
    variables = [{"CROSSOVER_GROUP": group, "CROSSOVER_DEVICE": f"dev{rank}"} for rank in range(2)]
    jobs = [Job(wait_for_data, 2, environment=variables, name=name) for name in "ab"]
    found = run_jobs(jobs, timeout_s=SOON_S)
    pays = found[0][0][0]
    assert pays is not None
    assert found == [[(pays, 1), (pays, 0)]] * 2


def run(logs: Path, *words: str, **given: Any) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "crossover_ddp.cli", "run", "--logs", str(logs), "--", *words]
    return subprocess.run(
        command, cwd=ROOT, timeout=SOON_S, text=True, **given or {"capture_output": True}
    )


@pytest.mark.defect("strangers-19")
@pytest.mark.parametrize("gone", ["a full disk", "a terminal", "a reader"])
def test_jobs_end_well_although_nothing_can_be_shown(gone: str, tmp_path: Path) -> None:
    if gone == "a full disk":
        output = os.open("/dev/full", os.O_WRONLY)
    else:
        theirs, output = os.openpty() if gone == "a terminal" else os.pipe()
        os.close(theirs)
    done = tmp_path / "done"
    code = run(tmp_path, "touch", str(done), stdout=output, stderr=output).returncode
    os.close(output)
    assert code == 0
    assert done.exists()


@pytest.mark.defect("turns-8")
@pytest.mark.parametrize("launcher", ["train.py", "-m train"])
def test_a_script_may_have_an_argument_called_torchrun(launcher: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys; print(sys.argv[1:])")
    command = f"PYTHONPATH={tmp_path} {sys.executable} {launcher.replace('train.py', f'{tmp_path}/train.py')}"
    assert run(tmp_path, f"{command} --launcher torchrun --lr 0.1").returncode == 0
    assert "['--launcher', 'torchrun', '--lr', '0.1']" in (tmp_path / "1.log").read_text()


@pytest.mark.defect("strangers-20")
def test_two_torchruns_at_one_endpoint_are_refused_whatever_their_ids_are(tmp_path: Path) -> None:
    """With c10d one of them would serve the other's store, and end it with itself."""
    torchrun = f"{sys.executable} -m torch.distributed.run --rdzv-backend c10d"
    torchrun += " --rdzv-endpoint localhost:29412 --rdzv-id {} none.py"
    done = run(tmp_path, torchrun.format("a"), "--", torchrun.format("b"))
    assert done.returncode == 2
    assert "expected a rendezvous of its own for each job" in done.stderr


@pytest.mark.defect("strangers-35")
def test_a_platform_without_fcntl_is_named() -> None:
    """The wheel claims any platform; where it cannot work, the first name that is imported says why."""
    text = "import sys; sys.modules['fcntl'] = None; from crossover_ddp import GPUMutex"
    words = [sys.executable, "-c", text]
    done = subprocess.run(words, cwd=ROOT, timeout=SOON_S, capture_output=True, text=True)
    assert done.stderr.splitlines()[-1].startswith(
        "ImportError: expected Linux, got sys.platform=linux;"
    )

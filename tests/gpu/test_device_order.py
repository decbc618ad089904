"""Turns on one GPU between real processes, seen on the device's own clock.

Every turn launches a kernel that writes down when it began and ended and gives the turn back at once, with the
kernel still to run. Kernels of two jobs must never be under way at the same time. That the test can fail is shown by
the same run without a mutex, and with the wait for the device left out.
"""

import itertools
import os
import signal
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from crossover_ddp._system.device import device_name
from tests import fake_cuda
from tests.gpu.kernels import Interval, busy_kernel, gaps_s, intervals, overlaps
from tests.gpu.races import (
    TIMEOUT_S,
    TURNS,
    Plan,
    check_turns,
    hear,
    meet,
    mutex_of,
    new_plan,
    run_race,
    take_turn,
    tell,
)
from tests.harness import Job, run_jobs, spawn_script
from tests.harness.waiting import eventually

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("variant", ["mutex", "side", "streams", "graph"])
def test_kernels_of_two_jobs_never_overlap(
    variant: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [[first], [second]] = run_race(new_plan(tmp_path, variant=variant))
    check_turns(first, second)
    gaps = gaps_s(first.ran, second.ran)
    with capsys.disabled():  # a figure for docs/measurements.md
        print(
            f"\n{torch.cuda.get_device_name()}, {variant}: the device idles for "
            f"{1e6 * statistics.median(gaps):.0f} us at a hand-over, "
            f"median of {len(gaps)}, at most {1e6 * max(gaps):.0f}"
        )
    # A host that runs ahead of its device draws several turns; the fake device's hosts are its devices, and busy.
    assert len(gaps) >= (1 if fake_cuda.is_here() else TURNS), "the jobs did not alternate"


NO_CLOCK = pytest.mark.gpu(real="no clock: on a busy machine kernels of the two need not meet")


@pytest.mark.parametrize("variant", ["none", "deaf", pytest.param("stream not named", marks=NO_CLOCK)])
def test_the_same_run_overlaps_when_the_device_does_not_wait(variant: str, tmp_path: Path) -> None:
    [[first], [second]] = run_race(new_plan(tmp_path, variant=variant))
    assert overlaps(first.ran, second.ran), "the tests above cannot fail: they prove nothing"


def test_a_turn_belongs_to_all_ranks_of_a_job_on_the_device(tmp_path: Path) -> None:
    for mine, theirs in itertools.product(*run_race(new_plan(tmp_path, processes=4, turns=10), world_size=2)):
        check_turns(mine, theirs)


def test_giving_back_does_not_wait_for_the_device(tmp_path: Path) -> None:
    busy = busy_kernel()
    marks = torch.zeros(2, dtype=torch.int64, device="cuda")
    with mutex_of(new_plan(tmp_path)) as mutex:
        for _ in range(6):
            mutex.acquire()
            busy(marks, 50_000_000)
            kernel_done = torch.cuda.Event()
            kernel_done.record()
            mutex.release()
            assert not kernel_done.query(), "the kernel was over: the host has waited for it"
            torch.cuda.synchronize()


PRINT_NAME = """
import sys, torch
from crossover_ddp._system.device import device_name
print(device_name(torch.device("cuda", int(sys.argv[1]))))
"""


def name_where_visible(directory: Path, devices: str, index: int) -> str:
    """Return the name of a device in a process that sees these devices, as ``CUDA_VISIBLE_DEVICES`` says."""
    script = directory / "print_name.py"
    script.write_text(PRINT_NAME)
    visible = {"CUDA_VISIBLE_DEVICES": devices}  # read when CUDA is first used, not when it is loaded
    with spawn_script(script, 1, args=[str(index)], environment=visible, forked=True) as ranks:
        return ranks.wait(TIMEOUT_S)[0].strip()


def visible_here() -> list[str]:
    listed = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return listed.split(",") if listed else [str(index) for index in range(torch.cuda.device_count())]


def test_a_gpu_has_one_name_by_whatever_number_a_process_knows_it(tmp_path: Path) -> None:
    name = device_name(torch.device("cuda", 0))
    assert name_where_visible(tmp_path, visible_here()[0], 0) == name
    assert name_where_visible(tmp_path, name, 0) == name  # CUDA takes the UUID as well


@pytest.mark.gpu(real="no nvidia-smi")
def test_the_driver_names_the_gpu_as_torch_and_nvidia_smi_do() -> None:
    name = device_name(torch.device("cuda", 0))
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60.0).stdout
    assert name in listed, listed
    if name.startswith("GPU-"):
        assert name == f"GPU-{torch.cuda.get_device_properties(0).uuid}"


@pytest.mark.gpu(count=2)
def test_two_gpus_keep_their_names_when_their_numbers_are_swapped(tmp_path: Path) -> None:
    names = [device_name(torch.device("cuda", index)) for index in range(2)]
    assert names[0] != names[1]
    swapped = ",".join(reversed(visible_here()[:2]))
    assert [name_where_visible(tmp_path, swapped, index) for index in (1, 0)] == names


LONG_NS = 2_000_000_000
DEATH_TIMEOUT_S = 25.0


def die_in_turn(rank: int, world_size: int, plan: Plan) -> None:
    """Be killed with a kernel under way: inside the turn ("holding"), or after giving it back."""
    torch.cuda.set_device(0)
    with mutex_of(plan) as mutex:
        meet(plan, "joined")
        mutex.acquire()
        busy_kernel()(torch.zeros(2, dtype=torch.int64, device="cuda"), LONG_NS)
        if plan.variant == "given back":
            mutex.release()
        tell(plan, "computing")
        time.sleep(0.2)  # the sibling is waiting by now
        os.kill(os.getpid(), signal.SIGKILL)


def outlive(rank: int, world_size: int, plan: Plan) -> float:
    """Take turns after a sibling that dies; return how long its death has held us up on host and device."""
    torch.cuda.set_device(0)
    busy, marks = busy_kernel(), torch.zeros(2, dtype=torch.int64, device="cuda")
    with mutex_of(plan) as mutex:
        tell(plan, "joined")
        hear(plan, "computing")
        begin_s = time.monotonic()
        for _ in range(5):
            mutex.acquire()
            busy(marks, 1000)
            done = torch.cuda.Event()
            done.record()
            mutex.release()
            assert eventually(done.query, DEATH_TIMEOUT_S, every_s=0.001), (
                "the stream waits for a dead process"
            )
        took_s = time.monotonic() - begin_s
        # The last one to leave removes the files; a CUDA process takes a while to die.
        assert eventually(lambda: not mutex.stats()["siblings"], DEATH_TIMEOUT_S), (
            "the killed one is still there"
        )
    return took_s


@pytest.mark.parametrize("variant", ["holding", "given back"])
def test_a_job_goes_on_when_its_sibling_is_killed_with_kernels_in_flight(
    variant: str, tmp_path: Path
) -> None:
    plan = new_plan(tmp_path, variant=variant)
    dying = Job(die_in_turn, 1, (plan,), backend=None, deaths={0: signal.SIGKILL}, name="dying")
    living = Job(outlive, 1, (plan,), backend=None, name="living")
    [_, [took_s]] = run_jobs([dying, living], timeout_s=TIMEOUT_S)
    assert took_s < DEATH_TIMEOUT_S, "it waited for a lease, or nearly"


MANY_TURNS = 1000 if fake_cuda.is_here() else 3000
Held = tuple[int, int, int]


def held() -> Held:
    """Return open descriptors, bytes on the device, and pages in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return len(os.listdir("/proc/self/fd")), torch.cuda.memory_allocated(), pages


def take_many_turns(rank: int, world_size: int, plan: Plan) -> tuple[Held, Held, dict[str, Any]]:
    torch.cuda.set_device(0)
    marks = torch.zeros(2, dtype=torch.int64, device="cuda")
    busy_kernel()
    with mutex_of(plan) as mutex:
        meet(plan, "ready")
        before = None
        for turn in range(plan.turns):
            take_turn(mutex, plan, marks, plan.spin_ns)
            if turn == 500:
                torch.cuda.synchronize()
                before = held()
        torch.cuda.synchronize()
        assert before is not None
        return before, held(), mutex.stats()


def test_thousands_of_turns_leave_nothing_behind(tmp_path: Path) -> None:
    plan = new_plan(tmp_path, turns=MANY_TURNS, spin_ns=10_000)
    jobs = [Job(take_many_turns, 1, args=(plan,), backend=None, name=name) for name in "ab"]
    for [(before, after, stats)] in run_jobs(jobs, timeout_s=TIMEOUT_S):
        assert stats["turns"] == MANY_TURNS
        assert stats["disabled_because"] is None
        assert after[0] <= before[0]
        assert after[1] == before[1]
        # What is enqueued on the fake device lies in the process's own memory, for as long as it is late.
        assert fake_cuda.is_here() or (after[2] - before[2]) * os.sysconf("SC_PAGE_SIZE") < 8 * 2**20


def at(*pairs: tuple[int, int]) -> list[Interval]:
    return [Interval(begin, end) for begin, end in pairs]


def test_the_instruments_tell_overlaps_and_gaps() -> None:
    mine = at((0, 5), (10, 15))
    assert intervals(torch.tensor([[0, 5], [10, 15]])) == mine
    assert not overlaps(mine, at((5, 10), (15, 20)))
    assert overlaps(mine, at((4, 10))) == [(Interval(0, 5), Interval(4, 10))]
    assert len(overlaps(mine, at((-1, 99)))) == 2
    assert len(gaps_s(mine, at((5, 10), (15, 30)))) == 3
    assert gaps_s(at((0, 5), (6, 15)), at((17, 20), (40, 50))) == pytest.approx([2e-9])
    assert gaps_s(at((0, 5), (6, 15)), at((10, 12), (15, 16))) == pytest.approx([-5e-9])


def test_kernels_of_one_stream_run_one_after_the_other_for_the_time_asked() -> None:
    marks = torch.zeros(4, 2, dtype=torch.int64, device="cuda")
    for row in marks:
        busy_kernel()(row, 3_000_000)
    ran = intervals(marks)
    assert all(3e6 <= end - begin < 30e6 for begin, end in ran)
    assert all(earlier.end_ns <= later.begin_ns for earlier, later in itertools.pairwise(ran))

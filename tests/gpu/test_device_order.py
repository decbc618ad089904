"""Turns on one GPU between real processes, measured on the device's own clock.

Every turn launches a kernel that records its begin and its end, and releases the turn at once,
before the kernel has run. Kernels of two jobs must never run at the same time. The same run without
a mutex, and one without the wait for the device, show that this test can fail.
"""

import contextlib
import itertools
import os
import signal
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from crossover_ddp import UnsupportedConfigurationError
from crossover_ddp._system.device import device_name
from crossover_ddp.gpu_mutex import GPUMutex
from tests import fake_cuda
from tests.gpu import races
from tests.gpu.kernels import Interval, busy_kernel, gaps_s, intervals, overlaps
from tests.gpu.races import (
    LEASE_S,
    TIMEOUT_S,
    Plan,
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
from tests.unit.turns.mutexes import membership_of

pytestmark = pytest.mark.gpu

LONG_NS = 1_000_000_000


@pytest.mark.parametrize("variant", ["mutex", "side", "streams", "graph"])
def test_kernels_of_two_jobs_never_overlap(variant: str, tmp_path: Path, capsys: Any) -> None:
    [[first], [second]] = run_race(new_plan(tmp_path, variant=variant))
    races.check_turns(first, second)
    gaps = gaps_s(first.ran, second.ran)
    with capsys.disabled():  # a figure for docs/measurements.md
        print(
            f"\n{torch.cuda.get_device_name()}, {variant}: the device idles for "
            f"{1e6 * statistics.median(gaps):.0f} us at a hand-over, "
            f"median of {len(gaps)}, at most {1e6 * max(gaps):.0f}"
        )
    # A host that runs ahead of its device draws several turns. The fake device is the host.
    assert len(gaps) >= (1 if fake_cuda.is_here() else races.TURNS), "the jobs did not alternate"


NO_CLOCK = pytest.mark.gpu(real="no clock: on a busy machine kernels of the two need not meet")


@pytest.mark.parametrize(
    "variant", ["none", "deaf", pytest.param("stream not named", marks=NO_CLOCK)]
)
def test_the_same_run_overlaps_when_the_device_does_not_wait(variant: str, tmp_path: Path) -> None:
    [[first], [second]] = run_race(new_plan(tmp_path, variant=variant))
    assert overlaps(first.ran, second.ran), "the tests above cannot fail: they prove nothing"


def test_a_turn_belongs_to_all_ranks_of_a_job_on_the_device(tmp_path: Path) -> None:
    for mine, theirs in itertools.product(
        *run_race(new_plan(tmp_path, processes=4, turns=10), world_size=2)
    ):
        races.check_turns(mine, theirs)


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
    """Return the name of a device in a process with this ``CUDA_VISIBLE_DEVICES``."""
    script = directory / "print_name.py"
    script.write_text(PRINT_NAME)
    # CUDA reads the variable when it is first used, not when it is loaded.
    visible = {"CUDA_VISIBLE_DEVICES": devices}
    with spawn_script(script, 1, args=[str(index)], environment=visible, forked=True) as ranks:
        return ranks.wait(TIMEOUT_S)[0].strip()


def visible_here() -> list[str]:
    listed = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return (
        listed.split(",") if listed else [str(index) for index in range(torch.cuda.device_count())]
    )


def test_a_gpu_has_one_name_whatever_its_index(tmp_path: Path) -> None:
    names = [
        device_name(torch.device("cuda", index))
        for index in range(min(2, torch.cuda.device_count()))
    ]
    assert name_where_visible(tmp_path, visible_here()[0], 0) == names[0]
    assert name_where_visible(tmp_path, names[0], 0) == names[0]  # CUDA takes the UUID as well
    if len(names) > 1:
        swapped = ",".join(reversed(visible_here()[:2]))
        assert names[0] != names[1] == name_where_visible(tmp_path, swapped, 0)


@pytest.mark.gpu(real="no nvidia-smi")
def test_the_driver_torch_and_nvidia_smi_name_the_gpu_alike() -> None:
    name = device_name(torch.device("cuda", 0))
    listed = subprocess.run(
        ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60.0
    ).stdout
    assert name in listed, listed
    if name.startswith("GPU-"):
        assert name == f"GPU-{torch.cuda.get_device_properties(0).uuid}"


DEATH_TIMEOUT_S = 25.0


def die_in_turn(rank: int, world_size: int, plan: Plan) -> None:
    """Be killed while a kernel runs: inside the turn ("holding"), or after its release."""
    torch.cuda.set_device(0)
    with mutex_of(plan) as mutex:
        meet(plan, "joined")
        mutex.acquire()
        busy_kernel()(torch.zeros(2, dtype=torch.int64, device="cuda"), 2 * LONG_NS)
        if plan.variant == "given back":
            mutex.release()
        tell(plan, "computing")
        time.sleep(0.2)  # time for the sibling to begin to wait
        os.kill(os.getpid(), signal.SIGKILL)


def outlive(rank: int, world_size: int, plan: Plan) -> float:
    """Take turns after a sibling that dies. Return how long its death delayed host and device."""
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
                "it waits for a dead process"
            )
        took_s = time.monotonic() - begin_s
        # The last job to leave removes the files, and a CUDA process takes a while to die.
        assert eventually(lambda: not mutex.stats()["siblings"], DEATH_TIMEOUT_S), (
            "the dead one stays"
        )
    return took_s


@pytest.mark.parametrize("variant", ["holding", "given back"])
def test_a_job_continues_when_its_sibling_is_killed_with_kernels_in_flight(
    variant: str, tmp_path: Path
) -> None:
    plan = new_plan(tmp_path, variant=variant)
    dying = Job(die_in_turn, 1, (plan,), backend=None, deaths={0: signal.SIGKILL}, name="dying")
    living = Job(outlive, 1, (plan,), backend=None, name="living")
    [_, [took_s]] = run_jobs([dying, living], timeout_s=TIMEOUT_S)
    assert took_s < DEATH_TIMEOUT_S, "it waited for a lease, or nearly"


MANY_TURNS = 1000 if fake_cuda.is_here() else 3000


def test_thousands_of_turns_leak_no_descriptors_or_memory(tmp_path: Path) -> None:
    for [outcome] in run_race(new_plan(tmp_path, turns=MANY_TURNS, spin_ns=10_000)):
        before, after = outcome.held
        assert outcome.stats["turns"] == MANY_TURNS + races.WARM_UP_TURNS
        assert after[0] <= before[0]
        assert after[1] == before[1]
        # The fake device's queue is in the memory of the process, so that may grow meanwhile.
        assert (
            fake_cuda.is_here() or (after[2] - before[2]) * os.sysconf("SC_PAGE_SIZE") < 8 * 2**20
        )


def test_a_turn_inside_a_capture_is_refused_and_the_mutex_still_works(tmp_path: Path) -> None:
    plan = new_plan(tmp_path)
    marks = torch.zeros(2, dtype=torch.int64, device="cuda")
    busy_kernel()(marks, 1000)
    torch.cuda.synchronize()

    def refused(act: Callable[[], object]) -> None:
        graph, error = torch.cuda.CUDAGraph(), UnsupportedConfigurationError
        with pytest.raises(error, match="capturing"), torch.cuda.graph(graph):
            busy_kernel()(marks, 1000)
            act()
        torch.cuda.synchronize()

    with mutex_of(plan) as mutex:
        refused(mutex.acquire)
        mutex.acquire()
        refused(mutex.release)
        assert mutex.holding
        mutex.release()
        take_turn(mutex, plan, marks, 1000)
        torch.cuda.synchronize()
        done = eventually(lambda: mutex.stats()["turn"] == 2)
        assert done, "a refused call has drawn a turn, or released one"


def test_a_thread_that_waits_for_a_turns_end_does_not_spoil_a_capture(tmp_path: Path) -> None:
    """In torch's default mode a wait for an event on any thread would invalidate the capture."""
    plan = new_plan(tmp_path, variant="streams")
    marks, static = torch.zeros(2, 2, dtype=torch.int64, device="cuda")
    busy_kernel()(static, 1000)
    torch.cuda.synchronize()
    with mutex_of(plan) as mutex:
        for duration_ns in (150_000_000, LONG_NS):
            take_turn(mutex, plan, marks, duration_ns)
        # Not `torch.cuda.graph`: it would synchronize the device first, which ends the waits.
        graph, capturing = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(capturing):
            graph.capture_begin(capture_error_mode="global")
            busy_kernel()(static, 1000)
            # Meanwhile the first turn ends, and the thread begins to wait for the second one.
            time.sleep(0.5)
            graph.capture_end()
        (own,) = membership_of(mutex).segment.members()
        assert (own.started, own.returned) == (2, 1), "only the first turn should have ended"
        graph.replay()


def share_an_idle_turn(
    rank: int, world_size: int, plan: Plan, is_first: bool
) -> tuple[list[Interval], bool]:
    """Compute in a turn, then wait inside it until the sibling has been in its own turn.

    Return the kernels, and whether the sibling has. The variant "streams" computes on another
    stream than that on which it acquires turns, "graph" while the stream captures a graph.
    """
    torch.cuda.set_device(0)
    marks = torch.zeros(1, 2, dtype=torch.int64, device="cuda")
    busy, graph, taking = busy_kernel(), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    computing = torch.cuda.Stream() if plan.variant == "streams" else taking
    torch.cuda.synchronize()

    def turn(duration_ns: int) -> None:
        with torch.cuda.stream(taking):
            mutex.acquire()
        with torch.cuda.stream(computing):
            busy(marks[0], duration_ns)

    def came() -> bool:
        return any(Path(plan.meeting).glob("came.*"))

    with contextlib.closing(GPUMutex(plan.group, device=0, lease=LEASE_S, trial=True)) as mutex:
        meet(plan, "here")
        if is_first:
            turn(1000)
            with torch.cuda.stream(computing):
                mutex.release()
        else:
            hear(plan, "waits")
        turn(LONG_NS if is_first and plan.variant != "graph" else 1000)
        if is_first and plan.variant == "graph":
            with torch.cuda.stream(computing):
                computing.synchronize()
                graph.capture_begin(capture_error_mode="global")
                busy(torch.zeros_like(marks[0]), 1000)
                tell(plan, "waits")
                assert not eventually(came, 0.5), "a turn is not lent during a capture"
                graph.capture_end()
        tell(plan, "waits" if is_first else "came")
        has_come = eventually(came, TIMEOUT_S / 2)
        mutex.release()
        torch.cuda.synchronize()
        assert mutex.stats()["leases_expired"] == 0
        return intervals(marks), has_come


@pytest.mark.parametrize("variant", ["mutex", "streams", "graph"])
def test_a_turn_is_lent_when_the_host_waits_and_the_device_has_done_its_part(
    variant: str, tmp_path: Path
) -> None:
    plan = new_plan(tmp_path, variant=variant)
    jobs = [
        Job(share_an_idle_turn, 1, args=(plan, is_first), backend=None)
        for is_first in (True, False)
    ]
    [[(first, came)], [(second, _)]] = run_jobs(jobs, timeout_s=TIMEOUT_S)
    assert came
    assert not overlaps(first, second)


LEAVE_WITHOUT_A_WORD = """
import sys, torch
from crossover_ddp.gpu_mutex import GPUMutex
from tests.gpu.kernels import busy_kernel
from tests.gpu.races import Plan, hear, tell
busy, plan = busy_kernel(), Plan(*sys.argv[1:])
marks = torch.zeros(2, dtype=torch.int64, device="cuda")
torch.cuda.synchronize()
mutex = GPUMutex(plan.group, device=0, lease=30.0)
tell(plan, "joined")
hear(plan, "go")
mutex.acquire()
busy(marks, 1_000_000_000)
mutex.release()
tell(plan, "given back")
hear(plan, "end")
"""


def test_a_script_that_ends_with_kernels_in_flight_does_not_block_its_sibling(
    tmp_path: Path,
) -> None:
    """Without `close()` the process waits at its exit for the device, then releases its slot."""
    plan = new_plan(tmp_path)
    marks = torch.zeros(2, dtype=torch.int64, device="cuda")
    busy = busy_kernel()
    torch.cuda.synchronize()
    script = tmp_path / "script.py"
    script.write_text(LEAVE_WITHOUT_A_WORD)
    with (
        mutex_of(plan) as mutex,
        spawn_script(script, 1, args=[plan.group, plan.meeting]) as ending,
    ):
        hear(plan, "joined")
        tell(plan, "go")
        hear(plan, "given back")
        begin_s = time.monotonic()
        tell(plan, "end")
        mutex.acquire()
        beside = not fake_cuda.is_here() and time.monotonic() - begin_s <= LONG_NS / 2e9
        assert not beside, "beside the sibling's kernel"
        busy(marks, 1000)
        ending.wait(60.0)
        assert mutex.stats()["leases_expired"] == 0
        mutex.release()

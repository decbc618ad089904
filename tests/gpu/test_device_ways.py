"""Turns on one GPU in other people's loops: streams, graphs, mixed ways of ordering, siblings that come and go."""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from crossover_ddp import UnsupportedConfigurationError
from crossover_ddp._system.device import device_name
from crossover_ddp.gpu_mutex import GPUMutex
from tests import fake_cuda
from tests.gpu.kernels import Interval, busy_kernel, intervals, overlaps
from tests.gpu.races import (
    LEASE_S,
    TIMEOUT_S,
    Plan,
    check_alternation,
    check_turns,
    hear,
    mutex_of,
    new_plan,
    run_race,
    take_turn,
    tell,
)
from tests.harness import Job, run_jobs
from tests.harness.waiting import eventually
from tests.unit.turns.mutexes import membership_of

pytestmark = pytest.mark.gpu

LONG_NS = 1_000_000_000


# --- what the driver says -----------------------------------------------------------------------------------------


@pytest.mark.gpu(real="no nvidia-smi")
def test_the_driver_names_the_gpu_as_torch_and_nvidia_smi_do() -> None:
    name = device_name(torch.device("cuda", 0))
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60.0).stdout
    assert name in listed, listed
    if name.startswith("GPU-"):
        assert name == f"GPU-{torch.cuda.get_device_properties(0).uuid}"


# --- streams and graphs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["streams", "graph"])
def test_kernels_on_other_streams_and_in_graphs_never_overlap(variant: str, tmp_path: Path) -> None:
    [[first], [second]] = run_race(new_plan(tmp_path, variant=variant))
    check_turns(first, second)
    check_alternation(first, second)


@pytest.mark.gpu(real="no clock: on a busy machine kernels of the two need not meet")
def test_kernels_on_a_stream_that_release_does_not_name_overlap(tmp_path: Path) -> None:
    [[first], [second]] = run_race(new_plan(tmp_path, variant="stream not named"))
    assert overlaps(first.ran, second.ran), "the test above cannot fail: it proves nothing"


def test_a_turn_inside_a_capture_is_refused_and_the_mutex_goes_on(tmp_path: Path) -> None:
    plan = new_plan(tmp_path)
    marks = torch.zeros(2, dtype=torch.int64, device="cuda")
    busy_kernel()(marks, 1000)
    torch.cuda.synchronize()
    with mutex_of(plan) as mutex:
        with (
            pytest.raises(UnsupportedConfigurationError, match="capturing"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            busy_kernel()(marks, 1000)
            mutex.acquire()
        torch.cuda.synchronize()
        mutex.acquire()
        with (
            pytest.raises(UnsupportedConfigurationError, match="capturing"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            mutex.release()
        torch.cuda.synchronize()
        assert mutex.holding
        mutex.release()
        take_turn(mutex, plan, marks, 1000)
        torch.cuda.synchronize()
        told = eventually(lambda: mutex.stats()["turn"] == 2)
        assert told, "a refused call has drawn a turn, or given one back"


def test_a_thread_that_waits_for_a_turns_end_does_not_spoil_a_capture(tmp_path: Path) -> None:
    """In torch's default mode a wait for an event on any thread of the process would invalidate the capture."""
    plan = new_plan(tmp_path, variant="streams")
    marks, static = torch.zeros(2, 2, dtype=torch.int64, device="cuda")
    busy_kernel()(static, 1000)
    torch.cuda.synchronize()
    with mutex_of(plan) as mutex:
        for duration_ns in (150_000_000, LONG_NS):
            take_turn(mutex, plan, marks, duration_ns)
        # `torch.cuda.graph` would synchronize the device first, and the thread's waits be over.
        graph, capturing = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(capturing):
            graph.capture_begin(capture_error_mode="global")
            busy_kernel()(static, 1000)
            time.sleep(0.5)  # meanwhile the first turn ends, and the thread begins to wait for the second
            graph.capture_end()
        (own,) = membership_of(mutex).segment.members()
        assert (own.started, own.returned) == (2, 1), "one turn was to be told, and one not yet"
        graph.replay()


# --- turns in which nothing is computed ---------------------------------------------------------------------------


def share_an_idle_turn(rank: int, world_size: int, plan: Plan, is_first: bool) -> tuple[list[Interval], bool]:
    """Compute for a while in a turn, then wait inside it until the sibling has been in its own; was it?

    "streams": on another stream than that on which turns are taken. "graph": while the stream captures a graph.
    """
    torch.cuda.set_device(0)
    busy, marks, graph = (
        busy_kernel(),
        torch.zeros(1, 2, dtype=torch.int64, device="cuda"),
        torch.cuda.CUDAGraph(),
    )
    taking = torch.cuda.Stream()
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
        tell(plan, "here")
        hear(plan, "here", 2)
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
                assert not eventually(came, 0.5), "the stream was asked, or not"
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
    jobs = [Job(share_an_idle_turn, 1, args=(plan, is_first), backend=None) for is_first in (True, False)]
    [[(first, came)], [(second, _)]] = run_jobs(jobs, timeout_s=TIMEOUT_S)
    assert came
    assert not overlaps(first, second)


# --- a script that ends -------------------------------------------------------------------------------------------

LEAVE_WITHOUT_A_WORD = """
import sys, torch
from crossover_ddp.gpu_mutex import GPUMutex
from tests.gpu.kernels import busy_kernel
busy = busy_kernel()
marks = torch.zeros(2, dtype=torch.int64, device="cuda")
torch.cuda.synchronize()
mutex = GPUMutex(sys.argv[1], device=0, lease=30.0)
print("joined", flush=True)
sys.stdin.readline()
mutex.acquire()
busy(marks, 1_000_000_000)
mutex.release()
print("given back", flush=True)
sys.stdin.readline()
"""


def test_a_script_that_ends_with_kernels_in_flight_holds_nobody_up(tmp_path: Path) -> None:
    """Without `close()`: the end of the process waits for the device before it gives its slot up."""
    plan = new_plan(tmp_path)
    marks = torch.zeros(2, dtype=torch.int64, device="cuda")
    busy = busy_kernel()
    torch.cuda.synchronize()
    with contextlib.ExitStack() as stack:
        mutex = stack.enter_context(mutex_of(plan))
        ending = subprocess.Popen(
            [sys.executable, "-c", LEAVE_WITHOUT_A_WORD, plan.group],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        stack.callback(ending.communicate)
        stack.callback(ending.kill)
        assert ending.stdin is not None and ending.stdout is not None
        assert ending.stdout.readline().strip() == "joined"
        print("go", file=ending.stdin, flush=True)
        assert ending.stdout.readline().strip() == "given back"
        begin_s = time.monotonic()
        print("end", file=ending.stdin, flush=True)
        mutex.acquire()
        beside = not fake_cuda.is_here() and time.monotonic() - begin_s <= LONG_NS / 2e9
        assert not beside, "beside the sibling's kernel"
        busy(marks, 1000)
        assert ending.wait(timeout=60.0) == 0
        assert mutex.stats()["leases_expired"] == 0
        mutex.release()

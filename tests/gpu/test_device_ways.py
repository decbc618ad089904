"""Turns on one GPU in other people's loops: streams, graphs, mixed ways of ordering, siblings that come and go."""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from crossover_ddp import UnsupportedConfigurationError
from crossover_ddp.gpu_mutex import GPUMutex
from tests import fake_cuda
from tests.gpu.kernels import Interval, busy_kernel, intervals, overlaps
from tests.gpu.races import (
    LEASE_S,
    TIMEOUT_S,
    Plan,
    hear,
    meet,
    mutex_of,
    new_plan,
    take_turn,
    tell,
)
from tests.harness import Job, run_jobs, spawn_script
from tests.harness.waiting import eventually
from tests.unit.turns.mutexes import membership_of

pytestmark = pytest.mark.gpu

LONG_NS = 1_000_000_000


def test_a_turn_inside_a_capture_is_refused_and_the_mutex_goes_on(tmp_path: Path) -> None:
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


def share_an_idle_turn(rank: int, world_size: int, plan: Plan, is_first: bool) -> tuple[list[Interval], bool]:
    """Compute for a while in a turn, then wait inside it until the sibling has been in its own; was it?

    "streams": on another stream than that on which turns are taken. "graph": while the stream captures a graph.
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


def test_a_script_that_ends_with_kernels_in_flight_holds_nobody_up(tmp_path: Path) -> None:
    """Without `close()`: the end of the process waits for the device before it gives its slot up."""
    plan = new_plan(tmp_path)
    marks = torch.zeros(2, dtype=torch.int64, device="cuda")
    busy = busy_kernel()
    torch.cuda.synchronize()
    script = tmp_path / "script.py"
    script.write_text(LEAVE_WITHOUT_A_WORD)
    with mutex_of(plan) as mutex, spawn_script(script, 1, args=[plan.group, plan.meeting]) as ending:
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

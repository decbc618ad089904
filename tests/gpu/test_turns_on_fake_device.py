"""Turns on the fake device, whose kernels a test can hold: leases, and streams that change."""

import contextlib
import threading
from pathlib import Path

import pytest
import torch

from crossover_ddp.gpu_mutex import GPUMutex
from tests.fake_cuda.gate import held
from tests.gpu.kernels import busy_kernel
from tests.gpu.races import LEASE_S, Plan, hear, new_plan, tell
from tests.harness import Job, run_jobs
from tests.harness.waiting import eventually

pytestmark = pytest.mark.fake_cuda


@pytest.mark.defect("turns-10")
@pytest.mark.quiet
def test_a_lease_follows_the_devices_turns(tmp_path: Path) -> None:
    """The host may run ahead of long kernels. The lease is four turns of the device, over 5 s."""
    marks = torch.zeros(2, dtype=torch.int64, device="cuda")
    with contextlib.closing(GPUMutex(new_plan(tmp_path).group, device=0)) as mutex:
        for _ in range(4):
            with mutex:
                busy_kernel()(marks, 1_400_000_000)
        torch.cuda.synchronize()
        assert eventually(lambda: mutex.stats()["lease_s"] > 5)


def computing(rank: int, world_size: int, plan: Plan) -> bool:
    """Take a turn on another stream while kernels of the last turn run.

    Return whether the sibling began its turn meanwhile.
    """
    torch.cuda.set_device(0)
    mutex = GPUMutex(plan.group, device=0, lease=LEASE_S)
    sibling_began = []
    first, other = torch.cuda.Stream(), torch.cuda.Stream()
    tell(plan, "joined")
    hear(plan, "joined", 3)
    with torch.cuda.stream(first):
        mutex.acquire()
        torch.ones(1, device="cuda")
    with held(first) as gate:

        def open_late() -> None:
            began = eventually(lambda: any(Path(plan.meeting).glob("began.*")), timeout_s=1.5)
            sibling_began.append(began)
            gate.open()

        tell(plan, "computing")
        hear(plan, "asked")
        opener = threading.Thread(target=open_late)
        opener.start()
        with torch.cuda.stream(other):
            mutex.acquire()
        opener.join()
    mutex.close()
    return sibling_began[0]


def asking(rank: int, world_size: int, plan: Plan) -> None:
    torch.cuda.set_device(0)
    mutex = GPUMutex(plan.group, device=0, lease=LEASE_S)
    tell(plan, "joined")
    hear(plan, "computing", 2)
    mutex.request()
    tell(plan, "asked")
    mutex.acquire()
    tell(plan, "began")
    mutex.close()


@pytest.mark.defect("turns-12")
@pytest.mark.quiet
def test_a_turn_ends_after_its_kernels_on_whatever_stream_the_next_begins(tmp_path: Path) -> None:
    """If another model's exchange takes the next turn, siblings still wait for the first model."""
    plan = new_plan(tmp_path)
    jobs = [Job(computing, 2, (plan,)), Job(asking, 1, (plan,), None, name="sibling")]
    assert run_jobs(jobs)[0] == [False, False]

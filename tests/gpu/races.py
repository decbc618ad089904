"""Two jobs that race for one GPU. The kernel of each turn records when it ran."""

import contextlib
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from crossover_ddp.gpu_mutex import GPUMutex
from tests.gpu.kernels import Interval, busy_kernel, intervals, overlaps
from tests.harness import Job, run_jobs
from tests.harness.groups import new_group
from tests.harness.waiting import eventually
from tests.unit.turns.mutexes import membership_of

LEASE_S = 30.0  # longer than any test, so that no overlap is due to an expired lease
TIMEOUT_S = 120.0  # includes a first compilation and two CUDA contexts
MEET_TIMEOUT_S = 90.0
TURNS = 20
SPIN_NS = 5_000_000  # longer than a time slice, so that two processes left alone interleave
WARM_UP_NS = 1000
WARM_UP_TURNS = 3


class Plan(NamedTuple):
    """The race of two jobs."""

    group: str
    meeting: str  # a directory for messages between processes; see `tell`
    processes: int = 2
    variant: str = "mutex"
    turns: int = TURNS
    spin_ns: int = SPIN_NS


class Outcome(NamedTuple):
    ran: list[Interval]
    stats: dict[str, Any]
    held: list[tuple[int, int, int]]  # after half of the turns and after all of them; see `held`


def new_plan(directory: Path, **changes: Any) -> Plan:
    return Plan(new_group(), str(directory), **changes)


def tell(plan: Plan, what: str) -> None:
    (Path(plan.meeting) / f"{what}.{os.getpid()}").touch()


def hear(plan: Plan, what: str, count: int = 1) -> None:
    """Wait until ``count`` processes have announced it with `tell`."""
    announced = functools.partial(Path(plan.meeting).glob, f"{what}.*")
    done = eventually(lambda: len([*announced()]) >= count, MEET_TIMEOUT_S, every_s=0.001)
    assert done, f"{count} processes should announce {what!r} within {MEET_TIMEOUT_S:.0f} s"


def meet(plan: Plan, what: str) -> None:
    tell(plan, what)
    hear(plan, what, plan.processes)


@contextlib.contextmanager
def mutex_of(plan: Plan) -> Iterator[GPUMutex]:
    """Make the mutex. With the variant "deaf" turns do not wait for the device."""
    mutex = GPUMutex(plan.group, device=0, lease=LEASE_S)
    if plan.variant == "deaf":
        membership_of(mutex).order.wait = lambda end: None  # type: ignore[method-assign]
    try:
        yield mutex
        torch.cuda.synchronize()
        assert mutex.disabled_because is None
    finally:
        mutex.close()


def take_turn(mutex: GPUMutex | None, plan: Plan, marks: torch.Tensor, spin_ns: int) -> None:
    """Compute in a turn, or without a mutex at once.

    The variant "streams" computes on a stream that the current one does not wait for, and passes
    it to ``release``. "stream not named" does not pass it. "side" acquires on a side stream, for
    which the compute stream waits, as the engine does.
    """
    current = torch.cuda.current_stream()
    waiting = torch.cuda.Stream() if plan.variant == "side" else current
    computing = _own_stream() if plan.variant in ("streams", "stream not named") else current
    if mutex is not None:
        with torch.cuda.stream(waiting):
            mutex.acquire()
        current.wait_stream(waiting)
    with torch.cuda.stream(computing):
        if plan.variant == "graph":
            graph, static = _captured(spin_ns)
            graph.replay()
            marks.copy_(static)
        else:
            busy_kernel()(marks, spin_ns)
    if mutex is not None:
        mutex.release(streams=[computing] if plan.variant == "streams" else [])


@functools.cache
def _own_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


@functools.cache
def _captured(spin_ns: int) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """Capture the kernel, once for each length. The first call must be outside of turns."""
    static = torch.zeros(2, dtype=torch.int64, device="cuda")
    busy_kernel()(static, spin_ns)  # nothing may be compiled while a graph is captured
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        busy_kernel()(static, spin_ns)
    return graph, static


def held() -> tuple[int, int, int]:
    """Return open descriptors, bytes on the device, and pages in memory."""
    torch.cuda.synchronize()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return len(os.listdir("/proc/self/fd")), torch.cuda.memory_allocated(), pages


def race(rank: int, world_size: int, plan: Plan) -> Outcome:
    torch.cuda.set_device(0)
    busy_kernel()
    marks = torch.zeros(plan.turns, 2, dtype=torch.int64, device="cuda")
    unused = torch.zeros(2, dtype=torch.int64, device="cuda")
    if plan.variant == "graph":
        for spin_ns in (WARM_UP_NS, plan.spin_ns):
            _captured(spin_ns)
    torch.cuda.synchronize()
    with contextlib.nullcontext() if plan.variant == "none" else mutex_of(plan) as mutex:
        meet(plan, "ready")
        for _ in range(WARM_UP_TURNS):
            take_turn(mutex, plan, unused, WARM_UP_NS)
        meet(plan, "warm")
        half = []
        for turn, row in enumerate(marks):
            take_turn(mutex, plan, row, plan.spin_ns)
            if 2 * turn == plan.turns > 10 * TURNS:  # few turns are not interrupted
                half = [held()]
        return Outcome(intervals(marks), {} if mutex is None else mutex.stats(), [*half, held()])


def run_race(plan: Plan, world_size: int = 1) -> list[list[Outcome]]:
    """Let two jobs race."""
    backend = None if world_size == 1 else "gloo"
    jobs = [Job(race, world_size, args=(plan,), backend=backend, name=name) for name in "ab"]
    return run_jobs(jobs, timeout_s=TIMEOUT_S)


def check_turns(first: Outcome, second: Outcome) -> None:
    found = overlaps(first.ran, second.ran)
    assert not found, f"{len(found)} overlaps, the first one: {found[0]}"
    for outcome in (first, second):
        assert outcome.stats["disabled_because"] is None
        assert outcome.stats["leases_expired"] == 0
        assert outcome.stats["turns"] == len(outcome.ran) + WARM_UP_TURNS

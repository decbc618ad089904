"""What a device adds: late copies, late kernels, late collectives, and a device for each rank. On the fake one."""

import functools
import gc
import os
import signal
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from crossover_ddp import ExchangeError, reduce_scatter_all_gather_hook
from tests.fake_cuda import late
from tests.harness import close_pools, in_ranks, run_ranks
from tests.harness.training import Training, hooked
from tests.harness.turn import RecordingTurn

pytestmark = pytest.mark.fake_cuda

LATE: Mapping[str, Mapping[str, str]] = {
    "gloo": {"FAKE_COPY_US": "3000", "FAKE_COPY_JITTER_US": "5000", "FAKE_KERNEL_JITTER_US": "300"},
    "nccl": {"FAKE_NCCL_US": "3000", "FAKE_NCCL_JITTER_US": "5000", "FAKE_KERNEL_JITTER_US": "300"},
}
WAYS = ("split", "crossover", "int8", "averaged", "decoupled", "owned", "kfac", "muon")


def on_device(rank: int, world_size: int, way: str) -> tuple[torch.Tensor, list[bool]]:
    """Return the parameters after training, and on which devices this process has a context then."""
    device = f"cuda:{rank}"
    torch.cuda.set_device(device)
    around: Any = (lambda hook: allreduce_hook) if way == "plain" else (lambda hook: hook)
    way = "split" if way == "plain" else way
    training = Training(way, rank, device=device, mutex=RecordingTurn(), around=around).run(6)
    contexts = [torch._C._cuda_hasPrimaryContext(each) for each in range(world_size)]  # type: ignore[attr-defined]
    training.close()
    return torch.cat([p.detach().flatten() for p in training.model.parameters()]).cpu(), contexts


# Each way on one backend, and on both the split, whose two halves all the others have.
@pytest.mark.parametrize(
    ("backend", "way"),
    [
        *(("gloo", way) for way in ("split", "int8", "decoupled", "kfac")),
        *(("nccl", way) for way in ("split", "crossover", "averaged", "owned", "muon")),
    ],
)
def test_what_is_late_changes_nothing(backend: str, way: str) -> None:
    """What is read, overwritten or freed before its copy or kernel shows as other numbers here."""
    found = run_ranks(on_device, 2, args=(way,), backend=backend, environment=LATE[backend])
    reference = "plain" if way in ("split", "crossover", "decoupled") else way
    for (got, _), (expected, _) in zip(found, punctual(reference, backend), strict=True):
        assert torch.equal(got, expected)


@functools.cache
def punctual(way: str, backend: str) -> list[tuple[torch.Tensor, list[bool]]]:
    return run_ranks(on_device, 2, args=(way,), backend=backend)


def contexts_of_each(rank: int, world_size: int) -> dict[str, list[bool]]:
    return {way: on_device(rank, world_size, way)[1] for way in WAYS}


def test_no_thread_makes_a_context_on_another_ranks_device() -> None:
    close_pools()  # whose processes have had other devices
    _, contexts = run_ranks(contexts_of_each, 2, backend="nccl")
    assert contexts == {way: [False, True] for way in WAYS}


def consolidated(rank: int, world_size: int, way: str) -> set[str]:
    """Return the devices on which the owners' state lies when all ranks have it."""
    torch.cuda.set_device(rank)
    training = Training(way, rank, device=f"cuda:{rank}").run(3)
    training.state.consolidate()
    kept = [each.state_dict()["state"].values() for each in training.optimizers]
    training.run(1)
    training.close()
    return {
        str(t.device)
        for states in kept
        for state in states
        for t in state.values()
        if t is not None and t.dim()
    }


@pytest.mark.parametrize("way", ["owned", "muon"])
@pytest.mark.parametrize("backend", LATE)
def test_state_of_owners_comes_to_each_ranks_own_device(way: str, backend: str) -> None:
    assert run_ranks(consolidated, 2, args=(way,), backend=backend) == [{"cuda:0"}, {"cuda:1"}]


LATE_S = 0.1


def overwritten(rank: int, world_size: int, way: str) -> int:
    """Train a model, drop it, and return how many numbers of what is made then somebody else has written.

    Behind the fourth step go digests of the parameters, which no later step looks at.
    """
    torch.cuda.set_device(rank)
    found = 0
    for _ in range(2):
        training = Training(way, rank, device=f"cuda:{rank}", mutex=RecordingTurn()).run(3)
        torch.cuda.synchronize()
        with late(nccl_us=int(LATE_S * 1e6), copy_us=int(LATE_S * 1e6)):
            training.run(1).close()
            del training
            gc.collect()
            made = [torch.ones(numel, device="cuda") for numel in (16, 64, 1000) for _ in range(100)]
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        found += sum(int((each != 1).sum()) for each in made)
    return found


@pytest.mark.parametrize(("backend", "way"), [("nccl", "split"), ("gloo", "wrapped")])
def test_what_nobody_waits_for_writes_over_nothing(backend: str, way: str) -> None:
    assert run_ranks(overwritten, 2, args=(way,), backend=backend) == [0, 0]


@in_ranks(2, backend="nccl")
def test_beside_a_sibling_the_turn_is_taken_when_the_device_has_the_first_gradients(rank: int) -> None:
    """On NCCL a Future is complete long before its kernels are: the device would idle inside of the turn.

    Each collective is late by LATE_S.
    """
    torch.cuda.set_device(rank)
    taken: list[float] = []
    turn = RecordingTurn(at_acquire=lambda: taken.append(time.monotonic()))
    training = Training("decoupled", rank, device=f"cuda:{rank}", mutex=turn).run(6)
    with late(nccl_us=int(LATE_S * 1e6)):
        training.step()
        launched_s = time.monotonic()
        taken.clear()
        training.backward()
        assert taken[0] - launched_s > LATE_S
        for optimizer in training.optimizers:
            optimizer.step()
        training.close()


@in_ranks(2, backend="gloo")
def test_beside_a_sibling_the_turn_is_taken_when_the_device_has_done_a_wrapped_hook(rank: int) -> None:
    """Copies, and what a hook computes in callbacks, run outside of the turn."""
    torch.cuda.set_device(rank)
    busy_s: list[float] = []

    def acquired() -> None:
        begin_s = time.monotonic()
        torch.cuda.synchronize()
        busy_s.append(time.monotonic() - begin_s)

    turn = RecordingTurn(at_acquire=acquired)
    training = Training("wrapped", rank, device=f"cuda:{rank}", mutex=turn).run(3)
    with late(copy_us=int(LATE_S * 1e6)):
        training.backward()
        assert busy_s[-1] < LATE_S / 2
    training.close()


def told_of_a_dead_peer(rank: int, world_size: int) -> list[str]:
    """Rank 1 is killed in its third step; return what rank 0 is told, twice."""
    torch.cuda.set_device(rank)
    group = dist.new_group(timeout=timedelta(seconds=4))
    model = hooked(nn.Linear(4, 4).cuda(), reduce_scatter_all_gather_hook, group, process_group=group)
    errors = []
    for step in range(4):
        if rank and step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            model(torch.ones(2, 4, device="cuda")).sum().backward()
        except ExchangeError as error:
            errors.append(str(error))
    return errors


def test_where_the_host_waits_for_nccl_a_dead_peer_is_an_error_after_the_groups_timeout() -> None:
    environment = {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_DIST_USE_NCCL2": "0"}
    deaths = {1: signal.SIGKILL}
    told, _ = run_ranks(told_of_a_dead_peer, 2, backend="nccl", environment=environment, deaths=deaths)
    assert len(told) == 2 and told[0] == told[1]
    assert "of bucket 0 failed: " in told[0]

"""Known defects on a CUDA device, shown on the fake one; strangers-15 stands in `tests/gpu/test_collectives_gpu.py`."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp.averaging_hooks import LocalSGDState, local_sgd_hook
from crossover_ddp.codecs import CompressedState, Int8, compressed_hook
from crossover_ddp.comm_hooks import DecoupledState, decoupled_hook
from crossover_ddp.errors import CrossoverError
from crossover_ddp.gpu_mutex import GPUMutex
from tests.fake_cuda import late
from tests.fake_cuda.gate import held
from tests.gpu.kernels import busy_kernel
from tests.gpu.races import LEASE_S, Plan, hear, new_plan, tell
from tests.harness import Job, run_jobs, run_ranks
from tests.harness.waiting import eventually

pytestmark = pytest.mark.fake_cuda
STEPS = 5
SIZE = 64


class Layers(nn.Module):
    """Layers one behind the other; the first one's part is multiplied, by 0 in a step that does not need it."""

    def __init__(self, device: torch.device, count: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE, bias=False) for _ in range(count))
        self.to(device)

    def forward(self, inputs: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        outputs = inputs + factor * self.layers[0](inputs)
        for layer in list(self.layers)[1:]:
            outputs = layer(outputs)
        return outputs.square().mean()


def wrapped(device: torch.device, count: int = 4) -> DistributedDataParallel:
    """Return a model with a bucket for each layer."""
    return DistributedDataParallel(Layers(device, count), bucket_cap_mb=0.01, gradient_as_bucket_view=True)


def batch(rank: int, step: int, device: torch.device) -> torch.Tensor:
    return torch.randn(8, SIZE, generator=torch.Generator().manual_seed(100 * step + rank)).to(device)


def own_device(rank: int) -> torch.device:
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def parameters_of(model: nn.Module) -> list[list[float]]:
    return [parameter.detach().flatten().tolist() for parameter in model.parameters()]


def planned(rank: int, world_size: int) -> str:
    device = own_device(rank)
    model = wrapped(device)
    state = CompressedState(None)
    model.register_comm_hook(state, compressed_hook)
    for step in range(STEPS):
        model(batch(rank, step, device)).backward()
    try:
        told = str(state.plan_codec())
    except CrossoverError as error:
        told = str(error)
    try:
        model(batch(rank, STEPS, device)).backward()
    except CrossoverError as error:
        return f"cannot go on: {error}"
    return told


@pytest.mark.defect("codecs-S4")
def test_a_plan_on_nccl_is_made_or_refused_and_training_goes_on() -> None:
    """Where it measures CPU tensors, which the group has no backend for, the job is over."""
    for told in run_ranks(planned, 2, backend="nccl"):
        assert not told.startswith("cannot go on"), told


def coded(rank: int, world_size: int, kind: str, factor: float) -> list[list[float]]:
    """Train with a layer that is multiplied in one step."""
    device = own_device(rank) if kind == "cuda" else torch.device(kind)
    model = wrapped(device)
    model.register_comm_hook(CompressedState(Int8()), compressed_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(rank, step, device), factor if step == 3 else 1.0).backward()
        optimizer.step()
    return parameters_of(model)


@pytest.mark.defect("codecs-S10")
@pytest.mark.parametrize("factor", [0.5, 0.0])
def test_a_gradient_of_zeros_counts_on_nccl_as_on_gloo(factor: float) -> None:
    (on_nccl, _), (on_gloo, _) = (
        run_ranks(coded, 2, args=[kind, factor], backend=backend)
        for kind, backend in (("cuda", "nccl"), ("cpu", "gloo"))
    )
    assert on_nccl == on_gloo


def waits(act: Callable[[], Any]) -> str:
    """Say where the host waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        act()
    except RuntimeError as error:
        return str(error)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return ""


def scaled(rank: int, world_size: int, is_told: bool) -> str:
    device = own_device(rank)
    model, scaler = wrapped(device), torch.amp.GradScaler("cuda")
    state = CompressedState(Int8(), loss_scale=scaler.get_scale if is_told else 1.0)
    model.register_comm_hook(state, compressed_hook)
    batches = [batch(rank, step, device) for step in range(STEPS)]
    losses = [scaler.scale(model(batches[0]))]
    for each in batches[1:]:
        losses[-1].backward()
        losses.append(scaler.scale(model(each)))
    return waits(losses[-1].backward)


@pytest.mark.defect("codecs-S14")
@pytest.mark.parametrize("is_told", [False, True])
def test_a_scalers_scale_is_followed_without_a_wait_of_the_host(is_told: bool) -> None:
    assert run_ranks(scaled, 2, args=[is_told], backend="nccl") == ["", ""]


def spoiled(rank: int, world_size: int) -> tuple[list[str], bool]:
    """Return what each step says when rank 1's parameters are no longer finite, and whether this rank's are."""
    device = own_device(rank)
    model = wrapped(device)
    state = LocalSGDState(2, delay=1)
    model.register_comm_hook(state, local_sgd_hook)
    told = []
    for step in range(10):
        try:
            model(batch(rank, step, device)).backward()
        except CrossoverError as error:
            told.append(str(error))
            break
        told.append("")
        if rank == 1 and step == 2:
            with torch.no_grad():
                model.module.layers[0].weight.fill_(float("nan"))
    dist.barrier()
    return told, bool(model.module.layers[0].weight.isfinite().all())


@pytest.mark.defect("codecs-S15")
def test_a_mean_that_is_not_finite_is_refused_on_all_ranks_and_taken_by_none() -> None:
    (healthy, fine), (guilty, _) = run_ranks(spoiled, 2, backend="nccl")
    assert fine
    assert len(healthy) == len(guilty)
    assert "(see the other ranks; this is rank 0)" in healthy[-1]
    assert "(this rank's are among them; this is rank 1)" in guilty[-1]


def clipped_by_a_codec(rank: int, world_size: int) -> list[tuple[float, float]]:
    """Return of each step the norm that clipping has found, and that of the mean gradients."""
    device = own_device(rank)
    torch.manual_seed(0)
    network = nn.Linear(25, 40, bias=False).to(device)  # NCCL's parts begin at multiples of 32 elements
    model = DistributedDataParallel(network, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = DecoupledState(optimizer, codec=Int8(), defer="always")
    model.register_comm_hook(state, decoupled_hook)
    norms = []
    for step in range(7):  # the first one travels exact
        with late(nccl_us=40_000):
            model(batch(rank, step, device)[:, :25]).square().sum().backward()
            norm = float(state.clip_grad_norm_(float("inf")))
        optimizer.step()
        state.flush()
        gradient = network.weight.grad
        assert gradient is not None
        norms.append((norm, float(gradient.norm())))
        optimizer.zero_grad()
    return norms


def test_clipping_sees_the_mean_that_a_codec_brings() -> None:
    """However late the other ranks' parts are: the own part is the one that this rank has decoded."""
    for norms in run_ranks(clipped_by_a_codec, 2, backend="nccl"):
        assert [norm for norm, _ in norms] == pytest.approx([mean for _, mean in norms], rel=1e-5)


def averaged(rank: int, world_size: int, sync_every: int) -> str:
    device = own_device(rank)
    model = wrapped(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = LocalSGDState(sync_every, delay=1)
    model.register_comm_hook(state, local_sgd_hook)
    batches = [batch(rank, step, device) for step in range(3 * STEPS)]

    def train(some: list[torch.Tensor]) -> None:
        for each in some:
            optimizer.zero_grad()
            model(each).backward()
            optimizer.step()

    train(batches[:STEPS])
    told = waits(lambda: train(batches[STEPS:]))
    dist.barrier()
    return told


@pytest.mark.defect("codecs-S15")
@pytest.mark.parametrize("sync_every", [2, 1000])
def test_an_average_lands_without_a_wait_of_the_host(sync_every: int) -> None:
    assert run_ranks(averaged, 2, args=[sync_every], backend="nccl") == ["", ""]


@pytest.mark.defect("turns-10")
@pytest.mark.quiet
def test_a_lease_follows_the_devices_turns(tmp_path: Path) -> None:
    """A user whose host runs ahead of long kernels has a lease of four turns of the device, more than 5 s here."""
    marks, mutex = (
        torch.zeros(2, dtype=torch.int64, device="cuda"),
        GPUMutex(new_plan(tmp_path).group, device=0),
    )
    try:
        for _ in range(4):
            mutex.acquire()
            busy_kernel()(marks, 1_400_000_000)
            mutex.release()
        torch.cuda.synchronize()
        assert eventually(lambda: mutex.stats()["lease_s"] > 5)
    finally:
        mutex.close()


def computing(rank: int, world_size: int, plan: Plan, is_other: bool) -> bool:
    """Take a turn while kernels of the former one run; tell whether the sibling came in between."""
    device = own_device(0)
    mutex, came = GPUMutex(plan.group, device=device, lease=LEASE_S), []
    first, other = torch.cuda.Stream(), torch.cuda.Stream()
    tell(plan, "joined")
    hear(plan, "joined", 3)
    with torch.cuda.stream(first):
        mutex.acquire()
        torch.ones(1, device=device)
    with held(first) as gate:

        def open_late() -> None:
            came.append(eventually(lambda: any(Path(plan.meeting).glob("began.*")), timeout_s=1.5))
            gate.open()

        tell(plan, "computing")
        hear(plan, "asked")
        opener = threading.Thread(target=open_late)
        opener.start()
        with torch.cuda.stream(other if is_other else first):
            mutex.acquire()
        opener.join()
    mutex.close()
    return came[0]


def asking(rank: int, world_size: int, plan: Plan) -> None:
    mutex = GPUMutex(plan.group, device=own_device(0), lease=LEASE_S)
    tell(plan, "joined")
    hear(plan, "computing", 2)
    mutex.request()
    tell(plan, "asked")
    mutex.acquire()
    tell(plan, "began")
    mutex.close()


@pytest.mark.defect("turns-12")
@pytest.mark.quiet
@pytest.mark.parametrize("is_other", [False, True])
def test_a_turn_ends_behind_its_kernels_whatever_stream_takes_the_next(
    tmp_path: Path, is_other: bool
) -> None:
    """Where another model's exchange takes the next turn, siblings wait for what the first model computes."""
    plan = new_plan(tmp_path)
    jobs = [
        Job(computing, 2, args=(plan, is_other)),
        Job(asking, 1, args=(plan,), backend=None, name="sibling"),
    ]
    assert run_jobs(jobs)[0] == [False, False]

"""Known defects on a CUDA device, shown on the fake one; strangers-15 stands in `tests/gpu/test_hooks_gpu.py`."""

import contextlib
import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from crossover_ddp.averaging_hooks import LocalSGDState, local_sgd_hook
from crossover_ddp.codecs import CompressedState, Int8, compressed_hook
from crossover_ddp.errors import CrossoverError
from crossover_ddp.gpu_mutex import GPUMutex
from tests.fake_cuda import late
from tests.fake_cuda.gate import held
from tests.gpu.kernels import busy_kernel
from tests.gpu.races import LEASE_S, Plan, hear, new_plan, tell
from tests.harness import Job, in_ranks, run_jobs, run_ranks
from tests.harness.networks import mlp
from tests.harness.oracles import error_of
from tests.harness.training import Training, batch, decoupled
from tests.harness.waiting import eventually
from tests.multiprocess.compressed_training import Branches, compressed, gradient

pytestmark = pytest.mark.fake_cuda
STEPS = 5


def on_device(rank: int, state: Any, hook: Any) -> Training:
    """Train on batches that are on the device before: copies of them would make the host wait."""
    batches: list[torch.Tensor] = []
    given: Any = {"loss": lambda model, _, step: model(batches[step]).square().mean()}
    training = Training(lambda *_: (state, hook), rank, device="cuda", **given)
    batches += [batch(rank, step).cuda() for step in range(3 * STEPS)]
    return training


@pytest.mark.defect("codecs-S4")
@in_ranks(2, backend="nccl")
def test_a_plan_on_nccl_is_made_or_refused_and_training_goes_on(rank: int) -> None:
    """Where it measures CPU tensors, which the group has no backend for, the job is over."""
    training = on_device(rank, CompressedState(None), compressed_hook).run(STEPS)
    with contextlib.suppress(CrossoverError):
        training.state.plan_codec()
    training.step()


def coded(rank: int, world_size: int, kind: str) -> list[float]:
    """Train with a branch that counts for nothing in the fourth step; half a matrix is cut alike by both."""
    weights = (1.0, 0.5, 1.0, 0.0, 1.0)

    def loss(model: Any, rank: int, step: int) -> torch.Tensor:
        return model(gradient(rank, step).to(kind), weights[step])  # type: ignore[no-any-return]

    training = compressed(rank, CompressedState(Int8()), Branches(), loss=loss, device=kind)
    return training.run(STEPS).values.tolist()  # type: ignore[no-any-return]


@pytest.mark.defect("codecs-S10")
def test_a_gradient_of_zeros_counts_on_nccl_as_on_gloo() -> None:
    found = [
        run_ranks(coded, 2, args=[kind], backend=b)
        for kind, b in (("cuda", "nccl"), ("cpu", "gloo"))
    ]
    assert found[0] == found[1]


def waits(act: Callable[[], Any]) -> str:
    torch.cuda.set_sync_debug_mode("error")
    try:
        act()
    except RuntimeError as error:
        return str(error)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return ""


@pytest.mark.defect("codecs-S14")
@pytest.mark.parametrize("is_told", [False, True])
@in_ranks(2, backend="nccl")
def test_a_scalers_scale_is_followed_without_a_wait_of_the_host(rank: int, is_told: bool) -> None:
    scaler = torch.amp.GradScaler("cuda")
    state = CompressedState(Int8(), loss_scale=scaler.get_scale if is_told else 1.0)
    training = on_device(rank, state, compressed_hook)
    loss = scaler.scale(training.loss())
    for step in range(1, STEPS):
        loss.backward()
        loss = scaler.scale(training.loss(step))
    assert waits(loss.backward) == ""


@pytest.mark.defect("codecs-S15")
@pytest.mark.parametrize("call", ["run", "average", "state_dict", "checkpoint"])
@in_ranks(2, backend="nccl")
def test_nothing_is_taken_or_saved_of_a_mean_that_is_not_finite(rank: int, call: str) -> None:
    """Rank 1's parameters were not finite when they left, and are when the job is saved; the outer ones are not."""
    outer = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9)
    training = on_device(
        rank, LocalSGDState(4, delay=1, outer_optimizer=outer), local_sgd_hook
    ).run(4)
    weight = training.model.module[0].weight.data
    own = weight.clone()
    if rank:
        weight.fill_(float("nan"))
    training.loss()
    weight.copy_(own)
    training.run(2)  # in the second it lands
    acting = training if call == "run" else training.state
    given = [training.optimizer] if call == "checkpoint" else []
    told = error_of(lambda: getattr(acting, call)(*given))
    dist.barrier()
    assert "got infinities or NaN in the mean after step 5" in told
    assert ("this rank's are among them" if rank else "see the other ranks") in told
    assert weight.isfinite().all()


@in_ranks(2, backend="nccl")
def test_clipping_sees_the_mean_that_a_codec_brings(rank: int) -> None:
    """However late the other ranks' parts are: the own part is the one that this rank has decoded."""
    module = mlp(25, 40, seed=0, bias=False)  # NCCL's parts begin at multiples of 32 elements
    inputs = torch.randn(7, 8, 25, generator=torch.Generator().manual_seed(rank))
    loss: Any = {"loss": lambda model, _, step: model(inputs[step].cuda()).square().sum()}
    training = Training(decoupled(codec=Int8()), rank, module=module, device="cuda", **loss)
    for _ in range(7):  # the first one travels exact
        with late(nccl_us=40_000):
            training.backward()
            norm = float(training.state.clip_grad_norm_(float("inf")))
        training.optimizer.step()
        training.state.flush()
        assert norm == pytest.approx(float(module[0].weight.grad.norm()), rel=1e-5)
        training.drop()
        training.steps += 1


@pytest.mark.defect("codecs-S15")
@pytest.mark.parametrize("sync_every", [2, 1000])
@in_ranks(2, backend="nccl")
def test_an_average_lands_without_a_wait_of_the_host(rank: int, sync_every: int) -> None:
    training = on_device(rank, LocalSGDState(sync_every, delay=1), local_sgd_hook).run(STEPS)

    def train() -> None:
        for _ in range(2 * STEPS):
            training.loss().backward()
            training.update()

    assert waits(train) == ""


@pytest.mark.defect("turns-10")
@pytest.mark.quiet
def test_a_lease_follows_the_devices_turns(tmp_path: Path) -> None:
    """A user whose host runs ahead of long kernels has a lease of four turns of the device, more than 5 s here."""
    marks = torch.zeros(2, dtype=torch.int64, device="cuda")
    with contextlib.closing(GPUMutex(new_plan(tmp_path).group, device=0)) as mutex:
        for _ in range(4):
            with mutex:
                busy_kernel()(marks, 1_400_000_000)
        torch.cuda.synchronize()
        assert eventually(lambda: mutex.stats()["lease_s"] > 5)


def computing(rank: int, world_size: int, plan: Plan) -> bool:
    """Take a turn on another stream while kernels of the former one run; tell whether the sibling came in between."""
    torch.cuda.set_device(0)
    mutex, came = GPUMutex(plan.group, device=0, lease=LEASE_S), []
    first, other = torch.cuda.Stream(), torch.cuda.Stream()
    tell(plan, "joined")
    hear(plan, "joined", 3)
    with torch.cuda.stream(first):
        mutex.acquire()
        torch.ones(1, device="cuda")
    with held(first) as gate:

        def open_late() -> None:
            came.append(eventually(lambda: any(Path(plan.meeting).glob("began.*")), timeout_s=1.5))
            gate.open()

        tell(plan, "computing")
        hear(plan, "asked")
        opener = threading.Thread(target=open_late)
        opener.start()
        with torch.cuda.stream(other):
            mutex.acquire()
        opener.join()
    mutex.close()
    return came[0]


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
def test_a_turn_ends_behind_its_kernels_whatever_stream_takes_the_next(tmp_path: Path) -> None:
    """Where another model's exchange takes the next turn, siblings wait for what the first model computes."""
    plan = new_plan(tmp_path)
    jobs = [Job(computing, 2, (plan,)), Job(asking, 1, (plan,), None, name="sibling")]
    assert run_jobs(jobs)[0] == [False, False]

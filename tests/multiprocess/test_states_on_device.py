"""Codecs and averages on a CUDA device: the CPU's numbers, without a wait of the host."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from crossover_ddp.averaging_hooks import LocalSGDState, local_sgd_hook
from crossover_ddp.codecs import CompressedState, Int4, Int8, compressed_hook
from crossover_ddp.errors import CrossoverError
from tests.fake_cuda import late
from tests.harness import in_ranks, run_ranks
from tests.harness.networks import mlp
from tests.harness.oracles import error_of
from tests.harness.training import Training, batch, decoupled
from tests.multiprocess.compressed_training import Branches, compressed, gradient
from tests.multiprocess.identity_codec import Identity

pytestmark = pytest.mark.fake_cuda
STEPS = 5


def on_device(rank: int, state: Any, hook: Any) -> Training:
    """Train on batches that are already on the device: the host waits for copies of others."""
    batches: list[torch.Tensor] = []

    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        return model(batches[step]).square().mean()  # type: ignore[no-any-return]

    training = Training(lambda *_: (state, hook), rank, device="cuda", loss=loss)
    batches += [batch(rank, step).cuda() for step in range(3 * STEPS)]
    return training


def error_of_sync(act: Callable[[], object]) -> str:
    """Return torch's error if the host waits for the device in ``act``. Empty if it does not."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        act()
    except RuntimeError as error:
        return str(error)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return ""


@pytest.mark.defect("codecs-S4")
@in_ranks(2, backend="nccl")
def test_a_plan_on_nccl_is_made_or_refused_and_training_continues(rank: int) -> None:
    """NCCL has no backend for CPU tensors. A plan that measured some would end the exchange."""
    training = on_device(rank, CompressedState(None), compressed_hook).run(STEPS)
    with contextlib.suppress(CrossoverError):
        training.state.plan_codec()
    training.step()


def coded(rank: int, world_size: int, device: str) -> list[float]:
    """Train with a gradient that is zero in the fourth step.

    NCCL and gloo cut each of the two matrices alike into the shards of two ranks.
    """
    factors = (1.0, 0.5, 1.0, 0.0, 1.0)

    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        return model(gradient(rank, step).to(device), factors[step])  # type: ignore[no-any-return]

    state = CompressedState(Int8())
    training = compressed(rank, state, Branches(), loss=loss, device=device)
    return training.run(STEPS).values.tolist()  # type: ignore[no-any-return]


@pytest.mark.defect("codecs-S10")
def test_a_gradient_of_zeros_counts_on_nccl_as_on_gloo() -> None:
    on_nccl = run_ranks(coded, 2, args=("cuda",), backend="nccl")
    on_gloo = run_ranks(coded, 2, args=("cpu",), backend="gloo")
    assert on_nccl == on_gloo


@pytest.mark.defect("codecs-S14")
@pytest.mark.parametrize("is_given", [False, True])
@in_ranks(2, backend="nccl")
def test_a_change_of_the_loss_scale_does_not_make_the_host_wait(rank: int, is_given: bool) -> None:
    """The state reads the scaler's scale, if it is given, without a wait of the host."""
    scaler = torch.amp.GradScaler("cuda")
    state = CompressedState(Int8(), loss_scale=scaler.get_scale if is_given else 1.0)
    training = on_device(rank, state, compressed_hook)
    loss = scaler.scale(training.loss())
    for step in range(1, STEPS):
        loss.backward()
        loss = scaler.scale(training.loss(step))
    assert error_of_sync(loss.backward) == ""


@in_ranks(2, backend="nccl")
def test_clipping_uses_the_mean_that_a_codec_decodes(rank: int) -> None:
    """Other ranks' parts may be late. The own part is the mean that this rank has decoded."""
    module = mlp(25, 40, seed=0, bias=False)  # NCCL's parts begin at multiples of 32 elements
    inputs = torch.randn(7, 8, 25, generator=torch.Generator().manual_seed(rank))

    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        return model(inputs[step].cuda()).square().sum()  # type: ignore[no-any-return]

    training = Training(decoupled(codec=Int8()), rank, module=module, device="cuda", loss=loss)
    for _ in range(7):  # a codec's first step is exact
        with late(nccl_us=40_000):
            training.backward()
            norm = float(training.state.clip_grad_norm_(float("inf")))
        training.optimizer.step()
        training.state.flush()
        assert norm == pytest.approx(float(module[0].weight.grad.norm()), rel=1e-5)
        training.drop()
        training.steps += 1


@pytest.mark.defect("codecs-S15")
@pytest.mark.parametrize("codec", [None, Int4()], ids=repr)
@pytest.mark.parametrize("call", ["run", "average", "state_dict", "checkpoint"])
@in_ranks(2, backend="nccl")
def test_a_mean_that_is_not_finite_is_neither_applied_nor_saved(
    rank: int, call: str, codec: Any
) -> None:
    """Rank 1's parameters are NaN when they are sent, and finite again when the job is saved.

    The outer parameters would not be finite.
    """
    outer = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9)
    state = LocalSGDState(4, delay=1, outer_optimizer=outer, codec=codec)
    training = on_device(rank, state, local_sgd_hook).run(4)
    weight = training.model.module[0].weight.data
    own = weight.clone()
    if rank:
        weight.fill_(float("nan"))
    training.loss()
    weight.copy_(own)
    training.run(2)  # the mean arrives in the second step
    acting = training if call == "run" else training.state
    given = [training.optimizer] if call == "checkpoint" else []
    error = error_of(lambda: getattr(acting, call)(*given))
    dist.barrier()
    assert "got infinities or NaN in the mean after step 5" in error
    assert ("this rank's are among them" if rank else "see the other ranks") in error
    assert weight.isfinite().all()


@pytest.mark.defect("codecs-S15")
@pytest.mark.parametrize("codec", [None, Int4()], ids=repr)
@pytest.mark.parametrize("sync_every", [2, 1000])
@in_ranks(2, backend="nccl")
def test_an_average_is_applied_without_a_wait_of_the_host(
    rank: int, sync_every: int, codec: Any
) -> None:
    state = LocalSGDState(sync_every, delay=1, codec=codec)
    training = on_device(rank, state, local_sgd_hook).run(STEPS)

    def train() -> None:
        for _ in range(2 * STEPS):
            training.loss().backward()
            training.update()

    assert error_of_sync(train) == ""


def increments(rank: int, world_size: int, device: str, codec: Any) -> torch.Tensor:
    state = LocalSGDState(1, delay=1, codec=codec)
    training = Training(lambda *_: (state, local_sgd_hook), rank, device=device).run(2 * STEPS)
    state.average()
    return training.values.cpu()


# NCCL's parts of a vector have other lengths, so blocks of a codec begin elsewhere.
@pytest.mark.parametrize(("backend", "codec"), [("nccl", Identity()), ("gloo", Int4())])
def test_increments_on_a_device_have_the_bits_of_the_cpu(backend: str, codec: Any) -> None:
    on_cpu = run_ranks(increments, 2, args=("cpu", codec))
    on_device = run_ranks(increments, 2, args=("cuda", codec), backend=backend)
    assert torch.equal(on_cpu[0], on_device[0])
    assert torch.equal(on_device[0], on_device[1])

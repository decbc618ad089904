"""`PowerSGD` between real ranks: replicas, residuals, checkpoints, levels, and torch's own hook."""

import copy
import math
import os
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp import AutoState, auto_hook
from crossover_ddp._decoupled.race import WARM_UP
from crossover_ddp.codecs import CompressedState, PowerSGD, compressed_hook
from tests.harness import in_ranks, run_ranks
from tests.harness.oracles import error_of
from tests.harness.training import Training
from tests.multiprocess.compressed_training import (
    Coded,
    compressed,
    digest,
    gradient,
    gradient_after,
    loss_of,
    network,
)

STEPS = 7


@pytest.mark.parametrize("world_size", [2, 3])
@in_ranks()
def test_both_states_train_alike_on_all_ranks(rank: int, world_size: int) -> str:
    """In several buckets. Gradients differ from those of another rank of the approximation."""
    trained = {
        (kind, columns): Coded(kind, rank, PowerSGD(columns)).run(STEPS)
        for kind, columns in (("compressed", 2), ("crossover", 2), ("compressed", 3))
    }
    two, other, three = [each.digest() for each in trained.values()]
    assert two == other != three
    rates = [each.stats_of_codec()["rate"] for each in trained.values()]
    assert 0.05 < rates[0] == rates[1] < rates[2] < 0.4
    return two


class Halves(nn.Module):
    """Two branches. Each batch uses one of them, so ranks use different parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            [nn.Sequential(nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 24)) for _ in range(2)]
        )

    def forward(self, inputs: Tensor, branch: int) -> Tensor:
        return self.branches[branch](inputs)  # type: ignore[no-any-return]


@pytest.mark.parametrize("world_size", [2, 3])
@in_ranks()
def test_several_buckets_with_unused_parameters_train_over_gloo(rank: int, world_size: int) -> str:
    """Torch's hook ends the process here: it starts collectives in another order on each rank."""

    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * step + rank)
        inputs = torch.randn(16, 24, generator=generator)
        return (model(inputs, (step + rank) % 2) - inputs.flip(1)).square().mean()

    torch.manual_seed(0)
    training = compressed(
        rank,
        CompressedState(PowerSGD()),
        Halves(),
        loss=loss,
        bucket_cap_mb=0.003,
        find_unused_parameters=True,
    )
    losses = [training.step() for _ in range(60)]
    assert sum(losses[-4:]) < 0.8 * sum(losses[2:6])
    assert training.state.stats()["sent_bytes"] > 0
    return digest(training.weights())


@pytest.mark.parametrize("world_size", [2, 3])
@in_ranks()
def test_nothing_is_lost_over_drains_and_checkpoints(rank: int, world_size: int) -> None:
    state = CompressedState(PowerSGD())
    training = compressed(rank, state)
    arrived = wanted = torch.zeros(40, 40)
    for step in range(9):
        if step == 5:
            state.checkpoint(())
        if step == 8:
            assert state.state_dict()["residuals"]["weight"].any()
            state.drain()
        mean = gradient_after(training, step)
        exact = sum(gradient(each, step) for each in range(world_size)) / world_size
        if step in (1, 2, 3, 4, 7):
            assert torch.linalg.matrix_rank(mean, rtol=1e-4) == 2
        arrived = arrived + mean
        wanted = wanted + exact
    torch.testing.assert_close(arrived, wanted, rtol=0, atol=1e-4)
    assert not state.state_dict()["residuals"]


@in_ranks(2)
def test_a_resumed_job_continues_with_the_same_bits(rank: int) -> str:
    """Both draw Q from its seed: the checkpoint has none."""
    training = Coded("compressed", rank, PowerSGD()).run(4)
    saved = copy.deepcopy(training.state.checkpoint(training.optimizers))
    resumed = Coded("compressed", rank, PowerSGD())
    resumed.state.restore(saved, resumed.optimizers)
    resumed.steps = training.steps
    assert training.run(5).digest() == resumed.run(5).digest()
    return training.digest()


def residuals_of_four(rank: int, world_size: int) -> tuple[Any, Tensor]:
    state = CompressedState(PowerSGD())
    training = compressed(rank, state)
    arrived = sum(gradient_after(training, step) for step in range(4))
    state.checkpoint(())
    return state.state_dict(), arrived  # type: ignore[return-value]


def resumed_gradient(rank: int, world_size: int, saved: Any) -> Tensor:
    state = CompressedState(PowerSGD())
    state.load_state_dict(saved)
    return gradient_after(compressed(rank, state), 4)


def test_fewer_ranks_resume_with_the_residual_of_all() -> None:
    saved, arrived = run_ranks(residuals_of_four, 4)[0]
    last = run_ranks(resumed_gradient, 2, args=(saved,))[0]
    wanted = sum(sum(gradient(rank, step) for rank in range(4)) / 4 for step in range(4))
    wanted = wanted + (gradient(0, 4) + gradient(1, 4)) / 2
    torch.testing.assert_close(arrived + last, wanted, rtol=0, atol=1e-4)


@in_ranks(4)
def test_ranks_of_two_nodes_exchange_as_without_levels(rank: int) -> None:
    found = []
    for table in ("0,0,1,1", "flat"):
        with mock.patch.dict(os.environ, {"CROSSOVER_LEVELS": table}):
            group = dist.new_group(range(4))
            state = CompressedState(PowerSGD(), process_group=group)
            training = compressed(rank, state, process_group=group)
            found.append(torch.stack([gradient_after(training, step) for step in range(4)]))
    assert torch.equal(found[0][1:], found[1][1:])


@in_ranks(2)
def test_a_grad_scaler_skips_a_step_that_is_not_finite_on_one_rank(rank: int) -> list[float]:
    """Residuals stay finite, so that training continues."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    state = CompressedState(PowerSGD(), loss_scale=scaler.get_scale)
    training = Training(
        lambda *_: (state, compressed_hook),
        rank,
        module=network(),
        optimizers=lambda model: [torch.optim.SGD(model.parameters(), lr=0.05)],
        loss=loss_of,
        bucket_cap_mb=0.02,
    )
    (optimizer,) = training.optimizers
    scales = []
    for step in range(6):
        training.drop()
        loss = scaler.scale(training.loss(step))
        (loss * math.inf if step == 3 and rank == 1 else loss).backward()
        before = digest(training.weights())
        scaler.step(optimizer)
        scaler.update()
        assert (digest(training.weights()) == before) == (step == 3)
        scales.append(scaler.get_scale())
        assert all(bool(each.isfinite().all()) for each in state.state_dict()["residuals"].values())
    assert scales == [2.0**10] * 3 + [2.0**9] * 3
    return scales


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@in_ranks(2)
def test_half_precision_trains_alike_on_all_ranks(rank: int, dtype: torch.dtype) -> str:
    inputs = torch.randn(8, 30, generator=torch.Generator().manual_seed(rank)).to(dtype)
    torch.manual_seed(0)
    training = compressed(
        rank,
        CompressedState(PowerSGD()),
        nn.Linear(30, 40).to(dtype),
        loss=lambda model, *_: model(inputs).float().square().mean(),
    )
    losses = [training.step() for _ in range(8)]
    assert losses[-1] < losses[0]
    return digest([each.float() for each in training.weights()])


class Several(nn.Module):
    """Two matrices of one shape, one of another shape, and biases. Their gradients are arguments."""

    def __init__(self) -> None:
        super().__init__()
        shapes = [(24, 18), (24,), (24, 18), (16, 30), (16,)]
        self.weights = nn.ParameterList([torch.zeros(shape) for shape in shapes])

    def forward(self, gradients: Sequence[Tensor]) -> Tensor:
        pairs = zip(self.weights, gradients, strict=True)
        return torch.stack([(weight * each).sum() for weight, each in pairs]).sum()


def first_factors(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the first Q of each shape, transposed. Matrices of one shape draw theirs together."""
    generator = torch.Generator().manual_seed(0)
    shapes = [each.shape for each in parameters if each.dim() > 1]
    return [
        torch.randn(shapes.count(shape), 2, shape[1], generator=generator)
        for shape in dict.fromkeys(shapes)
    ]


@in_ranks(2)
def test_gradients_are_those_of_torchs_hook(rank: int) -> None:
    """In one bucket, where torch's hook works over gloo, with the same Q in the first coded step."""
    its_state = PowerSGDState(None, 2, start_powerSGD_iter=2, min_compression_rate=1)
    state = CompressedState(PowerSGD())
    its, ours = (DistributedDataParallel(Several()) for _ in range(2))
    its.register_comm_hook(its_state, powerSGD_hook)
    ours.register_comm_hook(state, compressed_hook)
    weights = [*ours.module.weights]
    generator = torch.Generator().manual_seed(7 + rank)
    for step in range(5):
        gradients = [torch.randn(each.shape, generator=generator) for each in weights]
        ours.zero_grad()
        ours(gradients).backward()
        if step == 1:  # the first coded step
            drawn = first_factors(state.compression._buckets[0].parameters)  # type: ignore[union-attr]
            its_state.q_memory_dict[0] = torch.cat([each.mT.flatten() for each in drawn])
            its_state.p_memory_dict[0] = torch.empty(2 * (24 + 24 + 16))
            its_state.iter = its_state.start_powerSGD_iter
        its.zero_grad()
        its(gradients).backward()
        for mine, other in zip(weights, its.module.weights, strict=True):
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-3, atol=1e-5)
    residuals = state.state_dict()["residuals"]
    assert len(residuals) == 3
    assert all(bool(each.any()) for each in residuals.values())


@in_ranks(2, timeout_s=120.0)
def test_arms_with_it_and_without_it_lose_nothing(rank: int) -> None:
    """With a learning rate of 0 every step has the same gradient; the last step is exact."""
    training = Training(
        lambda model, optimizers, mutex: (
            AutoState(optimizers[0], mutex=mutex, losses="any"),
            auto_hook,
        ),
        rank,
        module=network(),
        optimizers=lambda model: [torch.optim.SGD(model.parameters(), lr=0.0)],
        loss=loss_of,
        bucket_cap_mb=0.02,
    )
    state, race = training.state, training.state._race

    def applied() -> Tensor:
        training.backward(0)
        state.flush()
        gradient = torch.cat([p.grad.flatten().double() for p in training.held])  # type: ignore[union-attr]
        training.update()
        return gradient

    exact = [applied() for _ in range(WARM_UP)][-1]
    total, steps = torch.zeros_like(exact), 0
    by_name = {arm.name: arm for arm in race.arms}
    assert [*by_name][-1] == "whole, PowerSGD()", "the strongest arm"
    low_rank = by_name["whole, PowerSGD()"]
    owed = []
    for other in ("whole", "deferred", "whole, Int8()", "deferred, Half()"):
        for arm in (low_rank, by_name[other]):
            race.is_over = True  # measures nothing meanwhile
            race.choose(arm)
            race.chosen = None  # no verdict, which would make the model plain DDP
            for _ in range(5):  # of which the first may have new buckets, which are exact at first
                total += applied()
                steps += 1
            if arm is low_rank:
                assert state.stats()["codec"]["name"] == "PowerSGD(rank=2)"
                residuals = state.state_dict()["codec"]["residuals"]
                owed.append(sum(float(each.norm()) for each in residuals.values()))
    assert min(owed) > 0.1 * float(exact.norm())
    race.choose(by_name["whole"])
    total += applied()
    steps += 1
    assert float((total - steps * exact).norm() / (steps * exact.norm())) < 1e-5
    assert not any(each.any() for each in state.state_dict()["codec"]["residuals"].values())
    training.close()


@pytest.mark.parametrize("choices", [[PowerSGD(), PowerSGD(4)], [PowerSGD(), None]])
@in_ranks(2)
def test_ranks_with_other_ranks_of_approximation_are_refused(rank: int, choices: list[Any]) -> None:
    message = error_of(lambda: Coded("compressed", rank, choices[rank]).run(3))
    assert message.startswith("expected the same codec on all ranks, got codec by rank {0: ")
    assert "PowerSGD(rank=2)" in message

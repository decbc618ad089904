"""Residuals of whole models: nothing is lost, over unused parameters, resumes and one rank."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from crossover_ddp.codecs import CompressedState, Int8, PerPair, PowerSGD, SIDCo
from tests.harness import in_ranks
from tests.harness.oracles import error_of
from tests.harness.training import Training
from tests.multiprocess.compressed_training import (
    Branches,
    Weights,
    compressed,
    gradient,
    gradient_after,
    way_of,
)

STEPS = 6


@in_ranks(2)
def test_residuals_of_complex_matrices_arrive_with_an_exact_step(rank: int) -> None:
    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(10 * step + rank)
        inputs = torch.randn(4, 6, dtype=torch.complex64, generator=generator)
        return model(inputs).real.sum()  # type: ignore[no-any-return]

    state = CompressedState(SIDCo(0.05))
    trainings = [
        compressed(rank, each, nn.Linear(6, 6, dtype=torch.complex64), loss=loss)
        for each in (state, CompressedState(None))
    ]

    def difference(step: int) -> torch.Tensor:
        coded, exact = (gradient_after(training, step) for training in trainings)
        return coded - exact

    total = sum(difference(step) for step in range(4))
    (residual,) = state.state_dict()["residuals"].values()
    assert residual.numel() == 2 * 6 * 6
    assert residual.any()
    state.drain()
    assert float((total + difference(4)).abs().max()) < 1e-3


@pytest.mark.defect("codecs-S6")
@pytest.mark.parametrize("codec", [SIDCo(0.05), PowerSGD()], ids=repr)
@pytest.mark.parametrize(("unused", "drained"), [(True, False), (True, True), (False, True)])
@in_ranks(2)
def test_residuals_wait_while_their_parameter_is_unused_and_arrive_once(
    rank: int, unused: bool, drained: bool, codec: Any
) -> None:
    """They add up over checkpoints: those from before, and those that one rank makes after it.

    Without ``find_unused_parameters`` a gradient of zeros takes its residual along.
    """
    uses = [1, 1, 1, 0, 0, 0, rank == 0, rank == 0, 0, 0, 1, unused or rank == 0]
    state = CompressedState(codec)
    training = compressed(
        rank,
        state,
        Branches(),
        loss=lambda model, rank, step: model(gradient(rank, step), float(uses[step])),
        bucket_cap_mb=25,
        find_unused_parameters=unused,
    )
    arrived = torch.zeros(40, 40)
    for step in range(len(uses)):
        if step in (5, 9) or (drained and step == 3):
            state.checkpoint(())
        if step == 7 or (drained and step == len(uses) - 1):
            state.drain()
        training.drop()
        training.backward(step)
        arrived += training.model.module.elsewhere.weight.grad
    residual = state.state_dict()["residuals"].get("elsewhere.weight", torch.zeros(1600))
    assert bool(residual.any()) is not drained
    expected = sum(use * gradient(rank, step) for step, use in enumerate(uses))
    expected = expected - residual.view(40, 40)
    dist.all_reduce(expected)
    assert float((expected / 2 - arrived).norm()) < 1e-3


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("codec", [SIDCo(0.05), (PerPair.by_node([0, 1], far=Int8()), Int8())])
@pytest.mark.parametrize("name", ["compressed", "crossover", "decoupled"])
def test_a_single_rank_applies_loaded_residuals_once(name: str, codec: Any) -> None:
    """A user who continues with one rank loses nothing, and no later checkpoint holds them."""
    training = Training(
        way_of(name, codec=codec),
        module=Weights(),
        loss=lambda model, *place: model(gradient(*place)),
        optimizers=lambda model: [torch.optim.SGD(model.parameters(), lr=1.0)],
    )
    residual = gradient(0, 9)
    applied = torch.zeros(40, 40)
    for _ in range(2):
        state = {"residuals": {"weight": residual.flatten()}, "loss_scale": None}
        training.state.load_state_dict({"codec": state} if name == "decoupled" else state)
        applied += residual + gradient(0, training.steps) + gradient(0, training.steps + 1)
        training.run(2)
        saved = training.state.state_dict()
        assert saved.get("codec", saved)["residuals"] == {}
        torch.testing.assert_close(training.model.module.weight, -applied)


@pytest.mark.defect("codecs-S8")
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "another."])
@in_ranks(2)
def test_loaded_residuals_arrive_or_are_refused(rank: int, prefix: str) -> None:
    """A user may resume with another wrapper around the module, but not with other parameters."""
    last = STEPS - 1
    former = CompressedState(SIDCo(0.05))
    training = compressed(rank, former)
    total = sum(gradient_after(training, step) for step in range(last))
    state = CompressedState(SIDCo(0.05))
    with pytest.raises(ValueError, match=r"'residuals' and 'loss_scale', got keys \[\]; "):
        state.load_state_dict({})
    saved = former.state_dict()
    renamed = {f"{prefix}{name}": each for name, each in saved["residuals"].items()}
    state.load_state_dict({**saved, "residuals": renamed})
    training = compressed(rank, state)
    if prefix == "another.":
        assert "another.weight" in error_of(lambda: gradient_after(training, last))
        return
    mean = sum(gradient(each, step) for step in range(STEPS) for each in range(2)) / 2
    assert float((total + gradient_after(training, last) - mean).norm()) < 1e-3

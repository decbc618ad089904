"""Which layers and optimizers K-FAC takes, and what it says of others; the first solver after an overflow."""

import copy
import itertools
import logging
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from crossover_ddp.errors import UnsupportedConfigurationError
from crossover_ddp.kfac_hooks import KFACState, kfac_hook
from tests.multiprocess.kfac_training import LR, mlp
from tests.unit.kfac.test_kfac_state import Training

pytestmark = pytest.mark.usefixtures("process_group")


# --- optimizers ------------------------------------------------------------------------------------------------


def test_an_optimizer_of_some_layers_is_refused_unless_the_others_are_skipped_or_nothing_is_clipped() -> None:
    network = mlp(6, 8, 4)
    optimizer = SGD(network[0].parameters(), lr=LR)
    with pytest.raises(UnsupportedConfigurationError, match=r"none for 2\.weight, 2\.bias \(2 in all\)"):
        KFACState(network, optimizer)
    KFACState(network, optimizer, skip=["2"]).close()
    KFACState(network, optimizer, kl_clip=None).close()


def test_a_group_that_the_optimizer_has_lost_is_refused_in_the_next_step() -> None:
    training = Training()
    training.step()
    lost = training.optimizer.param_groups[0]["params"].pop()
    with pytest.raises(UnsupportedConfigurationError, match=r"none for 2\.bias \(1 in all\)"):
        training.step(1)
    training.optimizer.param_groups[0]["params"].append(lost)


# --- layers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("network", "options"),
    [
        (nn.LayerNorm(6), {}),
        (mlp(6, 4), {"skip": ["0"]}),
        (mlp(6, 4), {"max_factor_dim": 6}),
    ],
)
def test_a_model_without_a_usable_layer_is_refused(network: nn.Module, options: dict[str, Any]) -> None:
    with pytest.raises(
        UnsupportedConfigurationError,
        match=r"got none of 2 parameters \(.*\); Linear and Conv2d layers count .* max_factor_dim=, or train without",
    ):
        KFACState(network, SGD(network.parameters(), lr=LR), **options)


def test_a_head_that_is_too_large_passes_through_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "crossover_ddp"):
        Training(mlp(6, 8, 20), kl_clip=None, max_factor_dim=20)
        training = Training(mlp(6, 8, 20), kl_clip=None, max_factor_dim=19)
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith(
        "2.weight, 2.bias of 2 in all pass through as plain gradients: G of 20 rows, above max_factor_dim=19. Raise"
    )
    assert "2.weight passes through: G of 20 rows, above max_factor_dim=19" in training.state.report()
    plain = copy.deepcopy(training.model.module)
    got = training.backward()
    plain(torch.randn(5, 6, generator=torch.Generator().manual_seed(0))).square().mean().backward()
    for name, parameter in plain.named_parameters():
        assert torch.equal(got[name], parameter.grad) == name.startswith("2")  # type: ignore[arg-type]


# --- the first solver ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overflows", [1, 2])
def test_the_first_finite_factors_get_a_solver_at_once(overflows: int) -> None:
    options: dict[str, Any] = {"kl_clip": None, "inv_update_steps": 100}
    training, usual = Training(**options), Training(**options)
    for seed in range(overflows):
        training.backward(seed, lambda output: output.square().mean() * math.inf)
    assert training.state.stats()["dropped"] == 2 * overflows
    assert f"{overflows} batches dropped" in training.state.report()
    got, expected = training.backward(7), usual.backward(7)
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    solvers = [layer["solver"] for layer in training.state.state_dict()["layers"].values()]
    assert all(solvers)
    training.backward(8)
    later = [layer["solver"] for layer in training.state.state_dict()["layers"].values()]
    torch.testing.assert_close(later, solvers, rtol=0, atol=0, msg="once, not in every step")
    training.state.close()
    usual.state.close()


def test_a_layer_that_comes_late_gets_its_solver_when_it_comes() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
            self.calls = itertools.count()

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return self.second(x) if next(self.calls) else x  # type: ignore[no-any-return]

    model = DistributedDataParallel(Late(), find_unused_parameters=True)
    state = KFACState(model, SGD(model.parameters(), lr=LR), inv_update_steps=100)
    model.register_comm_hook(state, kfac_hook)
    for step in range(2):
        model.zero_grad()
        model(torch.randn(5, 6)).square().mean().backward()
        solvers = [layer["solver"] for layer in state.state_dict()["layers"].values()]
        assert [solver is not None for solver in solvers] == [True, bool(step)]

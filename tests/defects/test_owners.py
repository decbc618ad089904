"""Known defects of owners and of Muon: the report on decoupled training, and what strangers' programs found."""

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp import DecoupledState, UnsupportedConfigurationError, decoupled_hook
from crossover_ddp.muon_hooks import MuonState
from tests.harness import run_ranks
from tests.unit.decoupled.decoupled_training import Training, assert_same, inputs, network

pytestmark = pytest.mark.usefixtures("process_group")


def owned(**options: Any) -> Training:
    return Training(decoupled=True, owners="layers", **options)


def scaled_step(training: Training, scaler: torch.amp.GradScaler, *, unscale: bool) -> None:
    scaler.scale(training.model(inputs(training.steps)).square().mean()).backward()
    training.steps += 1
    if unscale:
        scaler.unscale_(training.optimizer)
    scaler.step(training.optimizer)
    scaler.update()
    training.optimizer.zero_grad()


@pytest.mark.defect("strangers-1")
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("view", [True, False])
@pytest.mark.parametrize("unscale", [True, False])
def test_a_scaler_with_owners_scales_or_is_refused(unscale: bool, view: bool, set_to_none: bool) -> None:
    """No step is taken with scaled gradients, and none is skipped for ever, without an error that says so."""
    training = owned(ddp={"gradient_as_bucket_view": view})
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    with pytest.raises(UnsupportedConfigurationError, match="GradScaler"):
        scaled_step(training, scaler, unscale=unscale)


@pytest.mark.defect("strangers-1")
def test_gradients_of_owners_changed_through_data_are_refused() -> None:
    """``p.grad.data.mul_`` with owners is an error in the first steps, as without owners."""
    training = owned()
    training.backward()
    for parameter in training.held:
        assert parameter.grad is not None
        parameter.grad.data.mul_(0.5)
    with pytest.raises(UnsupportedConfigurationError, match="gradients that were changed"):
        training.optimizer.step()


@pytest.mark.defect("strangers-1")
def test_the_norm_of_gradients_that_only_owners_have_is_no_number(caplog: pytest.LogCaptureFixture) -> None:
    """Gradients that are not the mean do not look like gradients; who skips steps for that is told so."""
    training = owned()
    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            training.backward()
            assert all(
                parameter.grad.isnan().all() for parameter in training.held if parameter.grad is not None
            )
            training.optimizer.zero_grad()
    assert [record.message for record in caplog.records if "never trains" in record.message]


@pytest.mark.defect("decoupled-9")
def test_two_steps_of_one_optimizer_before_the_others_are_two_steps_or_an_error() -> None:
    """A second ``step()`` is never swallowed."""
    net = network()
    optimizers = [
        torch.optim.SGD(layer.parameters(), lr=0.1) for layer in net if isinstance(layer, nn.Linear)
    ]
    model = DistributedDataParallel(net)
    model.register_comm_hook(DecoupledState(optimizers, owners="layers"), decoupled_hook)
    model(inputs(0)).sum().backward()
    optimizers[0].step()
    with pytest.raises(UnsupportedConfigurationError, match="second one"):
        optimizers[0].step()


@pytest.mark.defect("decoupled-10")
def test_no_codec_is_planned_for_owners() -> None:
    """``plan_codec()`` refuses what ``DecoupledState(codec=…, owners=…)`` refuses."""
    training = owned().run()
    assert training.state is not None
    with pytest.raises(UnsupportedConfigurationError, match="owners"):
        training.state.plan_codec()


def loads(rank: int, world_size: int, muon: bool) -> list[int]:
    """Return the elements that each rank trains of a model with a frozen backbone."""
    frozen, trained = nn.Linear(40, 40, bias=False).requires_grad_(False), nn.Sequential()
    trained.extend([nn.Linear(8, 8, bias=False) for _ in range(4)])
    parameters = [*trained.parameters(), *frozen.parameters()]
    if muon:
        owners = MuonState(torch.optim.Muon(parameters)).owners
    else:
        owners = DecoupledState(torch.optim.AdamW(parameters), owners="layers").owners or ()
    trained_by = [0] * world_size
    for parameter, owner in zip(parameters, owners, strict=True):
        trained_by[owner] += parameter.numel() if parameter.requires_grad else 0
    return trained_by


@pytest.mark.defect("decoupled-11")
@pytest.mark.defect("strangers-29")
@pytest.mark.parametrize("muon", [False, True])
def test_frozen_parameters_are_no_load(muon: bool) -> None:
    """What is trained is divided equally, whatever is frozen beside it."""
    assert run_ranks(loads, 2, args=(muon,)) == [[128, 128]] * 2


class Decaying(torch.optim.SGD):
    """Adds the decay of weights to gradients in place."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.add_(parameter, alpha=0.1)
        return super().step(closure)


@pytest.mark.defect("strangers-6")
def test_an_optimizer_may_reuse_the_memory_of_gradients() -> None:
    """What an optimizer does to gradients is not laid to the user's charge."""
    plain, ours = (
        Training(decoupled=decoupled, make=lambda m: Decaying(m.parameters(), lr=0.1), owners="layers").run()
        for decoupled in (False, True)
    )
    assert_same(plain, ours)


@pytest.mark.defect("strangers-37")
@pytest.mark.parametrize("owners", [None, "layers"])
def test_a_frozen_integer_parameter_may_be_in_the_optimizer(owners: str | None) -> None:
    """SGD takes a model with a quantisation table that is a frozen integer parameter."""

    def quantised() -> nn.Module:
        net = network()
        net.register_parameter("table", nn.Parameter(torch.arange(3), requires_grad=False))
        return net

    plain, ours = (
        Training(decoupled=decoupled, net=quantised, owners=owners).run() for decoupled in (False, True)
    )
    assert_same(plain, ours)

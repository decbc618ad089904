"""Gradients that are withheld, and failed steps, with `OwnerState` in a job of one rank."""

import functools
from typing import Any

import pytest
import torch

from crossover_ddp import UnsupportedConfigurationError
from tests.unit.decoupled.decoupled_training import Acting, act, owned

pytestmark = pytest.mark.usefixtures("process_group")
refused = functools.partial(pytest.raises, UnsupportedConfigurationError)


@pytest.mark.defect("strangers-1")
@pytest.mark.parametrize("view", [True, False])
@pytest.mark.parametrize("unscale", [True, False])
def test_a_grad_scaler_is_refused_with_owners(unscale: bool, view: bool) -> None:
    training = owned(ddp={"gradient_as_bucket_view": view})
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    scaler.scale(training.loss()).backward()
    with refused(match="GradScaler"):
        if unscale:
            scaler.unscale_(training.optimizer)
        scaler.step(training.optimizer)
        scaler.update()
        training.drop()


@pytest.mark.defect("strangers-1")
def test_withheld_gradients_are_nan_and_skipping_every_step_warns(
    caplog: pytest.LogCaptureFixture,
) -> None:
    training = owned()
    for _ in range(4):
        training.backward()
        assert all(each.grad.isnan().all() for each in training.held if each.grad is not None)
        training.optimizer.zero_grad()
    assert "never trains" in caplog.text


@pytest.mark.defect("decoupled-14")
@pytest.mark.parametrize("acts", [[ArithmeticError("singular side")], [None, KeyboardInterrupt()]])
def test_after_a_failed_step_of_owners_backward_names_the_cause(acts: list[Any]) -> None:
    training = owned(make=Acting.of).run(3)
    training.backward()
    with act(side_effect=acts), pytest.raises(type(acts[-1])):
        training.optimizer.step()
    with refused(match="the last backward\\(\\) or step\\(\\) raised"):
        training.optimizer.step()
    with refused(match=str(acts[-1]) or "KeyboardInterrupt"):
        training.backward()

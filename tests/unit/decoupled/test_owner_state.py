"""Gradients that are withheld, and failed steps, with `OwnerState` in a job of one rank."""

import functools
import math
from typing import Any

import pytest
import torch

from crossover_ddp import UnsupportedConfigurationError
from tests.unit.decoupled.decoupled_training import Acting, Training, act, assert_same, owned

pytestmark = pytest.mark.usefixtures("process_group")
refused = functools.partial(pytest.raises, UnsupportedConfigurationError)


@pytest.mark.defect("strangers-1")
@pytest.mark.parametrize("view", [True, False])
@pytest.mark.parametrize("unscale", [True, False])
def test_a_grad_scaler_works_with_owners(unscale: bool, view: bool) -> None:
    """The same steps are skipped as with plain DDP, and the scale is the same."""
    options = {"gradient_as_bucket_view": view}
    runs = [owned(ddp=options), Training(decoupled=False, ddp=options)]
    for training in runs:
        training.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
        for step in range(10):
            loss = training.loss() * (math.inf if step in (0, 5) else 1.0)
            training.scaler.scale(loss).backward()
            if unscale:
                training.scaler.unscale_(training.optimizer)
                torch.nn.utils.clip_grad_norm_(training.held, 1e9)
            training.scaler.step(training.optimizer)
            training.scaler.update()
            training.drop()
    assert runs[0].scaler.get_scale() == runs[1].scaler.get_scale()
    assert_same(*runs)


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

"""Gradients and parameters that a script changes between backward and forward, in real ranks that differ."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from crossover_ddp import UnsupportedConfigurationError
from tests.harness import run_ranks
from tests.multiprocess.test_decoupled import Training

Parameters = Callable[[], list[nn.Parameter]]
Script = Callable[[Training, Parameters], None]
STEPS = 8


def old_style_clipping(training: Training, parameters: Parameters) -> None:
    """As scripts clipped before ``clip_grad_norm_``: no version counter sees it."""
    training.backward()
    norm = torch.stack([p.grad.data.norm() for p in parameters() if p.grad is not None]).norm()
    for parameter in parameters():
        if parameter.grad is not None:
            parameter.grad.data.mul_(min(1.0, 0.1 / float(norm)))
    training.optimizer.step()


def clipping(training: Training, parameters: Parameters) -> None:
    training.backward()
    clip_grad_norm_(parameters(), 0.1)
    training.optimizer.step()


def clamping(training: Training, parameters: Parameters) -> None:
    training.backward()
    training.optimizer.step()
    for parameter in parameters():
        parameter.data.clamp_(-0.15, 0.15)


SCRIPTS: dict[str, Script] = {
    "old-style clipping": old_style_clipping,
    "clipping": clipping,
    "clamping": clamping,
}


def held(training: Training) -> Parameters:
    parameters = list(training.model.parameters())
    return lambda: parameters


def of_the_model(training: Training) -> Parameters:
    return lambda: list(training.model.parameters())


def of_the_optimizer(training: Training) -> Parameters:
    return lambda: [p for group in training.optimizer.param_groups for p in group["params"]]


def run_script(rank: int, world_size: int, script: str, way: str, source: Any) -> Any:
    """Train with the script; return the error, or the weights at the end."""
    training = Training(rank, "sgd", way)
    parameters = source(training)
    try:
        for _ in range(STEPS):
            SCRIPTS[script](training, parameters)
            training.optimizer.zero_grad()
        return training.end()
    except UnsupportedConfigurationError as error:
        return str(error)


@pytest.mark.parametrize("script", SCRIPTS)
def test_changes_of_tensors_taken_earlier_are_refused_on_all_ranks(script: str) -> None:
    for found in run_ranks(run_script, 2, args=(script, "decoupled", held), timeout_s=60):
        assert isinstance(found, str), "trained on with other weights than plain DDP"
        assert "state.flush()" in found


@pytest.mark.parametrize("source", [of_the_model, of_the_optimizer])
@pytest.mark.parametrize("script", SCRIPTS)
def test_changes_through_the_model_or_the_optimizer_are_those_of_plain_ddp(script: str, source: Any) -> None:
    decoupled, plain = (
        run_ranks(run_script, 2, args=(script, way, source), timeout_s=60) for way in ("decoupled", "plain")
    )
    for one, other in zip(decoupled, plain, strict=True):
        assert torch.equal(one, other)

"""Gradients and parameters that a script changes between backward and forward, in real ranks that differ."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from crossover_ddp import UnsupportedConfigurationError
from tests.harness import run_ranks
from tests.multiprocess.test_decoupled import Training

Parameters = list[nn.Parameter]
Script = Callable[[Training, Parameters], None]
STEPS = 8


def old_style_clipping(training: Training, parameters: Parameters) -> None:
    """As scripts clipped before ``clip_grad_norm_``: no version counter sees it."""
    training.backward()
    norm = torch.stack([p.grad.data.norm() for p in parameters if p.grad is not None]).norm()
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.data.mul_(min(1.0, 0.1 / float(norm)))
    training.optimizer.step()


def clipping(training: Training, parameters: Parameters) -> None:
    training.backward()
    clip_grad_norm_(parameters, 0.1)
    training.optimizer.step()


def clamping(training: Training, parameters: Parameters) -> None:
    training.backward()
    training.optimizer.step()
    for parameter in parameters:
        parameter.data.clamp_(-0.15, 0.15)


SCRIPTS: dict[str, Script] = {
    "old-style clipping": old_style_clipping,
    "clipping": clipping,
    "clamping": clamping,
}


def run_script(rank: int, world_size: int, script: str) -> str:
    """Train with the script, and return the error."""
    training = Training(rank, "sgd", "decoupled")
    held = list(training.model.parameters())
    with pytest.raises(UnsupportedConfigurationError) as error:
        for _ in range(STEPS):
            SCRIPTS[script](training, held)
            training.optimizer.zero_grad()
        training.end()
    return str(error.value)


@pytest.mark.parametrize("script", SCRIPTS)
def test_changes_of_tensors_taken_earlier_are_refused_on_all_ranks(script: str) -> None:
    for found in run_ranks(run_script, 2, args=(script,), timeout_s=60):
        assert "state.flush()" in found

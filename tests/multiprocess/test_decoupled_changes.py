"""Gradients and parameters that a script changes between backward and forward, in real ranks that differ."""

from collections.abc import Callable
from typing import Any

import pytest
import timm.optim
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from crossover_ddp import DecoupledState, UnsupportedConfigurationError, decoupled_hook
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


def train_with(rank: int, world_size: int, way: str, tool: str) -> torch.Tensor:
    training = Training(rank, "sgd", way)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
    outer = timm.optim.Lookahead(training.optimizer, k=3) if tool == "lookahead" else training.optimizer
    images = torch.randn(8, 1, 6, 6, generator=torch.Generator().manual_seed(rank))
    for _ in range(STEPS):
        if tool == "lookahead":
            training.backward()
            outer.step()
        else:
            scaler.scale(training.model(images).square().mean()).backward()
            scaler.step(outer)
            scaler.update()
        outer.zero_grad()
    return training.end()


@pytest.mark.parametrize("tool", ["lookahead", "scaler"])
def test_what_goes_through_the_optimizers_groups_is_as_with_plain_ddp(tool: str) -> None:
    decoupled, plain = (
        run_ranks(train_with, 2, args=(way, tool), timeout_s=60) for way in ("decoupled", "plain")
    )
    for one, other in zip(decoupled, plain, strict=True):
        assert torch.equal(one, other)


class Remembering(nn.Module):
    """Keeps a weight of another module in a list, which no guard sees."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embedding = nn.Embedding(12, 8)
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.references = [self.embedding.weight]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.layers(nn.functional.embedding(tokens, self.references[0]))
        return hidden @ self.references[0].t()


def train_remembering(rank: int, world_size: int, way: str) -> list[float]:
    model = DistributedDataParallel(Remembering(), bucket_cap_mb=1e-4, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    state = DecoupledState(optimizer, defer="always") if way == "decoupled" else None
    if state is not None:
        model.register_comm_hook(state, decoupled_hook)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(12):
        tokens = torch.randint(0, 12, (16,), generator=generator)
        loss = nn.functional.cross_entropy(model(tokens), tokens.roll(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    if state is not None:
        state.close()
    return losses


def test_references_kept_elsewhere_are_read_up_to_date() -> None:
    assert run_ranks(train_remembering, 2, args=("decoupled",)) == run_ranks(
        train_remembering, 2, args=("plain",)
    )

"""A small model under DDP with its optimizer, decoupled or not, in a job of one rank."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp import DecoupledState, decoupled_hook
from tests.harness.networks import mlp

STEPS = 5


def network() -> nn.Sequential:
    return mlp(6, 6, 6, 6, seed=3, tanh_last=True)


def inputs(step: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(step))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


class Training:
    """A model under DDP with its optimizer, decoupled or not; ``options``: of the state."""

    def __init__(
        self,
        *,
        decoupled: bool,
        make: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
        net: Callable[[], nn.Module] = network,
        ddp: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.model = DistributedDataParallel(
            net(), **{"bucket_cap_mb": 1e-4, "gradient_as_bucket_view": True, **(ddp or {})}
        )
        self.held = list(self.model.parameters())  # as a script may hold them, past all guards
        self.optimizer = make(self.model)
        self.state = DecoupledState(self.optimizer, **{"defer": "always", **options}) if decoupled else None
        if self.state is not None:
            self.model.register_comm_hook(self.state, decoupled_hook)
        self.steps = 0

    def backward(self) -> float:
        loss = self.model(inputs(self.steps)).square().mean()
        loss.backward()
        self.steps += 1
        return float(loss.detach())

    def step(self) -> float:
        loss = self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def run(self, steps: int = STEPS) -> "Training":
        for _ in range(steps):
            self.step()
        return self

    @property
    def is_pending(self) -> bool:
        return bool(self.state is not None and self.state.stats()["deferred"])

    def weights(self) -> list[torch.Tensor]:
        return [value.clone() for value in self.model.module.state_dict().values()]


def assert_same(one: Training, other: Training) -> None:
    assert all(torch.equal(a, b) for a, b in zip(one.weights(), other.weights(), strict=True))

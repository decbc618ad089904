"""A small model under DDP with its optimizer, decoupled or not, in a job of one rank."""

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import nn

from tests.harness import training as harness
from tests.harness.networks import mlp
from tests.harness.training import STEPS, batch, same
from tests.harness.training import decoupled as way_of

__all__ = ["STEPS", "Acting", "Training", "assert_same", "both", "inputs", "network"]

inputs = functools.partial(batch, 0)
network = functools.partial(mlp, 6, 6, 6, 6, seed=3, tanh_last=True)


class Training(harness.Training):
    """Training with plain DDP, or decoupled.

    Steps are deferred wherever possible, unless ``options`` of the state forbid it.
    """

    def __init__(
        self,
        *,
        decoupled: bool,
        make: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
        net: Callable[[], nn.Module] = network,
        ddp: dict[str, Any] | None = None,
        owned: bool = False,
        mutex: Any = None,
        **options: Any,
    ) -> None:
        way = None
        if decoupled:
            way = harness.owned if owned else way_of(**options)
        optimizers = make and (lambda model: [make(model)])
        super().__init__(way, mutex=mutex, module=net(), optimizers=optimizers, **(ddp or {}))


class Acting(torch.optim.SGD):
    """Calls ``act``, which tests patch, at the beginning of each part of a step."""

    @classmethod
    def of(cls, model: nn.Module) -> "Acting":
        return cls(model.parameters(), lr=0.1)

    def act(self) -> object:
        return None

    def step(self, closure: Any = None) -> Any:
        if any(group["params"] for group in self.param_groups):
            self.act()
        return super().step(closure)


def both(**settings: Any) -> tuple[Training, Training]:
    """Return one decoupled, and one with plain DDP."""
    return Training(decoupled=True, **settings), Training(decoupled=False, **settings)


def assert_same(one: harness.Training, other: harness.Training) -> None:
    assert same(one, other)


def act(**how: Any) -> Any:
    return mock.patch.object(Acting, "act", mock.Mock(**how))


def owned(**options: Any) -> Training:
    return Training(decoupled=True, owned=True, **options)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": module.parameters()}
        for module in model.modules()
        if isinstance(module, nn.Linear)
    ]

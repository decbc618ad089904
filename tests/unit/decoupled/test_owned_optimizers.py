"""Of which optimizers directions travel, and which are refused on a parameter's own shape."""

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Muon
from torch.optim.lr_scheduler import CosineAnnealingLR

from crossover_ddp._decoupled.owned import OwnedMuon, OwnedOptimizer, costs_of, owned_optimizer
from crossover_ddp.errors import UnsupportedConfigurationError

pytestmark = pytest.mark.torch_version


def muon(kind: type[Muon] = Muon) -> Muon:
    return kind([nn.Parameter(torch.ones(5, 3))], lr=0.1)


def scheduled() -> Muon:
    """A scheduler puts a function of its own in the place of step()."""
    made = muon()
    CosineAnnealingLR(made, 10)
    return made


def patched() -> Muon:
    made = muon()

    def step(self: Muon, closure: Any = None) -> Any:
        return Muon.step(self, closure)

    made.step = types.MethodType(step, made)  # type: ignore[method-assign]
    return made


class Further(Muon):
    """A class made of torch's Muon."""


PARAMETERS, DIRECTIONS = OwnedOptimizer, OwnedMuon


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (muon, DIRECTIONS),
        (scheduled, DIRECTIONS),
        (patched, PARAMETERS),
        (lambda: muon(Further), PARAMETERS),
    ],
)
def test_directions_travel_of_torchs_muon_alone(make: Callable[[], Muon], kind: type[OwnedOptimizer]) -> None:
    assert type(owned_optimizer(make())) is kind


class Square(torch.optim.SGD):
    """Works on square matrices only."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                torch.linalg.cholesky(torch.eye(parameter.shape[0]) * torch.ones(parameter.shape))
        return super().step(closure)


def test_an_optimizer_that_fails_on_a_parameters_own_shape_is_refused() -> None:
    with pytest.raises(UnsupportedConfigurationError, match=r"Square, which failed on one of shape \(4, 6\)"):
        costs_of(Square([nn.Parameter(torch.ones(4, 6))], lr=0.1))

"""Of which optimizers directions travel, how much room they take, and what a parameter costs its owner."""

import types
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW, Muon
from torch.optim.lr_scheduler import CosineAnnealingLR

from crossover_ddp._decoupled.owned import OwnedMuon, OwnedOptimizer, costs_of, owned_optimizer
from crossover_ddp.errors import UnsupportedConfigurationError

pytestmark = pytest.mark.torch_version


def muon(kind: type[Muon] = Muon) -> Muon:
    return kind([nn.Parameter(torch.ones(5, 3))], lr=0.1)


class Further(Muon):
    """A class made of torch's Muon."""


def test_directions_travel_of_torchs_muon_with_and_without_a_scheduler() -> None:
    assert isinstance(owned_optimizer(muon()), OwnedMuon)
    scheduled = muon()
    CosineAnnealingLR(scheduled, 10)  # puts a function of its own in the place of step()
    assert isinstance(owned_optimizer(scheduled), OwnedMuon)


def test_updated_parameters_travel_of_everything_else() -> None:
    patched = muon()

    def step(self: Muon, closure: Any = None) -> Any:
        return Muon.step(self, closure)

    patched.step = types.MethodType(step, patched)  # type: ignore[method-assign]
    for optimizer in (AdamW([nn.Parameter(torch.ones(5, 3))]), muon(Further), patched):
        made = owned_optimizer(optimizer)
        assert type(made) is OwnedOptimizer
        assert made.returning_numel(15, 4) == 15


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (4, 4)])
def test_a_direction_takes_two_bytes_a_number_in_a_buffer_of_any_type(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    owned = owned_optimizer(muon())
    matrix = torch.empty(shape, dtype=dtype)
    numel = owned.returning_numel(matrix.numel(), dtype.itemsize)
    needed_bytes = 2 * matrix.numel()
    assert needed_bytes <= numel * dtype.itemsize < needed_bytes + dtype.itemsize
    buffer = torch.zeros(numel + 2, dtype=dtype)
    direction = torch.randn(shape).bfloat16()
    owned.piece(buffer[1:-1], matrix).copy_(direction)
    assert torch.equal(owned.piece(buffer[1:-1], matrix), direction)
    assert not buffer[0] and not buffer[-1], "nothing is written beside its place"


def test_the_cost_is_what_the_optimizer_keeps_and_the_parameter() -> None:
    matrix, vector = nn.Parameter(torch.ones(4, 6)), nn.Parameter(torch.ones(5))
    costs = costs_of(torch.optim.AdamW([matrix, vector]))
    assert costs == [3 * 4 * 24 + 4, 3 * 4 * 5 + 4], "and a count of steps"
    assert costs_of(torch.optim.SGD([matrix])) == [4 * 24]


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

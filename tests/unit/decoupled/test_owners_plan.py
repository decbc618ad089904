"""What a parameter costs its owner."""

from typing import Any

import pytest
import torch
from torch import nn

from crossover_ddp._decoupled.owner_trial import costs_of
from crossover_ddp.errors import UnsupportedConfigurationError


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

"""Who owns which parameter, where it lies in what travels, and which tensors an optimizer keeps."""

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from crossover_ddp._decoupled.owner_trial import costs_of
from crossover_ddp._decoupled.owners import OwnedPart, assign, owned_layout
from crossover_ddp._decoupled.state_tensors import described, filled, in_memory, places_in, tensors_in
from crossover_ddp.errors import UnsupportedConfigurationError


@given(st.lists(st.integers(0, 1000), max_size=30), st.integers(1, 9))
def test_no_rank_has_more_than_the_mean_and_a_part_of_one_parameter(
    costs: list[int], world_size: int
) -> None:
    made = assign(costs, world_size)
    for rank in range(world_size):
        assert made.loads[rank] == sum(
            cost for cost, owner in zip(costs, made.owners, strict=True) if owner == rank
        )
    assert max(made.loads) <= sum(costs) / world_size + max(costs, default=0) * (1 - 1 / world_size)


def test_equal_parameters_of_a_bucket_spread_over_the_ranks() -> None:
    assert assign([5] * 6, 3).owners == (2, 1, 0, 2, 1, 0)
    with pytest.raises(ValueError, match="expected at least one rank"):
        assign([1], 0)


@given(st.integers(1, 5), st.data())
def test_every_element_travels_once_in_its_owners_part(world_size: int, data: st.DataObject) -> None:
    part = st.builds(OwnedPart, st.integers(0, world_size - 1), st.integers(0, 20))
    parts = tuple(data.draw(st.lists(part, max_size=8)))
    layout, places = owned_layout(world_size, parts)
    used = [0] * layout.numel
    for (owner, numel), place in zip(parts, places, strict=True):
        own = layout.part(owner)
        assert place.numel == numel and own.start <= place.start and place.stop <= own.stop
        for element in range(place.start, place.stop):
            used[element] += 1
    assert used == [1] * layout.numel


class Pair(NamedTuple):
    """Something that an optimizer may keep."""

    one: torch.Tensor
    other: int


def test_a_state_is_described_and_filled_again() -> None:
    kept: dict[str, Any] = {
        "step": torch.tensor(3.0),
        "sides": [torch.arange(4.0).view(2, 2).T, (torch.ones(0), "text")],
        "pair": Pair(torch.arange(6, dtype=torch.float64).view(2, 3), 7),
        "gaps": torch.arange(8.0)[::2],
        "nothing": None,
    }
    description = described(kept)
    received = []
    for place, tensor in zip(places_in(description), tensors_in(kept), strict=True):
        there = place.empty(torch.device("cpu"))
        in_memory(there).copy_(in_memory(tensor))
        received.append(there)
    again = filled(description, iter(received))
    assert isinstance(again["pair"], Pair) and again["pair"].other == 7
    assert again["nothing"] is None and again["sides"][1][1] == "text"
    for ours, theirs in zip(tensors_in(again), tensors_in(kept), strict=True):
        assert torch.equal(ours, theirs) and ours.dtype == theirs.dtype
    assert again["sides"][0].stride() == (1, 2), "the order in memory is kept: sums take the same way"


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

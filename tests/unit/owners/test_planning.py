"""Who owns what, and what is spread or passes through, against algebra and cases done by hand.

Where it lies in what travels: tests/multiprocess.
"""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossover_ddp._kfac.placement import LayerCost, expected_buckets, most_columns, place, spreads
from crossover_ddp._owners.assignment import assign
from crossover_ddp._owners.packing import fill_up


def layer(name: str, dim: int, gradient_bytes: int = 0) -> LayerCost:
    return LayerCost(name, 1, dim, 1, gradient_bytes)


@given(dim=st.integers(1, 500), world_size=st.integers(2, 9))
def test_columns_travel_where_those_of_all_ranks_are_fewer_numbers(dim: int, world_size: int) -> None:
    most = most_columns(dim, world_size)
    assert world_size * most * dim < dim * (dim + 1) / 2 <= world_size * (most + 1) * dim
    assert most_columns(dim, 1) == 0


@given(data=st.data(), dims=st.lists(st.integers(1, 3), min_size=1, max_size=12))
def test_names_break_ties_so_order_of_layers_does_not_matter(data: st.DataObject, dims: list[int]) -> None:
    layers = [layer(f"l{number:02}", dim) for number, dim in enumerate(dims)]
    shuffled = data.draw(st.permutations(layers))
    one, other = place(layers, 3, 1), place(shuffled, 3, 1)
    assert dict(zip(layers, one, strict=True)) == dict(zip(shuffled, other, strict=True))


def test_what_every_step_costs_counts_the_more_the_rarer_inversions_are() -> None:
    layers = [layer("a", 3000), layer("b", 2500), layer("wide", 1, gradient_bytes=10**7)]
    assert place(layers, 2, 1) == (0, 1, 1)
    assert place(layers, 2, 100) == (1, 1, 0)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=20), st.integers(1, 40), st.integers(1, 40))
def test_buckets_are_expected_to_be_filled_from_the_back(sizes: list[int], cap: int, first: int) -> None:
    buckets = expected_buckets(sizes, cap, first)
    assert buckets[-1] == 0
    assert buckets == sorted(buckets, reverse=True)
    # All but the last one are full, and were not before their last parameter.
    for number in range(buckets[0]):
        inside = [size for size, bucket in zip(sizes, buckets, strict=True) if bucket == number]
        assert sum(inside) >= (cap if number else first) > sum(inside[1:])


@pytest.mark.parametrize(
    ("dims", "ranks", "every", "spread"),
    [
        pytest.param((1121, 155), 2, 100, True, id="dominant"),
        pytest.param((155, 1121), 2, 100, True, id="either-side"),
        pytest.param((1121, 155), 2, 1, False, id="new-solvers-in-every-step"),
        pytest.param((1121, 155), 1, 100, False, id="alone"),
        pytest.param((500, 100), 2, 100, False, id="small"),
        pytest.param((8000, 8000), 64, 10**6, False, id="square-and-large"),
    ],
)
def test_a_layer_is_spread_where_that_costs_less(dims: Any, ranks: int, every: int, spread: bool) -> None:
    """Than the wire and its owner do."""
    cost = LayerCost("l", 1, *dims, 4 * dims[0] * dims[1])
    assert spreads(cost, ranks, every) == spread
    assert not spreads(cost._replace(groups=2), ranks, every)
    assert cost._replace(spread=True).step_s(10) == cost.inverse_s / 10 < cost.step_s(10)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=6), st.integers(0, 200))
def test_the_emptiest_parts_are_filled_first(filled: list[int], numel: int) -> None:
    """So what passes through fills up the parts of those who own little."""
    shares = fill_up(filled, numel)
    after = [before + share for before, share in zip(filled, shares, strict=True)]
    assert sum(shares) == numel
    assert min(shares) >= 0
    raised = [level for level, share in zip(after, shares, strict=True) if share]
    # Nobody who got something is more than one element above anybody.
    assert not raised or max(raised) <= min(after) + 1


@given(st.lists(st.integers(0, 1000), max_size=30), st.integers(1, 9))
def test_no_rank_has_more_than_the_mean_and_a_part_of_one(costs: list[int], world_size: int) -> None:
    made, loads = assign(costs, world_size), [0] * world_size
    for cost, owner in zip(costs, made.owners, strict=True):
        loads[owner] += cost
    assert [*made.loads] == loads
    assert world_size * max(loads) <= sum(costs) + max(costs, default=0) * (world_size - 1)

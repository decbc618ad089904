"""Placement and spreading against exhaustive search, algebra and cases done by hand."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossover_ddp._kfac.placement import LayerCost, expected_buckets, loads_s, most_columns, place, spreads


def layer(name: str, dim: int, gradient_bytes: int = 0) -> LayerCost:
    return LayerCost(name, 1, dim, 1, gradient_bytes)


@given(dim=st.integers(1, 500), world_size=st.integers(2, 9))
def test_columns_travel_where_those_of_all_ranks_are_fewer_numbers(dim: int, world_size: int) -> None:
    most = most_columns(dim, world_size)
    assert world_size * most * dim < dim * (dim + 1) / 2 <= world_size * (most + 1) * dim
    assert most_columns(dim, 1) == 0


# Placement.

dims = st.lists(st.integers(1, 300), min_size=1, max_size=7)


def least_maximum(weights: Sequence[float], world_size: int) -> float:
    """Try every placement."""
    return min(
        max(sum(w for w, owner in zip(weights, owners, strict=True) if owner == rank) for rank in owners)
        for owners in itertools.product(range(world_size), repeat=len(weights))
    )


@settings(max_examples=60, deadline=None)
@given(dims=dims, world_size=st.integers(1, 3))
def test_no_rank_has_more_than_four_thirds_of_the_best(dims: list[int], world_size: int) -> None:
    layers = [layer(f"l{number}", dim) for number, dim in enumerate(dims)]
    owners = place(layers, world_size, 1)
    found = loads_s(layers, owners, world_size, 1)
    owned = [0.0] * world_size
    for each, owner in zip(layers, owners, strict=True):
        owned[owner] += each.step_s(1)
    assert found == pytest.approx(owned)
    best = least_maximum([each.step_s(1) for each in layers], world_size)
    assert max(found) <= (4 / 3 - 1 / (3 * world_size)) * best * (1 + 1e-12)


@given(data=st.data(), dims=st.lists(st.integers(1, 3), min_size=1, max_size=12))
def test_names_break_ties_so_the_order_of_layers_does_not_matter(
    data: st.DataObject, dims: list[int]
) -> None:
    layers = [layer(f"l{number:02}", dim) for number, dim in enumerate(dims)]
    shuffled = data.draw(st.permutations(layers))
    one, other = place(layers, 3, 1), place(shuffled, 3, 1)
    assert dict(zip(layers, one, strict=True)) == dict(zip(shuffled, other, strict=True))


def test_equal_layers_go_to_the_lowest_rank_first() -> None:
    layers = [layer(name, 2) for name in "cab"]
    assert place(layers, 2, 1) == (0, 0, 1)  # a to 0, b to 1, c to 0


def test_what_every_step_costs_counts_the_more_the_rarer_inversions_are() -> None:
    layers = [layer("a", 3000), layer("b", 2500), layer("wide", 1, gradient_bytes=10**7)]
    assert place(layers, 2, 1) == (0, 1, 1)
    assert place(layers, 2, 100) == (1, 1, 0)


def test_each_bucket_is_shared_out() -> None:
    sizes = [("a", 0, 4), ("b", 0, 1), ("c", 1, 4), ("d", 1, 1)]
    layers = [layer(name, size)._replace(bucket=bucket) for name, bucket, size in sizes]
    assert place(layers, 2, 1) == (0, 1, 1, 0)
    assert place([each._replace(bucket=0) for each in layers], 2, 1) == (0, 0, 1, 1)


@given(
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=20),
    cap=st.integers(1, 40),
    first=st.integers(1, 40),
)
def test_buckets_are_expected_to_be_filled_from_the_back(sizes: list[int], cap: int, first: int) -> None:
    buckets = expected_buckets(sizes, cap, first)
    assert buckets[-1] == 0
    assert buckets == sorted(buckets, reverse=True)
    # All but the last one are full, and were not before their last parameter.
    for number in range(buckets[0]):
        inside = [size for size, bucket in zip(sizes, buckets, strict=True) if bucket == number]
        assert sum(inside) >= (cap if number else first) > sum(inside[1:])


@pytest.mark.parametrize(
    ("a_dim", "g_dim", "world_size", "inverse_steps", "spread"),
    [
        pytest.param(1121, 155, 2, 100, True, id="dominant"),
        pytest.param(155, 1121, 2, 100, True, id="either-side"),
        pytest.param(1121, 155, 2, 1, False, id="new-solvers-in-every-step"),
        pytest.param(1121, 155, 1, 100, False, id="alone"),
        pytest.param(500, 100, 2, 100, False, id="small"),
        pytest.param(8000, 8000, 64, 10**6, False, id="square-and-large"),
    ],
)
def test_a_layer_is_spread_where_the_wire_and_the_owner_cost_more(
    a_dim: int, g_dim: int, world_size: int, inverse_steps: int, spread: bool
) -> None:
    cost = LayerCost("l", 1, a_dim, g_dim, 4 * a_dim * g_dim)
    assert spreads(cost, world_size, inverse_steps) == spread
    assert not spreads(cost._replace(groups=2), world_size, inverse_steps)
    assert cost._replace(spread=True).step_s(10) == cost.inverse_s / 10 < cost.step_s(10)

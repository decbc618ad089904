"""Placement, spreading, merging and early factors against exhaustive search, algebra and cases done by hand."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossover_ddp._kfac.placement import (
    EarlyFactor,
    FactorBucket,
    FactorStep,
    Groups,
    LayerCost,
    choose_early,
    columns_that_travel,
    expected_buckets,
    factor_step_s,
    loads_s,
    merge,
    merge_best,
    place,
    spreads,
)
from crossover_ddp._planning import Link

FREE = Link(0.0, 0.0)


def layer(name: str, dim: int, gradient_bytes: int = 0) -> LayerCost:
    return LayerCost(name, 1, dim, 1, gradient_bytes)


@pytest.mark.parametrize(
    ("count", "dim", "world_size", "sent"),
    [(0, 9, 2, 0), (2, 9, 2, 2), (3, 9, 2, 0), (1, 9, 4, 1), (2, 9, 4, 0), (2, 9, 1, 0)],
)
def test_columns_travel_where_they_are_fewer_numbers(
    count: int, dim: int, world_size: int, sent: int
) -> None:
    assert columns_that_travel(count, dim, world_size) == sent
    if sent:
        assert world_size * sent * dim < dim * (dim + 1) // 2


# Costs.


def test_a_layer_is_all_its_factors() -> None:
    one, four = LayerCost("l", 1, 3, 2, 0), LayerCost("grouped", 4, 3, 2, 0)
    assert four.inverse_s == 4 * one.inverse_s == pytest.approx(4 * (2 * 5e-5 + (27 + 8) * 2.5e-11))


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
    found = loads_s(layers, place(layers, world_size, 1), world_size, 1)
    best = least_maximum([each.step_s(1) for each in layers], world_size)
    assert max(found) <= (4 / 3 - 1 / (3 * world_size)) * best * (1 + 1e-12)


@given(dims=st.lists(st.integers(0, 4), min_size=1, max_size=20), world_size=st.integers(1, 8))
def test_loads_are_those_of_the_owners(dims: list[int], world_size: int) -> None:
    layers = [layer(f"l{number}", dim) for number, dim in enumerate(dims)]
    owners = place(layers, world_size, 1)
    for rank, load_s in enumerate(loads_s(layers, owners, world_size, 1)):
        owned = [each for each, owner in zip(layers, owners, strict=True) if owner == rank]
        assert load_s == sum(each.step_s(1) for each in owned)


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


def test_a_step_costs_the_products_the_wire_and_a_share_of_the_inversion() -> None:
    one = LayerCost("l", 2, 300, 400, 1000)
    products = 2 * 300 * 400 * 700 * 2.5e-11
    assert one.step_s(10) == pytest.approx(one.inverse_s / 10 + products + 2 * 8e-6)


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
    for number in range(
        buckets[0]
    ):  # all but the last one are full, and were not before their last parameter
        inside = [size for size, bucket in zip(sizes, buckets, strict=True) if bucket == number]
        assert sum(inside) >= (cap if number else first) > sum(inside[1:])


def test_the_owner_of_a_spread_layer_has_only_its_inversion() -> None:
    one = LayerCost("l", 1, 30, 40, 10**6)
    assert one._replace(spread=True).step_s(10) == one.inverse_s / 10 < one.step_s(10)


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


# Merging.

ready_times = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 1000)), min_size=1, max_size=8)
short_links = st.builds(Link, st.floats(0, 0.5), st.floats(0, 1e-3))


def merged_s(groups: Groups, ready_s: Sequence[float], sizes_bytes: Sequence[int], link: Link) -> float:
    """Return when the last of ``groups`` has travelled, on a wire that is free from 0 on."""
    free_s = 0.0
    known_s = list(itertools.accumulate(ready_s, max))
    for group in groups:
        free_s = max(free_s, known_s[group[-1]]) + link.half_s(sum(sizes_bytes[layer] for layer in group))
    return free_s


def groupings(layers: int) -> Iterator[Groups]:
    """List all ways to cut layers into consecutive groups."""
    for borders in itertools.product([False, True], repeat=layers - 1):
        cuts = [0, *(number + 1 for number, cut in enumerate(borders) if cut), layers]
        yield tuple(tuple(range(*cut)) for cut in itertools.pairwise(cuts))


def split(layers: list[tuple[float, int]]) -> tuple[list[float], list[int]]:
    return sorted(ready for ready, _ in layers), [size for _, size in layers]


@given(layers=ready_times, link=short_links)
def test_groups_are_all_layers_in_order(layers: list[tuple[float, int]], link: Link) -> None:
    ready_s, sizes = split(layers)
    for groups in (merge(ready_s, sizes, link), merge_best(ready_s, sizes, link)):
        assert list(itertools.chain(*groups)) == list(range(len(layers)))
        assert all(groups)


@settings(max_examples=300, deadline=None)
@given(layers=ready_times, link=short_links)
def test_the_rule_is_never_worse_than_no_merging_nor_twice_the_best(
    layers: list[tuple[float, int]], link: Link
) -> None:
    ready_s, sizes = split(layers)
    found_s = merged_s(merge(ready_s, sizes, link), ready_s, sizes, link)
    alone_s = merged_s(tuple((number,) for number in range(len(layers))), ready_s, sizes, link)
    best_s = min(merged_s(groups, ready_s, sizes, link) for groups in groupings(len(layers)))
    assert found_s <= alone_s * (1 + 1e-9)
    assert found_s <= (ready_s[-1] + link.half_s(sum(sizes))) * (1 + 1e-9)
    assert best_s * (1 - 1e-9) <= found_s <= 2 * best_s * (1 + 1e-9)


@settings(max_examples=300, deadline=None)
@given(layers=ready_times, link=short_links)
def test_the_best_groups_are_the_best_of_all(layers: list[tuple[float, int]], link: Link) -> None:
    ready_s, sizes = split(layers)
    found_s = merged_s(merge_best(ready_s, sizes, link), ready_s, sizes, link)
    best_s = min(merged_s(groups, ready_s, sizes, link) for groups in groupings(len(layers)))
    assert found_s == pytest.approx(best_s, rel=1e-12)


@pytest.mark.parametrize(
    ("ready_s", "link", "expected"),
    [
        ([0.0, 0.0, 0.0], Link(1.0, 1.0), ((0, 1, 2),)),  # all at once: one message
        ([0.0, 9.0, 18.0], Link(1.0, 1.0), ((0,), (1,), (2,))),  # far apart: each by itself
        ([0.0, 1.0, 3.0], Link(0.0, 1.0), ((0,), (1,), (2,))),  # start-up is free
        ([0.0, 0.5, 9.0], Link(1.0, 1.0), ((0, 1), (2,))),
        ([0.0, 1.0, 1.5], Link(1.0, 5.0), ((0,), (1, 2))),  # 1 and 2 wait for the wire until 6
        ([2.0, 0.0, 9.0], Link(1.0, 1.0), ((0, 1), (2,))),  # the second waits for the first
    ],
)
def test_groups_done_by_hand(ready_s: list[float], link: Link, expected: Groups) -> None:
    assert merge(ready_s, [1, 1, 1], link) == expected
    assert merged_s(merge_best(ready_s, [1, 1, 1], link), ready_s, [1, 1, 1], link) == merged_s(
        expected, ready_s, [1, 1, 1], link
    )


def test_nothing_makes_no_group_and_sizes_must_match() -> None:
    assert merge([], [], FREE) == merge_best([], [], FREE) == ()
    for of in (merge, merge_best):
        with pytest.raises(ValueError, match="got 2 times and 1 sizes"):
            of([0.0, 1.0], [1], FREE)


# Early factors.

# One byte takes a second. Forward 10, backward 10; A of 3 and 2 bytes ready after 2 and 8.
HAND = FactorStep(
    10.0,
    10.0,
    (EarlyFactor(2.0, 3, 1), EarlyFactor(8.0, 2, 0)),
    (FactorBucket(5.0, 4, 1, 2.0), FactorBucket(10.0, 4, 1, 1.0)),
)
SLOW = Link(0.0, 1.0)


def test_early_wins_where_the_wire_is_free_in_forward() -> None:
    # In buckets: reduce 15-22, 22-30; inverted at 24 and 31; gather 30-34, 34-38.
    # Early: 2-5, 8-10; reduce 15-20, 20-25; inverted at 22 and 26; gather 25-29, 29-33.
    plan = choose_early(HAND, SLOW)
    assert (plan.in_buckets_s, plan.early_s, plan.predicted_s) == (38.0, 33.0, 33.0)
    assert plan.early == ((0,), (1,))


def test_the_owner_inverts_one_bucket_after_the_other_and_the_wire_gathers_meanwhile() -> None:
    buckets = (FactorBucket(0.0, 2, 0, 10.0), FactorBucket(1.0, 4, 0, 3.0))
    # Reduce 0-2, 2-6; inverted at 12 and 15; gather 12-14, 15-19.
    assert factor_step_s(FactorStep(0.0, 5.0, (), buckets), SLOW) == 19.0


def test_a_reduce_that_is_ready_goes_before_a_gather_and_what_has_begun_is_not_interrupted() -> None:
    buckets = tuple(FactorBucket(ready_s, 4, 0, 0.0) for ready_s in (0.0, 3.0, 9.0))
    # Reduce 0-4, 4-8; gather 8-12; reduce 12-16; gather 16-20, 20-24.
    assert factor_step_s(FactorStep(0.0, 9.0, (), buckets), SLOW) == 24.0


def test_buckets_are_taken_where_both_are_equal() -> None:
    # Backward ends long after everything has been gathered.
    hidden = replace(HAND, backward_s=100.0)
    plan = choose_early(hidden, SLOW)
    assert plan.early == ()
    assert plan.predicted_s == plan.in_buckets_s == plan.early_s == 110.0
    assert choose_early(HAND, FREE).early == ()


def test_a_dear_start_up_keeps_factors_in_the_buckets() -> None:
    plan = choose_early(HAND, Link(100.0, 1.0))
    assert plan.early == ()
    assert plan.early_s > plan.in_buckets_s == plan.predicted_s


def test_early_factors_are_grouped_as_is_best() -> None:
    factors = tuple(EarlyFactor(0.99 * number, 1, 0) for number in range(8))
    step = FactorStep(8.0, 1.0, factors, (FactorBucket(1.0, 4, 1, 0.0),))
    plan = choose_early(step, Link(1.0, 1.0))
    rule = merge([factor.ready_s for factor in factors], [1] * 8, Link(1.0, 1.0))
    assert len(plan.early) > len(rule) == 1
    assert plan.predicted_s < factor_step_s(step, Link(1.0, 1.0), rule)


factor_steps = st.builds(
    lambda forward_s, backward_s, factors, buckets: FactorStep(
        forward_s,
        backward_s,
        tuple(
            EarlyFactor(forward_s * part, size, number % len(buckets))
            for part, size, number in sorted(factors)
        ),
        tuple(
            FactorBucket(backward_s * part, gradient, g, inverse_s)
            for part, gradient, g, inverse_s in sorted(buckets)
        ),
    ),
    st.floats(0.01, 1),
    st.floats(0.01, 1),
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 1000), st.integers(0, 5)), max_size=6),
    st.lists(
        st.tuples(st.floats(0, 1), st.integers(1, 1000), st.integers(0, 1000), st.floats(0, 0.1)),
        min_size=1,
        max_size=6,
    ),
)


@given(step=factor_steps, link=short_links)
def test_a_factor_step_is_between_its_limits(step: FactorStep, link: Link) -> None:
    plan = choose_early(step, link)
    gradients = sum(bucket.gradient_bytes for bucket in step.buckets)
    factors = sum(bucket.g_bytes for bucket in step.buckets) + sum(f.size_bytes for f in step.factors)
    wire_s = 2 * len(step.buckets) * link.alpha_s + link.beta_s * (2 * gradients + factors)
    inverse_s = sum(bucket.inverse_s for bucket in step.buckets)
    compute_s = step.forward_s + step.backward_s
    assert plan.predicted_s >= max(compute_s, wire_s, inverse_s) * (1 - 1e-9)
    assert plan.in_buckets_s <= (compute_s + wire_s + inverse_s) * (1 + 1e-9)


@given(step=factor_steps, link=short_links)
def test_the_plan_is_the_better_choice_and_the_same_every_time(step: FactorStep, link: Link) -> None:
    plan = choose_early(step, link)
    assert plan.predicted_s <= min(plan.in_buckets_s, plan.early_s) * (1 + 2e-3)
    assert plan.predicted_s == factor_step_s(step, link, plan.early)
    assert plan == choose_early(step, link)
    assert plan == choose_early(step, link)


def test_a_factor_belongs_to_a_bucket() -> None:
    assert [HAND.a_bytes(bucket) for bucket in range(2)] == [2, 3]
    with pytest.raises(ValueError, match="expected a bucket from 0 to 1, got bucket=2"):
        replace(HAND, factors=(EarlyFactor(0.0, 1, 2),))

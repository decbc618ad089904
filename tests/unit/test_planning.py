"""What is planned without processes: a codec by the cost model, who owns what, what is spread or passes through.

Where what is owned lies in what travels: tests/multiprocess.
"""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossover_ddp._compression.planning import cost_of
from crossover_ddp._engine.observe import StepRecords
from crossover_ddp._kfac.placement import LayerCost, expected_buckets, most_columns, place, spreads
from crossover_ddp._owners.assignment import assign
from crossover_ddp._owners.packing import fill_up
from crossover_ddp._tuning.model import (
    EXACT,
    BucketTimes,
    CodecCost,
    LinkModel,
    Workload,
    all_reduce_step_s,
    coded_step_s,
    weakest_codec,
    workload_of_records,
)
from crossover_ddp.codecs import Half, Int4, Int8, PerPair, SIDCo


def work(size_mb: float = 8.0, compute_s: float = 0.3, buckets: int = 8) -> Workload:
    """Equal buckets, ready at even distances."""
    size = round(size_mb * 1e6 / buckets)
    ready = [BucketTimes(size, compute_s * (each + 1) / buckets) for each in range(buckets)]
    return Workload(0.0, compute_s, tuple(ready))


POINTS = st.tuples(st.integers(1, 10**8), st.floats(0, 1))


@given(st.lists(POINTS, min_size=2, unique_by=lambda point: point[0]))
def test_a_link_is_fitted_to_what_was_measured_and_never_pays_back(
    points: list[tuple[float, float]],
) -> None:
    link = LinkModel.fitted(points)
    assert min(link.alpha_s, link.beta_s) >= 0
    link = LinkModel.fitted((size, 0.002 + 1e-8 * size) for size, _ in points)
    assert (link.alpha_s, link.beta_s) == (
        pytest.approx(0.002, rel=1e-3),
        pytest.approx(1e-8, rel=1e-3),
    )


HALF = CodecCost(0.5, 0.1e-9, 0.2e-9)
INT8 = CodecCost(0.254, 0.3e-9, 0.6e-9)
SPARSE = CodecCost(0.02, 0.6e-9, 0.8e-9)
COSTS = (EXACT, HALF, INT8, SPARSE)


def link(mbit: float) -> LinkModel:
    """Return a link of two ranks: half of the bytes in each direction and half."""
    return LinkModel(0.0, 8 / (mbit * 1e6) / 2)


@given(
    mbit=st.floats(10, 100_000),
    size_mb=st.floats(0.1, 100),
    compute_s=st.floats(0.001, 2),
    buckets=st.integers(1, 20),
    rate=st.floats(0.01, 1),
)
def test_a_step_takes_at_least_its_compute_and_its_wire(
    mbit: float, size_mb: float, compute_s: float, buckets: int, rate: float
) -> None:
    job, cost = work(size_mb, compute_s, buckets), CodecCost(rate, 1e-9, 1e-9)
    total = sum(bucket.size_bytes for bucket in job.buckets)
    step_s = coded_step_s(job, link(mbit), cost)
    assert coded_step_s(job, link(mbit), EXACT) == pytest.approx(all_reduce_step_s(job, link(mbit)))
    assert step_s >= (compute_s + 2e-9 * total) * (1 - 1e-9)
    assert step_s >= 2 * link(mbit).beta_s * rate * total
    assert step_s >= coded_step_s(job, link(mbit), CodecCost(rate, 0.5e-9, 0.5e-9)) - 1e-12
    assert step_s >= coded_step_s(job, link(mbit), CodecCost(rate / 2, 1e-9, 1e-9)) - 1e-12


@pytest.mark.parametrize(
    ("mbit", "choice"), [(100_000, EXACT), (330, HALF), (150, INT8), (20, SPARSE)]
)
def test_the_weakest_codec_that_hides_the_exchange_is_chosen(
    mbit: float, choice: CodecCost
) -> None:
    place, predicted = weakest_codec(work(), link(mbit), COSTS)
    assert COSTS[place] == choice
    assert predicted[place] <= 1.02 * min(predicted)
    assert all(step_s > 1.02 * min(predicted) for step_s in predicted[:place])
    with pytest.raises(ValueError, match="expected at least one codec"):
        weakest_codec(work(), link(100), ())


@pytest.mark.parametrize(
    ("codec", "least", "most"),
    [
        (Half(), 0.5, 0.5),
        (Int8(), 0.253, 0.255),
        (Int4(), 0.132, 0.135),
        (SIDCo(0.01), 0.019, 0.026),
    ],
)
def test_costs_have_the_rate_of_the_codec(
    codec: Half | Int4 | Int8 | SIDCo, least: float, most: float
) -> None:
    assert least <= cost_of(codec, 2).rate <= most
    both = cost_of((codec, Half()), 4)
    assert both.rate == pytest.approx((cost_of(codec, 4).rate + 0.5) / 2)
    # With more ranks a rank encodes more of its own gradient and less of the mean.
    assert cost_of(codec, 4).hook_s > cost_of(codec, 3).hook_s > 0
    in_one_hop, in_two = cost_of(codec, 2), cost_of((codec, SIDCo(0.2)), 2)
    assert in_one_hop.hook_s == pytest.approx(2 * in_two.hook_s)
    table = PerPair.by_node([0, 0, 1, 1], far=codec)
    assert cost_of(codec, 4).rate < cost_of((table, codec), 4).rate < 1
    assert cost_of(None, 4) == cost_of(codec, 1) == EXACT


def test_with_two_levels_a_codec_costs_less_and_shortens_only_the_way_between_nodes() -> None:
    """Each of a node's ranks codes its column, on another thread."""
    flat, levels = cost_of(Int8(), 2), cost_of(Int8(), 8, ranks_inside=4)
    assert levels.rate == flat.rate
    assert levels.hook_s == 0.0
    assert levels.worker_s == pytest.approx((flat.hook_s + flat.worker_s) / 4)
    half, slow = CodecCost(0.5, 0.0, 0.0), LinkModel(0.0, 8e-8)
    exact_s = coded_step_s(work(), slow, EXACT)
    assert coded_step_s(work(), replace(slow, inside_s=8e-8), half) == exact_s
    between_s = coded_step_s(work(), replace(slow, inside_s=4e-8), half)
    assert coded_step_s(work(), slow, half) < between_s < exact_s


def test_records_become_a_workload_of_medians() -> None:
    records = StepRecords()
    records.add([(400, 11.0)], None)  # nobody knows when it began
    assert workload_of_records(records.steps) is None
    for late_s in (0.0, 0.1, 0.5):
        records.add([(100, 11.0 + late_s), (300, 12.0 + late_s)], 10.0)
    made = workload_of_records(records.steps)
    assert made is not None
    assert [bucket.size_bytes for bucket in made.buckets] == [100, 300]
    assert [bucket.ready_s for bucket in made.buckets] == pytest.approx([1.1, 2.1])
    assert made.compute_s == pytest.approx(2.1)
    records.add(
        [(100, 9.0), (300, 9.5), (100, 10.0)], 8.0
    )  # other buckets: the former ones are forgotten
    assert [len(record) for record in records.steps] == [3]


def layer(name: str, dim: int, gradient_bytes: int = 0) -> LayerCost:
    return LayerCost(name, 1, dim, 1, gradient_bytes)


@given(dim=st.integers(1, 500), world_size=st.integers(2, 9))
def test_columns_travel_where_those_of_all_ranks_are_fewer_numbers(
    dim: int, world_size: int
) -> None:
    most = most_columns(dim, world_size)
    assert world_size * most * dim < dim * (dim + 1) / 2 <= world_size * (most + 1) * dim
    assert most_columns(dim, 1) == 0


@given(data=st.data(), dims=st.lists(st.integers(1, 3), min_size=1, max_size=12))
def test_names_break_ties_so_order_of_layers_does_not_matter(
    data: st.DataObject, dims: list[int]
) -> None:
    layers = [layer(f"l{number:02}", dim) for number, dim in enumerate(dims)]
    shuffled = data.draw(st.permutations(layers))
    one, other = place(layers, 3, 1), place(shuffled, 3, 1)
    assert dict(zip(layers, one, strict=True)) == dict(zip(shuffled, other, strict=True))


def test_what_every_step_costs_counts_the_more_the_rarer_inversions_are() -> None:
    layers = [layer("a", 3000), layer("b", 2500), layer("wide", 1, gradient_bytes=10**7)]
    assert place(layers, 2, 1) == (0, 1, 1)
    assert place(layers, 2, 100) == (1, 1, 0)


@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=20), st.integers(1, 40), st.integers(1, 40)
)
def test_buckets_are_expected_to_be_filled_from_the_back(
    sizes: list[int], cap: int, first: int
) -> None:
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
def test_a_layer_is_spread_where_that_costs_less(
    dims: Any, ranks: int, every: int, spread: bool
) -> None:
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
def test_no_rank_has_more_than_the_mean_and_a_part_of_one(
    costs: list[int], world_size: int
) -> None:
    made, loads = assign(costs, world_size), [0] * world_size
    for cost, owner in zip(costs, made.owners, strict=True):
        loads[owner] += cost
    assert [*made.loads] == loads
    assert world_size * max(loads) <= sum(costs) + max(costs, default=0) * (world_size - 1)

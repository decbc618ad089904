"""The cost model against what is known of it, and which codec is chosen by it."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossover_ddp._compression.planning import cost_of, workload_of_records
from crossover_ddp._engine.buckets import StepRecords
from crossover_ddp._tuning.model import (
    EXACT,
    BucketTimes,
    CodecCost,
    Link,
    Workload,
    all_reduce_step_s,
    coded_step_s,
    decoupled_step_s,
    weakest_codec,
)
from crossover_ddp.codecs import Half, Int8, PerPair, SIDCo

MODEL_BYTES = 1_200_000


def even(
    buckets: int, *, forward_s: float = 1 / 3, backward_s: float = 2 / 3, size_bytes: float = MODEL_BYTES
) -> Workload:
    """Equal buckets, ready and needed at even distances."""
    times = [
        BucketTimes(
            round(size_bytes / buckets),
            backward_s * (place + 1) / buckets,
            forward_s * (buckets - 1 - place) / buckets,
        )
        for place in range(buckets)
    ]
    return Workload(forward_s, backward_s, tuple(times))


def link_of(wire_s: float, alpha_s: float = 0.0) -> Link:
    """A link on which both halves of the model take ``wire_s``."""
    return Link(alpha_s, wire_s / 2 / MODEL_BYTES)


# Fluid simulation of shared/algorithms.md, section 2: parts of the wire's limit, by the number of buckets.
@pytest.mark.parametrize(
    ("buckets", "least", "most"), [(6, 0.81, 0.93), (12, 0.89, 0.965), (24, 0.93, 0.985)]
)
@pytest.mark.parametrize("ratio", [0.5, 0.75, 1.0, 1.25, 1.5, 2.0])
def test_decoupled_comes_as_near_to_the_wires_limit_as_is_known(
    buckets: int, least: float, most: float, ratio: float
) -> None:
    part = max(1.0, ratio) / decoupled_step_s(even(buckets), link_of(ratio))
    assert least <= part <= most


@pytest.mark.parametrize(
    ("ratio", "least", "most"), [(0.5, 0.99, 1.01), (1.0, 1.24, 1.30), (2.0, 1.13, 1.17)]
)
def test_speed_up_over_all_reduce_is_what_is_known(ratio: float, least: float, most: float) -> None:
    work, link = even(12), link_of(ratio)
    assert least <= all_reduce_step_s(work, link) / decoupled_step_s(work, link) <= most


def test_nothing_is_gained_where_the_last_bucket_holds_almost_everything() -> None:
    work = Workload(1 / 3, 2 / 3, (BucketTimes(1000, 0.3, 0.2), BucketTimes(999_000, 2 / 3, 0.0)))
    link = link_of(0.75)
    assert decoupled_step_s(work, link) == pytest.approx(all_reduce_step_s(work, link), rel=0.01)


times = st.floats(0.0, 1.0)
workloads = st.builds(
    lambda forward_s, backward_s, parts: Workload(
        forward_s,
        backward_s,
        tuple(
            BucketTimes(size, backward_s * ready, forward_s * needed)
            for size, ready, needed in sorted(parts, key=lambda part: part[1])
        ),
    ),
    st.floats(0.01, 1.0),
    st.floats(0.01, 1.0),
    st.lists(st.tuples(st.integers(1, 10**7), times, times), min_size=1, max_size=12),
)
links = st.builds(Link, st.floats(0.0, 0.01), st.floats(0.0, 1e-6))


@given(work=workloads, link=links)
def test_a_step_takes_its_compute_or_its_wire_time_at_least_and_both_at_most(
    work: Workload, link: Link
) -> None:
    wire = 2 * sum(link.half_s(bucket.size_bytes) for bucket in work.buckets)
    limit_s, decoupled_s = max(work.compute_s, wire), decoupled_step_s(work, link)
    assert decoupled_s >= limit_s * (1 - 1e-6) or math.isclose(decoupled_s, limit_s, rel_tol=0.05)
    assert all_reduce_step_s(work, link) >= max(work.compute_s, work.forward_s + wire) * (1 - 1e-9)
    assert max(decoupled_s, all_reduce_step_s(work, link)) <= (work.compute_s + wire) * (1 + 1e-9)


def test_a_link_is_fitted_to_what_was_measured() -> None:
    link = Link.fitted((size, 0.002 + 1e-8 * size) for size in (10_000, 100_000, 1_000_000))
    assert link.alpha_s == pytest.approx(0.002)
    assert link.beta_s == pytest.approx(1e-8)


@given(
    st.lists(st.tuples(st.integers(1, 10**8), st.floats(0, 1)), min_size=2, unique_by=lambda point: point[0])
)
def test_a_fitted_link_never_pays_back(points: list[tuple[float, float]]) -> None:
    link = Link.fitted(points)
    assert link.alpha_s >= 0
    assert link.beta_s >= 0


# --- codecs -----------------------------------------------------------------------------------------------------------


HALF = CodecCost(0.5, 0.1e-9, 0.2e-9)
INT8 = CodecCost(0.254, 0.3e-9, 0.6e-9)
SPARSE = CodecCost(0.02, 0.6e-9, 0.8e-9)
COSTS = (EXACT, HALF, INT8, SPARSE)


def work(size_mb: float = 8.0, compute_s: float = 0.3, buckets: int = 8) -> Workload:
    return even(buckets, forward_s=0.0, backward_s=compute_s, size_bytes=size_mb * 1e6)


def link(mbit: float) -> Link:
    """Return a link of two ranks: half of the bytes in each direction and half."""
    return Link(0.0, 8 / (mbit * 1e6) / 2)


def test_without_a_codec_the_prediction_is_that_of_the_exchange() -> None:
    assert coded_step_s(work(), link(200), EXACT) == pytest.approx(all_reduce_step_s(work(), link(200)))


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
    assert step_s >= (compute_s + 2e-9 * total) * (1 - 1e-9)
    assert step_s >= 2 * link(mbit).beta_s * rate * total
    assert step_s >= coded_step_s(job, link(mbit), CodecCost(rate, 0.5e-9, 0.5e-9)) - 1e-12
    assert step_s >= coded_step_s(job, link(mbit), CodecCost(rate / 2, 1e-9, 1e-9)) - 1e-12


@pytest.mark.parametrize(("mbit", "choice"), [(100_000, EXACT), (330, HALF), (150, INT8), (20, SPARSE)])
def test_the_weakest_codec_that_hides_the_exchange_is_chosen(mbit: float, choice: CodecCost) -> None:
    place, predicted = weakest_codec(work(), link(mbit), COSTS)
    assert COSTS[place] == choice
    assert predicted[place] <= 1.02 * min(predicted)
    assert all(step_s > 1.02 * min(predicted) for step_s in predicted[:place])
    with pytest.raises(ValueError, match="expected at least one codec"):
        weakest_codec(work(), link(100), ())


@pytest.mark.parametrize(
    ("codec", "least", "most"), [(Half(), 0.5, 0.5), (Int8(), 0.253, 0.255), (SIDCo(0.01), 0.019, 0.026)]
)
def test_costs_have_the_rate_of_the_codec(codec: Half | Int8 | SIDCo, least: float, most: float) -> None:
    assert least <= cost_of(codec, 2).rate <= most
    both = cost_of((codec, Half()), 4)
    assert both.rate == pytest.approx((cost_of(codec, 4).rate + 0.5) / 2)
    # With more ranks a rank encodes more of its own gradient and less of the mean.
    assert cost_of(codec, 4).hook_s > cost_of(codec, 2).hook_s > 0
    table = PerPair.by_node([0, 0, 1, 1], far=codec)
    assert cost_of(codec, 4).rate < cost_of((table, codec), 4).rate < 1
    assert cost_of(None, 2) == cost_of(codec, 1) == EXACT


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
    records.add([(100, 9.0), (300, 9.5), (100, 10.0)], 8.0)  # other buckets: the former ones are forgotten
    assert [len(record) for record in records.steps] == [3]

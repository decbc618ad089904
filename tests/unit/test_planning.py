"""The cost model against what is known of it."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossover_ddp._tuning.model import (
    BucketTimes,
    Link,
    Workload,
    all_reduce_step_s,
    decoupled_step_s,
)

MODEL_BYTES = 1_200_000


def even(buckets: int, *, forward_s: float = 1 / 3, backward_s: float = 2 / 3) -> Workload:
    """Equal buckets, ready and needed at even distances."""
    return Workload(
        forward_s,
        backward_s,
        tuple(
            BucketTimes(
                MODEL_BYTES // buckets,
                backward_s * (place + 1) / buckets,
                forward_s * (buckets - 1 - place) / buckets,
            )
            for place in range(buckets)
        ),
    )


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
            BucketTimes(size, backward_s * ready, forward_s * needed, update_s)
            for size, ready, needed, update_s in sorted(parts, key=lambda part: part[1])
        ),
    ),
    st.floats(0.01, 1.0),
    st.floats(0.01, 1.0),
    st.lists(st.tuples(st.integers(1, 10**7), times, times, st.floats(0.0, 0.01)), min_size=1, max_size=12),
)
links = st.builds(Link, st.floats(0.0, 0.01), st.floats(0.0, 1e-6))


def wire_s(work: Workload, link: Link) -> float:
    """Seconds of the whole exchange, both halves."""
    return 2 * sum(link.half_s(bucket.size_bytes) for bucket in work.buckets)


@given(work=workloads, link=links)
def test_no_step_is_shorter_than_its_compute_or_its_wire_time(work: Workload, link: Link) -> None:
    limit_s = max(work.compute_s, wire_s(work, link))
    assert decoupled_step_s(work, link) >= limit_s * (1 - 1e-6) or math.isclose(
        decoupled_step_s(work, link), limit_s, rel_tol=0.05
    )
    assert all_reduce_step_s(work, link) >= max(work.compute_s, work.forward_s + wire_s(work, link)) * (
        1 - 1e-9
    )


@given(work=workloads, link=links)
def test_everything_one_after_the_other_is_the_longest(work: Workload, link: Link) -> None:
    longest_s = (work.compute_s + wire_s(work, link)) * (1 + 1e-9)
    assert decoupled_step_s(work, link) <= longest_s
    assert all_reduce_step_s(work, link) <= longest_s


@given(work=workloads, cap=st.floats(1, 1e8))
def test_joining_keeps_what_there_is(work: Workload, cap: float) -> None:
    merged = work.cut(work.borders(cap))
    assert sum(b.size_bytes for b in merged.buckets) == sum(b.size_bytes for b in work.buckets)
    assert merged.update_s == pytest.approx(work.update_s)
    assert max(b.ready_s for b in merged.buckets) == max(b.ready_s for b in work.buckets)
    assert all(b.size_bytes >= cap for b in merged.buckets[:-1])


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


def test_a_fit_needs_two_sizes() -> None:
    with pytest.raises(ValueError, match="measure another size"):
        Link.fitted([(5, 1.0), (5, 2.0)])

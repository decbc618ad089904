"""C, N, M and the link out of timelines whose truth is known, and what is refused."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossover_ddp._planning import all_reduce_step_s
from crossover_ddp.cli.advise.step_figures import (
    DECOUPLED,
    SPLIT,
    THE_LINE,
    WRAPPED,
    NotMeasurableError,
    _shares,
    figures,
    workload,
)
from tests.unit.cli.made_up_steps import STEPS, decoupled_rank, span, split_rank

READY_S = (0.4, 0.6, 0.8, 1.0)
SIZES = (1000, 3000, 2000, 8000)
LINK = {"compute_s": 1.0, "alpha_s": 0.002, "beta_s": 2e-5}
# The first bucket has ended when the second is ready, and so on: only the last one is exposed.
WIRE_S = 2 * sum(0.002 + 2e-5 * size for size in SIZES)
EXPOSED_S = 2 * (0.002 + 2e-5 * 8000)


def test_a_known_job_is_found_as_it_is() -> None:
    rank = split_rank(READY_S, SIZES, **LINK)
    found = figures({0: rank, 1: rank})
    assert found.hook == SPLIT
    assert (found.ranks, found.steps, found.skipped) == ((0, 1), STEPS - 4, 3)
    assert found.compute_s == pytest.approx(1.0)
    assert found.exposed_s == pytest.approx(EXPOSED_S)
    assert found.wire_s == pytest.approx(WIRE_S)
    assert found.lag_s == pytest.approx(0.0, abs=1e-9)
    assert found.alpha_known
    assert found.link is not None
    assert (found.link.alpha_s, found.link.beta_s) == pytest.approx((0.002, 2e-5))
    assert [bucket.ready_s for bucket in found.buckets] == pytest.approx(READY_S)


def test_the_cost_model_gives_the_step_as_it_was() -> None:
    found = figures({0: split_rank(READY_S, SIZES, **LINK)} | {1: split_rank(READY_S, SIZES, **LINK)})
    assert found.link is not None
    assert all_reduce_step_s(workload(found), found.link) == pytest.approx(found.step_s)


def test_waiting_for_a_late_peer_is_no_time_of_the_wire() -> None:
    late_s = 0.1
    early = split_rank(READY_S, SIZES, peer_late_s=late_s, **LINK)
    slow = split_rank(
        [each + late_s for each in READY_S], SIZES, **{**LINK, "compute_s": LINK["compute_s"] + late_s}
    )
    found = figures({0: early, 1: slow})
    assert found.wire_s == pytest.approx(WIRE_S)
    assert found.compute_s == pytest.approx(1.0 + late_s)
    assert found.exposed_s == pytest.approx(EXPOSED_S)
    assert found.lag_s == pytest.approx(late_s)


def test_time_shared_on_the_wire_counts_once() -> None:
    assert _shares([(0.0, 2.0, 0), (1.0, 3.0, 1), (5.0, 6.0, 1)], 2) == pytest.approx([1.5, 2.5])


def test_waiting_for_a_turn_is_neither_compute_nor_communication() -> None:
    rank = split_rank(READY_S, SIZES, wait_s=0.7, **LINK)
    found = figures({0: rank, 1: rank})
    assert (found.step_s, found.waited_s) == pytest.approx((1.0 + EXPOSED_S, 0.7))


def test_steps_with_other_buckets_do_not_count() -> None:
    rank = split_rank(READY_S, SIZES, first_shape=[sum(SIZES)], **LINK)
    found = figures({0: rank[12:], 1: rank[12:]})
    assert len(found.buckets) == len(SIZES)
    assert found.exposed_s == pytest.approx(EXPOSED_S)


def test_equal_sizes_do_not_tell_start_up_from_rate() -> None:
    rank = split_rank(READY_S, (2000,) * 4, **LINK)
    found = figures({0: rank, 1: rank})
    assert found.link is not None
    assert not found.alpha_known
    assert found.link.alpha_s == 0
    assert 2 * sum(found.link.half_s(size) for size in (2000,) * 4) == pytest.approx(found.wire_s)


def test_times_that_sizes_do_not_explain_tell_no_start_up() -> None:
    rank = split_rank(READY_S, (1000, 3000, 2000, 2500), **LINK)
    assert figures({0: rank, 1: rank}).alpha_known
    uneven = [
        replace(each, end_s=each.end_s + 0.05) if each.detail.get("bucket") == 1 else each for each in rank
    ]
    found = figures({0: uneven, 1: uneven})
    assert not found.alpha_known
    assert found.link is not None
    assert found.link.alpha_s == 0


def test_decoupled_stalls_are_exposed_communication() -> None:
    rank = decoupled_rank(compute_s=1.0, stall_s=0.25, wire_s=0.5)
    found = figures({0: rank, 1: rank})
    assert found.hook == DECOUPLED
    assert (found.compute_s, found.exposed_s, found.wire_s) == pytest.approx((1.0, 0.25, 0.5))
    assert found.buckets[0].ready_s == pytest.approx(1.0)


def test_a_wrapped_hook_tells_compute_and_exposed_only() -> None:
    rank = [
        each for each in split_rank(READY_S, SIZES, **LINK) if each.kind in ("compute", "exchange", "wait")
    ]
    found = figures({0: rank, 1: rank})
    assert (found.hook, found.wire_s, found.buckets) == (WRAPPED, None, ())
    assert found.exposed_s == pytest.approx(EXPOSED_S)


def test_a_large_gradient_is_not_cut() -> None:
    rank = split_rank(READY_S, SIZES, **LINK)
    found = figures({0: rank, 1: rank})
    fine = workload(found, pieces=20)
    assert sum(bucket.size_bytes for bucket in fine.buckets) == sum(SIZES)
    assert max(bucket.size_bytes for bucket in fine.buckets) == 8000 // 4
    ready_s = [bucket.ready_s for bucket in fine.buckets]
    assert ready_s == sorted(ready_s)
    assert len(workload(found).buckets) == len(SIZES)


def test_an_empty_recording_names_the_line_to_add() -> None:
    with pytest.raises(NotMeasurableError, match="got none") as caught:
        figures({})
    assert THE_LINE in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device_type": "cuda"}, "expected a job on CPU devices"),
        ({"owner": 1}, "got K-FAC's"),
        ({"owner": 1, "bucket": -1}, "got replicas that are averaged now and then"),
        ({"sent_bytes": 25, "exact_bytes": 100}, "measure with codec=None"),
    ],
)
def test_what_would_mislead_is_refused(change: dict[str, object], message: str) -> None:
    rank = [
        replace(each, detail={**each.detail, **change}) if each.kind == "all_gather" else each
        for each in split_rank(READY_S, SIZES, **LINK)
    ]
    with pytest.raises(NotMeasurableError, match=message):
        figures({0: rank, 1: rank})


def test_a_recording_of_an_earlier_version_is_refused() -> None:
    old = [
        replace(each, detail={name: value for name, value in each.detail.items() if name != "ready_s"})
        for each in split_rank(READY_S, SIZES, **LINK)
    ]
    with pytest.raises(NotMeasurableError, match="earlier version"):
        figures({0: old, 1: old})


def test_one_rank_exchanges_nothing() -> None:
    with pytest.raises(NotMeasurableError, match="one rank"):
        figures({0: [span("compute", k, k + 1) for k in range(20)]})


def test_too_few_steps_are_refused() -> None:
    rank = split_rank(READY_S, SIZES, steps=8, **LINK)
    with pytest.raises(NotMeasurableError, match="got 4 of 7 recorded"):
        figures({0: rank, 1: rank})


@given(
    ready=st.lists(st.floats(0.01, 1.0), min_size=1, max_size=6),
    sizes=st.lists(st.integers(1, 10**6), min_size=6, max_size=6),
    alpha_s=st.floats(0.0, 0.01),
    beta_s=st.floats(1e-9, 1e-6),
    late_s=st.floats(0.0, 0.2),
)
def test_whatever_the_job_its_parts_add_up(
    ready: list[float], sizes: list[int], alpha_s: float, beta_s: float, late_s: float
) -> None:
    ready_s = [*sorted(ready)[:-1], 1.0]
    used = sizes[: len(ready_s)]
    link = {"compute_s": 1.0, "alpha_s": alpha_s, "beta_s": beta_s}
    rank = split_rank(ready_s, used, **link)
    found = figures({0: rank, 1: split_rank(ready_s, used, origin_s=7.0, peer_late_s=late_s, **link)})
    assert found.wire_s is not None
    assert found.wire_s == pytest.approx(2 * sum(alpha_s + beta_s * size for size in used))
    assert found.compute_s + found.exposed_s == pytest.approx(found.step_s)
    assert found.exposed_s >= 0

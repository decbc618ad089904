"""Shares of devices' time and hand-overs, worked out from made-up spans."""

import pytest
from hypothesis import given

from lab.spans import Statistics, TimelineSpan, handovers_s, occupancy
from tests.recipes.made_up_spans import intervals, span


def test_statistics() -> None:
    assert Statistics.of([]) == Statistics(0, 0.0, 0.0, 0.0, 0.0)
    summary = Statistics.of([float(number) for number in range(1, 101)])
    assert (summary.count, summary.median_s, summary.p99_s, summary.max_s) == (100, 50.5, 99.0, 100.0)
    assert summary.total_s == 5050


def test_a_handover_counts_only_when_the_job_had_to_wait_for_the_sibling() -> None:
    given_back = span("b", "compute", 0.0, 2.0)
    elsewhere = span("b", "compute", 0.0, 2.4, rank=1)
    waited = span("a", "wait", 1.0, 2.1)
    assert handovers_s([given_back, elsewhere, waited], "a") == [pytest.approx(0.1)]
    late = span("a", "wait", 2.05, 2.1)  # the device was free already
    assert handovers_s([given_back, late], "a") == []
    assert handovers_s([given_back, waited], "b") == []


def test_occupancy() -> None:
    spans = [
        span("a", "compute", 0, 4),
        span("b", "compute", 3, 6),
        span("a", "exchange", 4, 10),
        span("b", "exchange", 6, 9),
        span("b", "exchange", 2, 3),
    ]
    # Both are active from 2 to 9.
    shares = occupancy(spans, "device0")
    assert shares == pytest.approx({"idle": 3 / 7, "one": 3 / 7, "several": 1 / 7})
    assert occupancy(spans, "device0", window_s=(0, 2)) == pytest.approx({"idle": 0, "one": 1, "several": 0})
    assert occupancy(spans, "device9") == {"idle": 1.0, "one": 0.0, "several": 0.0}


@given(intervals)
def test_shares_add_up(spans: list[TimelineSpan]) -> None:
    shares = occupancy(spans, "device0", window_s=(5, 20))
    assert sum(shares.values()) == pytest.approx(1)
    assert all(-1e-9 <= share <= 1 + 1e-9 for share in shares.values())


@given(intervals)
def test_shares_are_of_who_computes_in_each_second(spans: list[TimelineSpan]) -> None:
    shares = occupancy(spans, "device0", window_s=(5, 20))
    computing = [
        {each.job for each in spans if each.kind == "compute" and each.begin_s <= second < each.end_s}
        for second in range(5, 20)
    ]
    counted = [sum(min(2, len(jobs)) == many for jobs in computing) / 15 for many in range(3)]
    assert shares == pytest.approx(dict(zip(("idle", "one", "several"), counted, strict=True)))


def test_ranks_of_one_job_on_one_device_are_not_several_jobs() -> None:
    ranks = [TimelineSpan("a", rank, "gpu", "compute", 0, 4) for rank in (0, 1)]
    assert occupancy(ranks, "gpu") == {"idle": 0.0, "one": 1.0, "several": 0.0}


def test_a_long_run_without_siblings_is_quick() -> None:
    """Quadratic work in it would take minutes, and the test's time limit is one."""
    alone = [each for turn in range(20_000) for each in _turn("a", float(turn))]
    assert handovers_s([span("b", "compute", 0.0, 0.5), *alone], "a") == []


def _turn(job: str, begin_s: float) -> list[TimelineSpan]:
    return [span(job, "compute", begin_s + 1, begin_s + 1.5), span(job, "wait", begin_s + 1.9, begin_s + 2)]

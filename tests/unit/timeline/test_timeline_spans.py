"""Shares of devices' time and hand-overs, worked out from made-up spans."""

import pytest
from hypothesis import given

from crossover_ddp._timeline.spans import (
    NextComputation,
    Statistics,
    TimelineSpan,
    device_shares,
    extent_s,
    handovers,
    handovers_s,
    occupancy,
    slices,
)
from tests.unit.timeline.made_up_spans import intervals, siblings, span


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
def test_slices_hold_exactly_who_is_active(spans: list[TimelineSpan]) -> None:
    cut = list(slices((each.begin_s, each.end_s, (each.job, each.kind)) for each in spans))
    assert all(begin_s < end_s for begin_s, end_s, _ in cut)
    for moment in (half + 0.5 for half in range(40)):
        active = {(s.job, s.kind) for s in spans if s.begin_s < moment < s.end_s}
        found = [set(keys) for begin_s, end_s, keys in cut if begin_s < moment < end_s]
        assert found == ([active] if active else [])


def test_ranks_of_one_job_on_one_device_are_not_several_jobs() -> None:
    ranks = [TimelineSpan("a", rank, "gpu", "compute", 0, 4) for rank in (0, 1)]
    assert occupancy(ranks, "gpu") == {"idle": 0.0, "one": 1.0, "several": 0.0}


def test_shares_of_devices_and_jobs() -> None:
    spans = siblings(10)
    first, second = device_shares(spans, ["b", "a"])
    assert (first.device, second.device) == ("device0", "device1")
    assert first.window_s == (1.0, 20.0)  # from b's first span to a's last
    assert first.busy == pytest.approx(0.999, abs=1e-3)
    assert first.several == 0
    assert first.turns == 19
    assert first.communicated == pytest.approx(0.5, abs=0.03)
    b, a = first.jobs
    assert (b.job, a.job, a.ranks, b.turns, a.turns) == ("b", "a", [0], 10, 9)
    assert a.computed + b.computed == pytest.approx(first.busy)
    assert a.waited == pytest.approx(0.25, abs=0.03)
    assert a.handover.median_s == pytest.approx(0.001)
    assert first.handover.count == a.handover.count + b.handover.count


def test_the_rate_is_that_of_the_coded_halves_in_the_window() -> None:
    sent = [(0, 100, 100), (4, 25, 100), (6, 75, 300)]
    spans = [
        TimelineSpan("a", 0, "gpu", "all_gather", at_s, at_s + 1, {"sent_bytes": coded, "exact_bytes": exact})
        for at_s, coded, exact in sent
    ]
    plain = TimelineSpan("b", 0, "gpu", "all_gather", 4, 5, {"bytes": 1000})
    (device,) = device_shares([*spans, plain], ["a", "b"], window_s=(3, 8))
    assert [job.rate for job in device.jobs] == [0.25, None]


def test_a_chosen_window_shows_only_what_is_in_it() -> None:
    (device,) = device_shares([span("a", "compute", 0, 4), span("b", "compute", 6, 9)], "ab", window_s=(3, 5))
    assert (device.busy, device.idle) == (0.5, 0.5)
    assert [job.job for job in device.jobs] == ["a"]
    assert device.turns == 0  # it began before


def test_jobs_that_were_never_active_at_once_share_all_the_time() -> None:
    (device,) = device_shares([span("a", "compute", 0, 4), span("b", "compute", 6, 10)], "ab")
    assert device.window_s == (0, 10)
    assert device.idle == pytest.approx(0.2)


def test_a_handover_says_who_gave_and_who_took() -> None:
    spans = siblings(2, ranks=1)
    found = handovers(spans)
    assert [(each.giver.job, each.taker.job) for each in found] == [("b", "a"), ("a", "b"), ("b", "a")]
    begun = [NextComputation(spans).after(each.taker) for each in found]
    assert [each and each.begin_s for each in begun] == [2.0, 3.0, None]  # the last wait was for nothing


def test_a_long_run_without_siblings_is_quick() -> None:
    """Quadratic work in it would take minutes, and the test's time limit is one."""
    alone = [each for turn in range(20_000) for each in _turn("a", float(turn))]
    assert handovers([span("b", "compute", 0.0, 0.5), *alone]) == []


def _turn(job: str, begin_s: float) -> list[TimelineSpan]:
    return [span(job, "compute", begin_s + 1, begin_s + 1.5), span(job, "wait", begin_s + 1.9, begin_s + 2)]


def test_extent() -> None:
    assert extent_s([]) == (0.0, 0.0)
    assert extent_s([span("a", "compute", 3, 9), span("b", "wait", 4, 7)]) == (3, 9)

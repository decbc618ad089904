"""The picture: its rectangles, its window, and that it is drawn."""

import itertools
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab import picture as timeline_picture
from lab.spans import TimelineSpan
from tests.recipes.made_up_spans import intervals, siblings


@given(intervals, st.booleans())
def test_bars_cover_exactly_what_happened_and_never_overlap(spans: list[TimelineSpan], network: bool) -> None:
    bars = timeline_picture.lane_bars(spans, "abc", network=network)
    kinds = {"exchange", "wait"} if network else {"compute"}
    for moment in (half + 0.5 for half in range(40)):
        here = sorted((b for b in bars if b.begin_s < moment < b.end_s), key=lambda bar: bar.bottom)
        active = {s.job for s in spans if s.kind in kinds and s.begin_s < moment < s.end_s}
        assert [bar.job for bar in here] == sorted(active)
        assert sum(bar.height for bar in here) == pytest.approx(1 if active else 0)
        for below, above in itertools.pairwise(here):
            assert above.bottom == pytest.approx(below.bottom + below.height)
        communicating = {s.job for s in spans if s.kind == "exchange" and s.begin_s < moment < s.end_s}
        assert all(bar.waiting == (network and bar.job not in communicating) for bar in here)


@pytest.mark.parametrize("window_s", [(5.0, 5.0), (9.0, 2.0)])
def test_an_empty_window_is_refused(window_s: tuple[float, float], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected a window that ends after it begins"):
        timeline_picture.draw(siblings(), tmp_path / "x.png", window_s=window_s)
    with pytest.raises(ValueError, match="expected spans, got none"):
        timeline_picture.draw([], tmp_path / "x.png")


def test_the_middle_of_a_long_run_is_shown() -> None:
    begin_s, end_s = timeline_picture.middle_window(siblings(100), steps=8)
    assert (begin_s, end_s) == (92.0, 108.0)
    assert timeline_picture.middle_window(siblings(3), steps=8) == (0.0, 7.0)


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [((None, 4.0), (10.0, 14.0)), ((6.0, None), (16.0, 31.0)), ((1.0, 2.0), (11.0, 12.0))],
)
def test_a_window_counts_from_the_first_span(
    chosen: timeline_picture.Window, expected: tuple[float, float]
) -> None:
    shifted = [TimelineSpan(s.job, 0, s.device, s.kind, s.begin_s + 10, s.end_s + 10) for s in siblings(10)]
    assert timeline_picture.window_of(shifted, chosen) == expected
    assert timeline_picture.window_of(shifted, (None, None)) != (10.0, 31.0)


def test_names_shares_and_visible_jobs_are_written_in_the_picture(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "x.svg"
    late = [TimelineSpan("late", 0, "device0", "compute", 100, 101)]
    spans = [*siblings(10), *late]
    timeline_picture.draw(
        spans, path, title="title", window_s=(2, 9), hosts={"device0": "h0", "device1": "device1"}
    )
    written = "".join(
        path.read_text().split("<!--")[1:]
    )  # matplotlib draws glyphs, and says which in comments
    for text in (
        "device0 on h0",
        "device1 ",
        "job a",
        "job b",
        "waits for its turn",
        "busy 100%",
        "idle 0%",
        "title",
    ):
        assert f" {text}" in written
    assert "job late" not in written
    ElementTree.parse(path)


def test_many_jobs_and_spans_are_drawn(tmp_path: Path) -> None:
    """More jobs than colours, and thousands of spans in one window."""
    jobs = [f"j{number}" for number in range(10)]
    assert len(jobs) > len(timeline_picture.COLOURS) == len(set(timeline_picture.COLOURS))
    spans = [
        TimelineSpan(jobs[turn % 10], 0, "d", kind, turn + after, turn + after + 1)
        for turn in range(2000)
        for kind, after in (("compute", 0), ("exchange", 1), ("wait", 2))
    ]
    path = timeline_picture.draw(spans, tmp_path / "x.png", window_s=(0, None))
    assert path.read_bytes().startswith(b"\x89PNG")

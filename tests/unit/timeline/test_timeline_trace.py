"""The trace: what Perfetto and chrome://tracing need is there, and true."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossover_ddp._timeline.spans import TimelineSpan
from crossover_ddp._timeline.trace import chrome_trace
from tests.unit.timeline.made_up_spans import siblings
from tests.unit.timeline.trace_format import check_format, of_phase

any_spans = st.lists(
    st.builds(
        lambda job, rank, kind, begin_s, length_s: TimelineSpan(
            job, rank, f"device{rank}", kind, begin_s, begin_s + length_s, {"step": 1}
        ),
        st.sampled_from("ab"),
        st.integers(0, 1),
        st.sampled_from(
            ["compute", "exchange", "wait", "reduce_scatter", "all_gather", "of another version"]
        ),
        st.floats(1e6, 1e6 + 20, width=64),
        st.one_of(st.just(0.0), st.floats(0, 5)),
    ),
    max_size=30,
)


@given(any_spans)
def test_every_span_is_there_once_and_nothing_overlaps_in_a_thread(spans: list[TimelineSpan]) -> None:
    # Spans that begin within a float's last digit of each other are told apart by their step alone.
    spans = [replace(span, detail={"step": number}) for number, span in enumerate(spans)]
    trace = chrome_trace(spans, hosts={"device0": "h"}, wall_s=1e9)
    check_format(trace)
    origin_s = min((span.begin_s for span in spans), default=0.0)
    slices = of_phase(trace, "X")
    found = {event["args"]["step"]: event for event in slices}
    assert len(slices) == len(spans) and sorted(found) == list(range(len(spans)))
    for number, span in enumerate(spans):
        event = found[number]
        assert (event["args"]["job"], event["args"]["rank"], event["cat"]) == (span.job, span.rank, span.kind)
        wanted = ((span.begin_s - origin_s) * 1e6, span.length_s * 1e6)
        assert (event["ts"], event["dur"]) == pytest.approx(wanted, abs=2e-3)


def test_names_of_processes_threads_and_slices() -> None:
    detail = {"step": 7, "bucket": 2, "bytes": 4096}
    spans = [
        *siblings(2),
        TimelineSpan("a", 0, "device0", "reduce_scatter", 0.5, 1.2, detail),
        TimelineSpan("a", 0, "device0", "reduce_scatter", 1.0, 1.4, {**detail, "bucket": -1}),
        TimelineSpan("a", 0, "device0", "exchange", 5.0, 5.5, {"step": 7}),
    ]
    trace = chrome_trace(spans, hosts={"device0": "vm", "device1": "device1"}, wall_s=100.0)
    names = {e["args"]["name"] for e in of_phase(trace, "M") if "name" in e["args"]}
    assert {"device0 on vm", "device1", "a · rank 0 · turns", "b · rank 1 · turns"} <= names
    # What overlaps goes on in a second lane.
    assert {"a · rank 0 · reduce-scatter", "a · rank 0 · reduce-scatter 2"} <= names
    slices = {e["name"]: e for e in of_phase(trace, "X")}
    assert slices["reduce-scatter of bucket 2"]["args"] == {"job": "a", "rank": 0, **detail}
    assert "reduce-scatter of factors" in slices
    assert "exchange (step 7)" in slices and "compute" in slices
    assert trace["otherData"] == {"begin_wall_s": 100.0}


def test_arrows_show_every_handover_once() -> None:
    spans = siblings(5)
    trace = chrome_trace(spans)
    check_format(trace)
    # Ten turns on each of two devices: the first two were not waited for.
    arrows = list(zip(of_phase(trace, "s"), of_phase(trace, "f"), strict=True))
    assert len(arrows) == 16
    assert all(end["ts"] - begin["ts"] == pytest.approx(1000, abs=1) for begin, end in arrows)


def test_no_spans_no_events() -> None:
    assert chrome_trace([]) == {"traceEvents": [], "displayTimeUnit": "ms", "otherData": {}}

"""Spans that nobody recorded."""

from hypothesis import strategies as st

from lab.spans import TimelineSpan


def span(job: str, kind: str, begin_s: float, end_s: float, *, rank: int = 0) -> TimelineSpan:
    return TimelineSpan(job, rank, f"device{rank}", kind, begin_s, end_s)


def siblings(turns: int = 10, *, ranks: int = 2) -> list[TimelineSpan]:
    """Two jobs that alternate: 1 s of computation, 0.5 s of exchange, then waiting for the other's end."""
    spans = []
    for turn in range(2 * turns):
        for rank in range(ranks):
            job, begin_s = "ab"[turn % 2], float(turn)
            spans.append(span(job, "compute", begin_s, begin_s + 0.999, rank=rank))
            spans.append(span(job, "exchange", begin_s + 0.999, begin_s + 1.5, rank=rank))
            spans.append(span(job, "wait", begin_s + 1.5, begin_s + 2, rank=rank))
    return sorted(spans, key=lambda each: each.begin_s)


intervals = st.lists(
    st.tuples(
        st.sampled_from("abc"),
        st.sampled_from(["compute", "exchange", "wait"]),
        st.integers(0, 30),
        st.integers(0, 9),
    ),
    max_size=12,
).map(lambda drawn: [span(job, kind, begin, begin + length) for job, kind, begin, length in drawn])

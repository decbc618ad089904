"""Spans as a trace in the Chrome format, for https://ui.perfetto.dev and chrome://tracing. Pure.

A process of the trace is a device, a thread is a lane of one rank of one job: its turns (compute, exchange and wait
follow each other there), and each half of its buckets' exchanges. Spans that overlap in a lane, as spans of several
threads of a rank can, go to a second lane of that name, since the format allows only nesting. Arrows show
hand-overs: from the computation that ended to the one that had waited for it.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from .spans import NextComputation, TimelineSpan, handovers

LANES: Final = {
    "compute": "turns",
    "wait": "turns",
    "exchange": "turns",
    "reduce_scatter": "reduce-scatter",
    "all_gather": "all-gather",
}
_NANOSECONDS: Final = 1_000_000_000

Event = dict[str, Any]


class _Slice(NamedTuple):
    """A span's place in the trace; nanoseconds since its begin."""

    span: TimelineSpan
    pid: int
    tid: int
    begin_ns: int
    end_ns: int


def chrome_trace(
    spans: Iterable[TimelineSpan], *, hosts: Mapping[str, str] | None = None, wall_s: float | None = None
) -> dict[str, Any]:
    """Return the trace as a JSON object; time 0 is the first span's begin.

    Args:
        spans: of all jobs and devices, on one clock.
        hosts: the host of each device, for its name; None leaves it out.
        wall_s: what to add to the spans' times to get seconds since 1970; noted in the trace.
    """
    ordered = sorted(spans, key=lambda span: (span.begin_s, -span.end_s))
    origin_s = ordered[0].begin_s if ordered else 0.0
    pids = {device: pid for pid, device in enumerate(sorted({span.device for span in ordered}), start=1)}
    slices, threads = _slices(ordered, pids, origin_s)
    events = [
        *_process_names(pids, hosts or {}),
        *_thread_names(threads),
        *map(_complete_event, slices),
        *_arrows(slices),
    ]
    notes = {} if wall_s is None else {"begin_wall_s": origin_s + wall_s}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": notes}


def _slices(
    spans: Sequence[TimelineSpan], pids: Mapping[str, int], origin_s: float
) -> tuple[list[_Slice], dict[int, tuple[int, str]]]:
    """Give every span a thread in which no other span overlaps it; also return the threads' devices and names."""
    lanes: dict[tuple[str, str, int, str], list[_Slice]] = defaultdict(list)
    for span in spans:
        begin_ns, end_ns = (round((at_s - origin_s) * _NANOSECONDS) for at_s in (span.begin_s, span.end_s))
        lane = (span.device, span.job, span.rank, LANES.get(span.kind, span.kind))
        lanes[lane].append(_Slice(span, pids[span.device], 0, begin_ns, end_ns))
    slices: list[_Slice] = []
    threads: dict[int, tuple[int, str]] = {}
    for (device, job, rank, name), own in sorted(lanes.items(), key=lambda each: _lane_order(each[0])):
        ends_ns: list[int] = []  # of the last slice in each thread of the lane
        tids: list[int] = []
        for each in own:
            free = next((place for place, end_ns in enumerate(ends_ns) if end_ns <= each.begin_ns), None)
            if free is None:
                free = len(ends_ns)
                ends_ns.append(0)
                tids.append(len(threads) + 1)
                number = f" {free + 1}" if free else ""
                threads[tids[free]] = pids[device], f"{job} · rank {rank} · {name}{number}"
            ends_ns[free] = each.end_ns
            slices.append(each._replace(tid=tids[free]))
    return slices, threads


def _lane_order(lane: tuple[str, str, int, str]) -> tuple[str, str, int, int, str]:
    device, job, rank, name = lane
    known = list(dict.fromkeys(LANES.values()))
    return device, job, rank, known.index(name) if name in known else len(known), name


def _complete_event(each: _Slice) -> Event:
    span = each.span
    return {
        "ph": "X",
        "name": _name(span),
        "cat": span.kind,
        "pid": each.pid,
        "tid": each.tid,
        "ts": each.begin_ns / 1000,
        "dur": (each.end_ns - each.begin_ns) / 1000,
        "args": {"job": span.job, "rank": span.rank, **span.detail},
    }


def _name(span: TimelineSpan) -> str:
    kind = span.kind.replace("_", "-")
    bucket, step = span.detail.get("bucket"), span.detail.get("step")
    if bucket is not None:
        # -1 is what K-FAC sends beside the buckets.
        return f"{kind} of bucket {bucket}" if bucket != -1 else f"{kind} of factors"
    return kind if step is None else f"{kind} (step {step})"


def _process_names(pids: Mapping[str, int], hosts: Mapping[str, str]) -> Iterator[Event]:
    for device, pid in pids.items():
        host = hosts.get(device)
        name = device if host is None or host in device else f"{device} on {host}"
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}


def _thread_names(threads: Mapping[int, tuple[int, str]]) -> Iterator[Event]:
    for tid, (pid, name) in threads.items():
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}


def _arrows(slices: Sequence[_Slice]) -> Iterator[Event]:
    """Draw hand-overs. An arrow is bound to the slices around its ends, so it begins within the giver's."""
    places = {id(each.span): each for each in slices}
    spans = [each.span for each in slices]
    computations = NextComputation(spans)
    for number, handover in enumerate(handovers(spans), start=1):
        begun = computations.after(handover.taker)
        if begun is None:
            continue
        giver, taker = places[id(handover.giver)], places[id(begun)]
        arrow = {"name": "hand-over", "cat": "hand-over", "id": number}
        begin_ns = max(giver.begin_ns, giver.end_ns - 1)
        yield {"ph": "s", "pid": giver.pid, "tid": giver.tid, "ts": begin_ns / 1000, **arrow}
        yield {"ph": "f", "bp": "e", "pid": taker.pid, "tid": taker.tid, "ts": taker.begin_ns / 1000, **arrow}

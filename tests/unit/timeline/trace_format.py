"""What Perfetto and chrome://tracing demand of a trace."""

import itertools
import json
from collections import defaultdict
from typing import Any


def of_phase(trace: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


def check_format(trace: dict[str, Any]) -> None:
    """Assert what the format demands of our events."""
    assert json.loads(json.dumps(trace, allow_nan=False)) == trace
    assert trace["displayTimeUnit"] == "ms"
    named = {(e["pid"], e["tid"]) for e in of_phase(trace, "M") if e["name"] == "thread_name"}
    processes = {e["pid"] for e in of_phase(trace, "M") if e["name"] == "process_name"}
    by_thread: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in of_phase(trace, "X"):
        assert {"name", "cat", "pid", "tid", "ts", "dur", "args"} <= event.keys()
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert event["ts"] >= 0 and event["dur"] >= 0
        assert (event["pid"], event["tid"]) in named and event["pid"] in processes
        by_thread[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for slices in by_thread.values():
        slices.sort()
        for (_, end), (begin, _) in itertools.pairwise(slices):
            assert end <= begin + 1e-4, "slices of one thread overlap"  # rounding: a tenth of a nanosecond
    check_arrows(trace, by_thread)


def check_arrows(trace: dict[str, Any], by_thread: dict[tuple[int, int], list[tuple[float, float]]]) -> None:
    """Assert that both ends of each arrow are bound to a slice, and that it points forward."""
    begins, ends = ({e["id"]: e for e in of_phase(trace, phase)} for phase in "sf")
    assert begins.keys() == ends.keys()
    for number, arrow in begins.items():
        for event in (arrow, ends[number]):
            around = by_thread[event["pid"], event["tid"]]
            assert any(begin <= event["ts"] <= end for begin, end in around)
        assert ends[number]["bp"] == "e"
        assert arrow["ts"] <= ends[number]["ts"]

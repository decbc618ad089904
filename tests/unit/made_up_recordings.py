"""Files that nobody recorded, as `Timeline` would have written them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HEADER: Mapping[str, Any] = {
    "version": 2,
    "job": "j1",
    "rank": 0,
    "world_size": 2,
    "device": "d0",
    "host": "h0",
    "pid": 1,
    "clock": "c0",
    "monotonic_s": 100.0,
    "wall_s": 1000.0,
}


def exchange(begin_s: float, end_s: float, sequence: int, **detail: Any) -> dict[str, Any]:
    both = {"kind": "reduce_scatter", "begin_s": begin_s, "end_s": end_s}
    return {**both, "sequence": sequence, "owned_bytes": 8, **detail}


def write(directory: Path, spans: Sequence[Mapping[str, Any]], *, name: str = "", **header: Any) -> Path:
    """Write a recording as `Timeline` would."""
    directory.mkdir(parents=True, exist_ok=True)
    whole = {**HEADER, **header}
    path = directory / (name or f"rank{whole['rank']}-{whole['pid']}.jsonl")
    path.write_text("".join(json.dumps(line) + "\n" for line in (whole, *spans)))
    return path


def compute(begin_s: float, end_s: float) -> dict[str, Any]:
    return {"kind": "compute", "begin_s": begin_s, "end_s": end_s, "step": 3}


def two_hosts(
    directory: Path, ahead_s: float, *, latency_s: float = 0.001, wall_error_s: float = 5.0
) -> None:
    """Let two ranks exchange; the second one's clock is ahead, and its wall clock wrong."""
    other = {"rank": 1, "device": "d1", "host": "h1", "clock": "c1", "pid": 2}
    moments = [100 + 0.1 * number for number in range(50)]
    spans = [exchange(at, at + 2 * latency_s, number) for number, at in enumerate(moments)]
    write(directory, spans)
    shifted = [
        exchange(at + ahead_s + latency_s, at + ahead_s + 2 * latency_s, number)
        for number, at in enumerate(moments)
    ]
    write(directory, shifted, **other, monotonic_s=100 + ahead_s, wall_s=1000 + wall_error_s)

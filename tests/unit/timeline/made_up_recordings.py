"""Files that nobody recorded, as `Timeline` would have written them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HEADER: Mapping[str, Any] = {
    "version": 2,
    "job": "j1",
    "rank": 0,
    "device": "d0",
    "host": "h0",
    "pid": 1,
    "clock": "c0",
    "monotonic_s": 100.0,
    "wall_s": 1000.0,
}


def write(directory: Path, spans: Sequence[Mapping[str, Any]], *, name: str = "", **header: Any) -> Path:
    """Write a recording as `Timeline` would."""
    directory.mkdir(parents=True, exist_ok=True)
    whole = {**HEADER, **header}
    path = directory / (name or f"rank{whole['rank']}-{whole['pid']}.jsonl")
    path.write_text("".join(json.dumps(line) + "\n" for line in (whole, *spans)))
    return path


def compute(begin_s: float, end_s: float) -> dict[str, Any]:
    return {"kind": "compute", "begin_s": begin_s, "end_s": end_s, "step": 3}

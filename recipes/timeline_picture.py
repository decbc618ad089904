"""Draw who computed and who communicated when, per device, from a run of the lab.

    python recipes/timeline_picture.py runs/x                       a few steps from the middle
    python recipes/timeline_picture.py runs/x --from 12.5 --to 16   seconds since the first span
    python recipes/timeline_picture.py runs/x --trace trace.json    also for Perfetto

The same as `crossover-ddp timeline --picture`, with the lab's own title and place for the picture.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import lab_records
from crossover_ddp._timeline.picture import Window, draw
from crossover_ddp._timeline.trace import chrome_trace


def draw_run(
    directory: Path,
    path: Path | None = None,
    *,
    title: str | None = None,
    window_s: Window = (None, None),
) -> Path:
    """Draw a run of the lab into ``timeline.png`` in its directory, or into ``path``."""
    run = lab_records.load_run(directory)
    rate = f", {run.rate_mbit:g} Mbit/s" if run.rate_mbit else ""
    return draw(
        run.spans,
        path or directory / "timeline.png",
        title=f"{directory.name}: {run.nodes} nodes{rate}" if title is None else title,
        window_s=window_s,
        jobs=run.jobs,
    )


def main() -> None:
    """Draw the run that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("run", type=Path, help="directory of a run of the lab")
    parser.add_argument("--from", dest="begin_s", type=float, help="seconds since the first span")
    parser.add_argument("--to", dest="end_s", type=float, help="seconds since the first span")
    parser.add_argument("--title", help="what is to stand above the picture")
    parser.add_argument("--out", type=Path, help="the PNG to write (default: timeline.png in the run)")
    parser.add_argument("--trace", type=Path, help="write all spans as a Chrome trace, too")
    args = parser.parse_args()
    try:
        if args.trace:
            spans = lab_records.load_run(args.run).spans
            args.trace.write_text(json.dumps(chrome_trace(spans)))
        print(draw_run(args.run, args.out, title=args.title, window_s=(args.begin_s, args.end_s)))
    except (FileNotFoundError, ValueError) as error:
        sys.exit(f"timeline_picture: {error}")


if __name__ == "__main__":
    main()

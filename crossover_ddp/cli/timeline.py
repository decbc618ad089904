"""``crossover-ddp timeline``: merges the ranks' recordings into one trace for Perfetto."""

import argparse
import json
import sys
from pathlib import Path

from crossover_ddp._timeline.trace import events, recordings

from .output import FINE, FOUND, USAGE, declare, say

_EXAMPLES = """\
examples:
  CROSSOVER_TIMELINE=runs/a torchrun … train.py    record a job; each rank's file is a trace
  crossover-ddp timeline runs -o trace.json        merge all ranks, for https://ui.perfetto.dev
exit codes: 0 fine; 1 no spans, or files that cannot be read; 2 wrong usage
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the sub-command and its arguments."""
    about = (
        "Merge the recordings of ranks with CROSSOVER_TIMELINE=DIR, in and below directories, "
        "into one trace."
    )
    parser = declare(
        commands, "timeline", run, "who computed, who communicated when?", about, _EXAMPLES
    )
    parser.add_argument(
        "directories", nargs="+", type=Path, metavar="DIR", help="where ranks have recorded"
    )
    parser.add_argument(
        "-o", "--trace", type=Path, default="trace.json", metavar="FILE", help="(trace.json)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the merged trace, and return the exit code."""
    found = []
    code = FINE
    try:
        for path in recordings(arguments.directories):
            try:
                found.append(list(events(path)))
            except (ValueError, OSError) as error:
                code = FOUND
                say(f"! {error}")
        spans = sum(event["ph"] == "X" for each in found for event in each)
        arguments.trace.parent.mkdir(parents=True, exist_ok=True)
        lines = ",\n".join(json.dumps(event) for each in found for event in each)
        arguments.trace.write_text(f"[\n{lines}\n]\n")
    except OSError as error:
        say(f"crossover-ddp timeline: {error}")
        return USAGE
    jobs = len({each[0]["args"]["job"] for each in found if each})
    summary = f"{jobs} jobs, {len(found)} recordings, {spans:,} spans"
    sys.stdout.write(f"{summary}: {arguments.trace} (open it at https://ui.perfetto.dev)\n")
    return code if spans else FOUND

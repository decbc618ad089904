"""``crossover-ddp timeline``: merge the recordings of all ranks and jobs into one trace, picture and table."""

import argparse
import dataclasses
import importlib.util
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crossover_ddp._timeline import picture as timeline_picture
from crossover_ddp._timeline.files import FoundTimelines, read
from crossover_ddp._timeline.merge import Merged, describe, merge, milliseconds
from crossover_ddp._timeline.spans import DeviceShares, Statistics, device_shares, extent_s
from crossover_ddp._timeline.trace import chrome_trace

from .output import FINE, FOUND, USAGE, add_command, console, new_table, require, seconds, write_json

if TYPE_CHECKING:
    from rich.console import RenderableType

_EXAMPLES = """\
examples:
  CROSSOVER_TIMELINE=runs/a torchrun … train.py          let a job record itself
  crossover-ddp timeline runs/a runs/b                   who computed, who communicated, hand-overs
  crossover-ddp timeline runs --trace trace.json         all spans, for https://ui.perfetto.dev
  crossover-ddp timeline runs --picture runs.svg --from 12 --to 16

exit codes: 0 fine; 1 no spans, or files that cannot be read; 2 wrong usage, or rich or matplotlib is missing
"""


class _TimelineUsageError(Exception):
    """A wrong argument; the text says what to change."""


@dataclass(frozen=True)
class _TimelineResult:
    """Everything that the command shows."""

    reading: FoundTimelines
    merged: Merged
    window_s: tuple[float, float] | None
    devices: Sequence[DeviceShares]
    trace: Path | None = None
    picture: Path | None = None

    @property
    def exit_code(self) -> int:
        return FOUND if self.reading.problems or not self.merged.spans else FINE


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command."""
    parser = add_command(
        commands,
        "timeline",
        run,
        help="who computed, who communicated when: one trace and picture of all ranks and jobs",
        description="Merge what ranks recorded with CROSSOVER_TIMELINE=DIR, on one clock. Each DIR, or directory below "
        "it, is a job; jobs that wrote into one directory are shown apart.",
        examples=_EXAMPLES,
    )
    parser.add_argument("directories", nargs="+", type=Path, metavar="DIR", help="where ranks have recorded")
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="write all spans for Perfetto or chrome://tracing"
    )
    parser.add_argument(
        "--picture", type=_picture, metavar="FILE", help="draw a window of them, as FILE.png or FILE.svg"
    )
    for name, key, what in (("--from", "begin_s", "begin"), ("--to", "end_s", "end")):
        parser.add_argument(
            name,
            dest=key,
            type=seconds(),
            metavar="S",
            help=f"{what} of the window of table and picture, in seconds since the first span (default: the table "
            "shows the time in which all jobs were active, the picture some steps from the middle)",
        )


def _picture(text: str) -> Path:
    if Path(text).suffix not in timeline_picture.FORMATS:
        raise argparse.ArgumentTypeError(f"expected a file name that ends in .png or .svg, got {text!r}")
    return Path(text)


def run(arguments: argparse.Namespace) -> int:
    """Merge, write what was asked for, and show the table; return the exit code."""
    if not arguments.json:
        require("rich")
    try:
        result = _work(arguments)
    except (_TimelineUsageError, OSError) as error:
        sys.stderr.write(f"crossover-ddp timeline: {error}\n")
        return USAGE
    if arguments.json:
        write_json(as_json(result))
    else:
        console().print(_table(result))
    return result.exit_code


def _work(arguments: argparse.Namespace) -> _TimelineResult:
    if arguments.picture and importlib.util.find_spec("matplotlib") is None:
        raise _TimelineUsageError(timeline_picture.MISSING_MATPLOTLIB)
    reading = read(arguments.directories)
    merged = merge(reading.recordings)
    if not merged.spans:
        return _TimelineResult(reading, merged, None, [])
    window_s = _window(merged, arguments.begin_s, arguments.end_s)
    result = _TimelineResult(
        reading, merged, window_s, device_shares(merged.spans, merged.jobs, window_s=window_s)
    )
    if arguments.trace:
        trace = chrome_trace(merged.spans, hosts=merged.hosts, wall_s=merged.wall_s)
        arguments.trace.parent.mkdir(parents=True, exist_ok=True)
        arguments.trace.write_text(json.dumps(trace))
    if arguments.picture:
        timeline_picture.draw(
            merged.spans,
            arguments.picture,
            title=", ".join(str(each) for each in arguments.directories),
            window_s=(arguments.begin_s, arguments.end_s),
            jobs=merged.jobs,
            hosts=merged.hosts,
        )
    return dataclasses.replace(result, trace=arguments.trace, picture=arguments.picture)


def _window(merged: Merged, begin_s: float | None, end_s: float | None) -> tuple[float, float] | None:
    """Return the window that the user has chosen, on the spans' clock; None if there is none."""
    if begin_s is None and end_s is None:
        return None
    first_s, last_s = extent_s(merged.spans)
    chosen_s = (
        first_s + begin_s if begin_s is not None else first_s,
        first_s + end_s if end_s is not None else last_s,
    )
    if not first_s <= chosen_s[0] < chosen_s[1] or not chosen_s[0] < last_s:
        raise _TimelineUsageError(
            f"expected 0 <= --from < --to, and --from before the end of the run at {last_s - first_s:.3f} s, got "
            f"{chosen_s[0] - first_s:.3f} to {chosen_s[1] - first_s:.3f} s"
        )
    return chosen_s


# --- JSON ----------------------------------------------------------------------------------------------------------


def as_json(result: _TimelineResult) -> dict[str, Any]:
    """Return the contents of the table, and more, as a JSON document."""
    merged, reading = result.merged, result.reading
    origin_s, end_s = extent_s(merged.spans)
    return {
        "jobs": list(merged.jobs),
        "recordings": len(reading.recordings),
        "spans": len(merged.spans),
        "length_s": end_s - origin_s,
        "begin_wall_s": origin_s + merged.wall_s if merged.spans else None,
        "clocks": {"says": describe(merged), "shifts_s": dict(merged.shifts_s)},
        "devices": [
            {
                **dataclasses.asdict(device),
                "window_s": [at_s - origin_s for at_s in device.window_s],
                "host": merged.hosts[device.device],
                "busy": device.busy,
            }
            for device in result.devices
        ],
        "problems": [each._asdict() for each in reading.problems],
        "unfinished_lines": reading.unfinished,
        "empty_files": reading.empty,
        "ignored_spans": reading.ignored,
        "trace": str(result.trace) if result.trace else None,
        "picture": str(result.picture) if result.picture else None,
    }


# --- table ---------------------------------------------------------------------------------------------------------


def _table(result: _TimelineResult) -> "RenderableType":
    from rich.console import Group
    from rich.text import Text

    merged = result.merged
    parts: list[Any] = []
    if merged.spans:
        parts += [Text(_headline(result)), Text(describe(merged)), _devices(result)]
        parts += [Text(line, style="dim") for line in _explanations(result)]
    else:
        parts.append(
            Text("no spans found; start the jobs with CROSSOVER_TIMELINE=DIR, and a hook of this package")
        )
    parts += [Text(line, style="yellow") for line in _complaints(result.reading)]
    for what, path in (
        ("trace (open it at https://ui.perfetto.dev)", result.trace),
        ("picture", result.picture),
    ):
        if path:
            parts.append(Text(f"{what}: {path}"))
    return Group(*parts)


def _headline(result: _TimelineResult) -> str:
    merged = result.merged
    begin_s, end_s = extent_s(merged.spans)
    return (
        f"{_count(len(merged.jobs), 'job')} on {_count(len(merged.hosts), 'device')}, "
        f"{_count(len(result.reading.recordings), 'recording')}, {_count(len(merged.spans), 'span')}, "
        f"{end_s - begin_s:.1f} s"
    )


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _devices(result: _TimelineResult) -> Any:
    from rich.text import Text

    table = new_table(("device, job",), ("busy", "idle", "network", "waited", "turns", "hand-over"))
    for device in result.devices:
        shares = [f"{device.busy:.0%}", f"{device.idle:.0%}", f"{device.communicated:.0%}", ""]
        table.add_row(
            Text(timeline_picture.short_name(device.device)),
            *shares,
            str(device.turns),
            _handover(device.handover),
            style="bold",
        )
        for job in device.jobs:
            shares = [f"{job.computed:.0%}", "", f"{job.communicated:.0%}", f"{job.waited:.0%}"]
            table.add_row(Text(f"  {job.job}"), *shares, str(job.turns), _handover(job.handover))
    return table


def _handover(handover: Statistics) -> str:
    return milliseconds(handover.median_s) if handover.count else "-"


def _explanations(result: _TimelineResult) -> Iterator[str]:
    origin_s = extent_s(result.merged.spans)[0]
    windows = [device.window_s for device in result.devices]
    begin_s, end_s = min(b for b, _ in windows), max(e for _, e in windows)
    why = (
        "as chosen"
        if result.window_s
        else "while all of a device's jobs were active (all of it if they never were)"
    )
    yield f"Shares of the time from {begin_s - origin_s:.3f} to {end_s - origin_s:.3f} s, {why}."
    yield "Network: the share of time in which its own exchange was under way."
    several = max(device.several for device in result.devices)
    if several >= 0.005:
        yield f"Up to {several:.0%} of the time several jobs computed at once on one device."
    coded = {job.job: job.rate for device in result.devices for job in device.jobs if job.rate is not None}
    for name, rate in coded.items():
        yield f"{name} sends {rate:.3f} of the bytes of an exchange without a codec."
    yield "Hand-over: from the end of one job's turn to the begin of the turn of a job that was waiting (median)."


def _complaints(reading: FoundTimelines) -> Iterator[str]:
    for problem in reading.problems:
        yield f"! {problem.path}:{problem.line}: {problem.what}"
    if reading.unfinished:
        yield f"{_count(reading.unfinished, 'last line')} cut off by the end of a rank"
    if reading.empty:
        yield f"{_count(reading.empty, 'empty file')}"
    if reading.ignored:
        yield f"{_count(reading.ignored, 'span')} left out: no numbers, or an end before the begin"

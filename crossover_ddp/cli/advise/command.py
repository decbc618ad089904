"""``crossover-ddp advise``: run one job for a short time, and say what would make it faster."""

import argparse
import contextlib
import dataclasses
import os
import secrets
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crossover_ddp._system import environment
from crossover_ddp._system.signals import endings_raise, undisturbed
from crossover_ddp._timeline.files import FoundTimelines, read
from crossover_ddp._timeline.merge import RawSpan
from crossover_ddp._turns.view import sweep
from crossover_ddp.cli.advise import short_run
from crossover_ddp.cli.output import (
    FINE,
    FOUND,
    USAGE,
    add_command,
    console,
    new_table,
    require,
    seconds,
    whole,
    write_json,
)

from .advice import DO_NOT_BOTHER, WORTH, Advice, advise
from .step_figures import WARM_UP_STEPS, Figures, NotMeasurableError, figures

if TYPE_CHECKING:
    from rich.console import RenderableType

_SECONDS = 30.0
_STEPS = 40
_STARTUP_S = 180.0
_EXAMPLES = """\
examples:
  crossover-ddp advise -- torchrun --nproc-per-node 2 train.py --lr 0.1   run it shortly, then advise
  crossover-ddp advise --seconds 60 -- torchrun ...                       measure longer
  crossover-ddp advise runs/x/timeline                                    a run recorded with CROSSOVER_TIMELINE
  crossover-ddp advise --json runs/x/timeline

The job must use a hook of crossover_ddp; reduce_scatter_all_gather_hook changes nothing else.

exit codes: 0 there is advice, also if it is "do not bother"; 1 nothing could be measured; 2 wrong usage, or rich is
missing; 130 Ctrl-C
"""


class _AdviseUsageError(Exception):
    """The command line asks for something impossible; the text says what."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command."""
    parser = add_command(
        commands,
        "advise",
        run,
        help="what crossover, decoupled training, other buckets or compression would bring to a job",
        description="Measure a job's compute, exposed communication and wire time; predict what would make it faster.",
        examples=_EXAMPLES,
    )
    parser.add_argument(
        "what",
        nargs="+",
        metavar="DIR | -- COMMAND",
        help="a CROSSOVER_TIMELINE directory of one job, or a command to run",
    )
    parser.add_argument(
        "--seconds",
        type=seconds(1, 86_400),
        default=_SECONDS,
        metavar="S",
        help="longest time after the first step (default 30)",
    )
    parser.add_argument(
        "--steps",
        type=whole(WARM_UP_STEPS + 6),
        default=_STEPS,
        metavar="N",
        help="end the run after N steps (default 40)",
    )
    parser.add_argument(
        "--startup",
        type=seconds(1, 86_400),
        default=_STARTUP_S,
        metavar="S",
        help="longest time until the first step (default 180)",
    )
    parser.add_argument("--verbose", action="store_true", help="show what the command writes")


def run(arguments: argparse.Namespace) -> int:
    """Measure, advise, show; return the exit code."""
    if not arguments.json:
        require("rich")  # before the run
    try:
        found = _measured(arguments)
    except _AdviseUsageError as error:
        sys.stderr.write(f"crossover-ddp advise: {error}\n")
        return USAGE
    except NotMeasurableError as error:
        sys.stderr.write(f"crossover-ddp advise: {error}\n")
        return FOUND
    advice = advise(found)
    if arguments.json:
        write_json({"figures": dataclasses.asdict(found), "advice": dataclasses.asdict(advice)})
    else:
        console().print(report(found, advice), soft_wrap=True)
    return FINE


def _measured(arguments: argparse.Namespace) -> Figures:
    words: list[str] = arguments.what
    if len(words) == 1 and Path(words[0]).is_dir():
        return figures(read_spans(Path(words[0])))
    if len(words) == 1 and "/" in words[0] and not Path(words[0]).exists():
        raise _AdviseUsageError(
            f"expected a directory with a timeline, or a command after --, got {words[0]!r}"
        )
    require("psutil")
    group = f"advise-{os.getpid()}-{secrets.token_hex(3)}"  # no turns with siblings: it is measured alone
    with _clearing_up(group) as directory:
        recording = directory / "timeline"
        progress = _Progress(recording, arguments)
        try:
            ended = short_run.run(
                words,
                recording,
                enough=progress.enough,
                show=arguments.verbose,
                environment={environment.GROUP: group},
            )
        except OSError as error:
            raise _AdviseUsageError(
                f"expected a command to run, got {shlex.join(words)!r}: {error.strerror}"
            ) from error
        finally:
            progress.close()
        try:
            return figures(read_spans(recording))
        except NotMeasurableError as error:
            raise NotMeasurableError(_why(error, ended, progress)) from error


@contextlib.contextmanager
def _clearing_up(group: str) -> Iterator[Path]:
    """Make a directory for a run; afterwards remove it, and the segments that the run's job may have left."""
    with endings_raise():
        directory = tempfile.TemporaryDirectory(prefix="crossover-advise-")
        try:
            yield Path(directory.name)
        finally:
            with undisturbed():
                sweep(group=group)
                directory.cleanup()


def _why(error: NotMeasurableError, ended: short_run.Ended, progress: "_Progress") -> str:
    """Return how the command ended and what was missing: a job that fails measures nothing."""
    how = f"the command was ended after {progress.ran_s:.0f} s"
    if ended.returncode is not None:
        how = f"the command ended by itself after {progress.ran_s:.0f} s, exit status {ended.returncode}"
    tail = "\n".join(f"    {line}" for line in ended.tail.splitlines())
    if ended.returncode and not progress.steps:
        return f"{how}, before its first step" + (f"; its last lines:\n{tail}" if tail else "")
    said = f"\n{how}" + (f"; its last lines:\n{tail}" if tail else "")
    return f"{error}{said}"


# --- reading ------------------------------------------------------------------------------------------------------


def read_spans(directory: Path) -> dict[int, Sequence[RawSpan]]:
    """Read the timeline of one job, by rank; a line that an ended rank left unfinished is skipped.

    Raises `NotMeasurableError` if a rank is there twice (two jobs, or two runs, in one directory), or if there are only
    files that cannot be read.
    """
    reading = read([directory]) if directory.is_dir() else FoundTimelines()
    ranks: dict[int, Sequence[RawSpan]] = {}
    for recording in reading.recordings:
        rank = recording.header.rank
        if rank in ranks:
            raise NotMeasurableError(
                f"expected one run of one job, got rank {rank} more than once in {directory}; give the directory of "
                "one job, and record each run into an empty one"
            )
        ranks[rank] = recording.spans
    if reading.problems and not ranks:
        problem = reading.problems[0]
        raise NotMeasurableError(f"{problem.path}, line {problem.line}: {problem.what}")
    return ranks


class _Progress:
    """Counts the steps of a running job, shows them, and says when there are enough."""

    def __init__(self, directory: Path, arguments: argparse.Namespace) -> None:
        self._directory = directory
        self._startup_s: float = arguments.startup
        self._seconds_s: float = arguments.seconds
        self._wanted: int = arguments.steps
        self._first_s: float | None = None
        self._shown = sys.stderr.isatty() and not arguments.verbose
        self._looked_s = -1.0
        self.steps = 0
        self.ran_s = 0.0

    def enough(self, now_s: float) -> bool:
        """Look once a second; return whether the run has been long enough."""
        self.ran_s = now_s
        if now_s - self._looked_s >= 1.0:
            self._looked_s = now_s
            self.steps = self._count()
            if self.steps and self._first_s is None:
                self._first_s = now_s
            self._show()
        if self._first_s is None:
            return now_s >= self._startup_s
        return self.steps >= self._wanted or now_s - self._first_s >= self._seconds_s

    def close(self) -> None:
        """Erase the line of progress."""
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def _count(self) -> int:
        # A step is over when the next one has computed.
        counts = [
            path.read_bytes().count(b'"kind": "compute"') - 1
            for path in self._directory.glob("rank*-*.jsonl")
        ]
        return max(0, min(counts, default=0))

    def _show(self) -> None:
        if not self._shown:
            return
        text = f"waiting for the first step, {self.ran_s:.0f} s"
        if self._first_s is not None:
            text = (
                f"step {self.steps} of {self._wanted}, {self.ran_s - self._first_s:.0f} of "
                f"{self._seconds_s:.0f} s"
            )
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()


# --- tables -------------------------------------------------------------------------------------------------------


def report(found: Figures, advice: Advice) -> "RenderableType":
    """Return figures, ways and verdict, for the terminal."""
    from rich.console import Group
    from rich.text import Text

    parts: list[Any] = [Text(line) for line in _figures_in_words(found)]
    parts += [_table(advice), *_to_write(advice)]
    parts += [Text(f"! {note}", style="yellow") for note in advice.notes]
    parts.append(Text(f"→ {advice.verdict}", style="bold green" if advice.best else "bold"))
    return Group(*parts)


def _figures_in_words(found: Figures) -> list[str]:
    lower_s, upper_s = found.spread_s
    wire = "not known" if found.wire_s is None else _milliseconds(found.wire_s)
    lines = [
        f"{found.steps} steps of {len(found.ranks)} ranks ({found.skipped} left out), {found.hook} hook; half of "
        f"them took {lower_s * 1e3:.0f} to {_milliseconds(upper_s)}",
        f"a step {_milliseconds(found.step_s)} = C {_milliseconds(found.compute_s)} compute + N "
        f"{_milliseconds(found.exposed_s)} exposed communication ({found.exposed_s / found.step_s:.0%}); "
        f"M {wire} on the wire",
    ]
    if found.link is not None:
        rate = 8 / (2 * found.link.beta_s) / 1e6
        alpha = f", start-up {2 * found.link.alpha_s * 1e3:.2f} ms each" if found.alpha_known else ""
        lines.append(
            f"{len(found.buckets)} buckets, {found.size_bytes / 1e6:.2f} MB of gradients, at {rate:.0f} Mbit/s{alpha}"
        )
    return lines


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.1f} ms"


def _table(advice: Advice) -> "RenderableType":
    from rich.text import Text

    table = new_table(("what",), ("expected", "at best", "step"))
    for each in advice.options:
        table.add_row(
            Text(each.what),
            "?" if each.factor is None else f"{each.factor:.2f}×",
            "?" if each.bound is None else f"{each.bound:.2f}×",
            "?" if each.step_s is None else _milliseconds(each.step_s),
            style="bold" if each.what == advice.best else None,
        )
    return table


def _to_write(advice: Advice) -> "list[RenderableType]":
    """Return the lines of code of each way that is worth it, and what to know before."""
    from rich.text import Text

    worth = [
        each
        for each in advice.options
        if each.factor is not None and each.factor >= WORTH and each.recommended
    ]
    if advice.verdict.startswith(DO_NOT_BOTHER):
        worth = []
    return [
        part
        for each in worth
        for part in (Text(f"{each.what}: {each.caveat}"), Text(f"    {each.write}", style="cyan"))
    ]

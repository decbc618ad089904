"""``crossover-ddp compare``: runs two commands alternately, and compares the time of their steps."""

import argparse
import math
import os
import secrets
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final, NamedTuple

from crossover_ddp._system import environment

from . import step_meter
from .advise import metered, recorded
from .jobs import JobProcess, run_until, signals_blocked
from .output import FINE, FOUND, USAGE, columns, declare, duration, say, whole, write_json
from .run import NODES, command_words

_EXAMPLES = """\
examples:
  crossover-ddp compare -- 'torchrun --nproc-per-node 2 old.py' -- 'torchrun --nproc-per-node 2 new.py'
  crossover-ddp compare --rounds 5 --steps 200 -- OLD -- NEW      longer, for small differences

The scripts need no change, and their hooks are run. Each run is ended after its steps.
exit codes: 0 both commands were measured; 1 a command failed, or trained too few steps;
2 wrong usage: nothing was started
"""
_NAMES: Final = ("old", "new")


class Comparison(NamedTuple):
    """The time of a step in each round, in seconds, of the old and the new command."""

    old_s: list[float]
    new_s: list[float]

    @property
    def ratios(self) -> list[float]:
        """Old divided by new, in each round. Above 1 the new command is faster."""
        return [old_s / new_s for old_s, new_s in zip(self.old_s, self.new_s, strict=True)]

    @property
    def ratio(self) -> float:
        """The median of the ratios. Between two ratios it is the geometric mean."""
        return math.exp(median(map(math.log, self.ratios)))

    @property
    def verdict(self) -> str:
        """``faster``, ``slower``, or ``no difference beyond the scatter``, of the new command.

        There is a difference if all ratios are on one side of 1, and further from 1 than from each
        other. They are compared as logarithms, so that it does not matter which command is new.
        """
        logs = [math.log(each) for each in self.ratios]
        scatter = max(logs) - min(logs)
        if min(logs) > scatter:
            return "faster"
        if -max(logs) > scatter:
            return "slower"
        return "no difference beyond the scatter"


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the sub-command and its arguments."""
    about = "Run an old and a new command alternately, and compare the time of their steps."
    parser = declare(commands, "compare", run, "did a change help?", about, _EXAMPLES)
    parser.usage = (
        "crossover-ddp compare [--json] [--rounds N] [--skip N] [--steps N] -- OLD -- NEW"
    )
    parser.add_argument(
        "--rounds", type=whole(2), default=3, metavar="N", help="runs of each command (3)"
    )
    # The longest race of AutoState has ended by then.
    parser.add_argument(
        "--skip", type=whole(1), default=160, metavar="N", help="steps of warm-up in each run (160)"
    )
    parser.add_argument(
        "--steps", type=whole(2), default=50, metavar="N", help="timed steps in each run (50)"
    )
    parser.add_argument("--json", action="store_true", help="times of all rounds as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the comparison, and return the exit code."""
    try:
        commands = _commands(arguments.groups)
    except ValueError as error:
        say(f"crossover-ddp compare: {error}")
        return USAGE
    try:
        found = _measured(commands, arguments.rounds, arguments.skip, arguments.steps)
    except (OSError, ValueError) as error:
        say(f"crossover-ddp compare: {error}")
        return FOUND
    if arguments.json:
        more: dict[str, Any] = {"ratio": found.ratio, "verdict": found.verdict}
        write_json({**found._asdict(), "ratios": found.ratios, **more})
    else:
        sys.stdout.write(_report(found, commands))
    return FINE


def _commands(groups: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return the words of the two commands. Raises ``ValueError`` if they cannot be compared."""
    found = [command_words(group[0]) if len(group) == 1 else list(group) for group in groups]
    if len(found) != 2 or not all(found):
        raise ValueError(
            f"expected two commands, -- 'OLD' -- 'NEW', got {len([*filter(None, found)])}"
        )
    for text in map(shlex.join, found):
        if NODES.search(text):
            raise ValueError(
                f"expected a job on one node, got {text!r}: a run ends while another node still "
                "trains; compare jobs of one node, or time both commands by hand"
            )
    return found


# --- measuring ------------------------------------------------------------------------------------


def _measured(commands: Sequence[Sequence[str]], rounds: int, skip: int, steps: int) -> Comparison:
    """Run the commands alternately. Raises ``ValueError`` if one fails or trains too few steps."""
    found = Comparison([], [])
    runs = len(_NAMES) * rounds
    say(f"{runs} runs, old and new alternately, each of {skip} steps and {steps} that are timed")
    # Use a new group: the job must not take turns with siblings.
    group = f"compare-{os.getpid()}-{secrets.token_hex(3)}"
    took_s = list[float]()
    with signals_blocked() as numbers:
        for number in range(runs):
            which = number % len(_NAMES)
            begin_s = time.monotonic()
            step_s = _step_s(commands[which], group, numbers, _NAMES[which], skip, steps)
            took_s.append(time.monotonic() - begin_s)
            found[which].append(step_s)
            left = runs - number - 1
            text = f"{number + 1} of {runs}, {_NAMES[which]}: {_ms(step_s)} a step"
            say(f"{text}; about {duration(left * fmean(took_s))} left" if left else text)
    return found


def _step_s(
    words: Sequence[str], group: str, numbers: frozenset[int], name: str, skip: int, steps: int
) -> float:
    """Run a command until all its ranks have timed their steps. Return the slowest rank's time."""
    with tempfile.TemporaryDirectory(prefix="crossover-compare-") as created:
        directory = Path(created)

        def times_s() -> list[float]:
            """Return each rank's time of a step, or nothing if a rank still trains."""
            lines = [line for lines in recorded(directory) for line in lines]
            begun = sum("begun" in line for line in lines)
            found = [line["step_s"] for line in lines if "step_s" in line]
            return found if len(found) == begun else []

        meter = metered(directory, step_meter.WINDOW, f"{skip} {steps}")
        variables = {**os.environ, environment.GROUP: group, **meter}
        job = JobProcess(words, variables, directory / "log")
        code = run_until(job, numbers, lambda: bool(times_s()))
        if found := times_s():
            return max(found)
        how = job.how_it_ended(code)
        if code:
            raise ValueError(f"the {name} command failed\n{how}")
        lines = [line for lines in recorded(directory) for line in lines]
        done = max((line["steps"] for line in lines if "steps" in line), default=0)
        wanted = f"expected more than {skip} + {steps} steps of the {name} command, got {done}"
        if done:
            remedy = "let it train longer, or lower --skip and --steps"
        else:
            remedy = (
                "steps are seen of DistributedDataParallel and of torch.optim's optimizers, but not "
                "with python -I or -E, which keeps the meter out"
            )
        raise ValueError(f"{wanted}; {remedy}\n{how}")


# --- reporting ------------------------------------------------------------------------------------


def _report(found: Comparison, commands: Sequence[Sequence[str]]) -> str:
    rows = [
        [name, _ms(median(rounds_s)), f"{_ms(min(rounds_s))} to {_ms(max(rounds_s))}", text]
        for name, rounds_s, text in zip(_NAMES, found, map(shlex.join, commands), strict=True)
    ]
    ratios = found.ratios
    factor = f"{found.ratio:.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
    verdict = found.verdict
    is_clear = verdict in ("faster", "slower")
    return (
        f"{columns(['', 'a step', 'rounds', 'command'], rows)}old/new {factor}\n"
        f"→ {'new is ' if is_clear else ''}{verdict}\n"
    )


def _ms(length_s: float) -> str:
    return f"{length_s * 1e3:.1f} ms" if length_s >= 0.01 else f"{length_s * 1e3:.3g} ms"

"""``crossover-ddp doctor``: find out whether this machine is ready, and what to set."""

import argparse
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from crossover_ddp._system.shared_memory import SHARED_MEMORY
from crossover_ddp._turns.view import look, printable, sweep
from crossover_ddp.cli.doctor import findings, machine_facts
from crossover_ddp.cli.output import FINE, FOUND, add_command, console, require, write_json

from .findings import Finding, Severity

if TYPE_CHECKING:
    from rich.table import Table

_STYLES = {Severity.OK: "green", Severity.NOTE: "yellow", Severity.PROBLEM: "bold red"}
_EXAMPLES = """\
examples:
  crossover-ddp doctor           findings, each with the line that mends it
  crossover-ddp doctor --json    the same for programs
  crossover-ddp doctor --sweep   remove segments that dead jobs have left, first

exit codes: 0 no problem; 1 at least one problem; 2 wrong usage, or rich is missing
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command."""
    parser = add_command(
        commands,
        "doctor",
        run,
        help="is this machine ready, and what should be set",
        description="Look at this machine, and say what to expect and what to set.",
        examples=_EXAMPLES,
    )
    parser.add_argument(
        "--sweep", action="store_true", help="first remove segments that no living process has joined"
    )


def run(arguments: argparse.Namespace) -> int:
    """Show the findings; return the exit code."""
    if not arguments.json:
        require("rich")
    require("psutil")
    found = examine(sweep_first=arguments.sweep)
    if arguments.json:
        rows = [{**each._asdict(), "state": each.state.value} for each in found]
        write_json({"state": worst(found).value, "findings": rows})
    else:
        console().print(table(found))
    return exit_code(found)


def examine(*, base: str = SHARED_MEMORY, sweep_first: bool = False) -> list[Finding]:
    """Return the findings about this machine; with ``sweep_first`` remove what dead jobs have left before."""
    swept = sweep(base) if sweep_first else []
    mps, gpus = machine_facts.mps(), machine_facts.gpus()
    gpu_count = len(gpus.listed) or gpus.torch_count
    system = os.uname()
    found = [
        *findings.platform(system.sysname, system.release),
        *findings.software(machine_facts.software()),
        *findings.cuda(os.environ, gpu_count),
        *findings.gpus(gpus, mps),
        *findings.multi_process_service(mps, gpu_count),
        *findings.shared_memory(machine_facts.shared_memory(base)),
        *findings.segments(look(base, with_log=False), swept),
        *findings.environment(os.environ, timeline_writable=machine_facts.timeline_writable()),
        *findings.network(machine_facts.network()),
        *findings.threads(
            os.environ.get("OMP_NUM_THREADS"), machine_facts.cores(), machine_facts.cpu_quota()
        ),
    ]
    return [each._replace(what=printable(each.what), mend=printable(each.mend)) for each in found]


def worst(found: Sequence[Finding]) -> Severity:
    """Return the state of the finding that matters most."""
    states = {each.state for each in found}
    return next(
        state
        for state in (Severity.PROBLEM, Severity.NOTE, Severity.OK)
        if state in states or state is Severity.OK
    )


def exit_code(found: Sequence[Finding]) -> int:
    """Return the command's exit code: notes are fine."""
    return FOUND if worst(found) is Severity.PROBLEM else FINE


def table(found: Sequence[Finding]) -> "Table":
    """Return the findings as a table, each with the line that mends it below."""
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=None, padding=(0, 1))
    for name in ("", "topic", "what"):
        shown.add_column(name)
    for each in found:
        what = Text(each.what)
        if each.mend and each.state is not Severity.OK:
            what.append(f"\n→ {each.mend}", style="cyan")
        shown.add_row(Text(each.state.value, style=_STYLES[each.state]), Text(each.topic), what)
    return shown

"""``crossover-ddp run``: start sibling jobs, and show at the end what became of them."""

import argparse
import dataclasses
import os
import re
import secrets
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from crossover_ddp._system import environment
from crossover_ddp._turns.view import sweep
from crossover_ddp.cli.doctor import machine_facts
from crossover_ddp.cli.doctor.findings import Gpu
from crossover_ddp.cli.output import (
    USAGE,
    add_command,
    console,
    group_name,
    json_text,
    new_table,
    require,
    seconds,
    whole,
)

from .commands import Command, CommandError, from_groups, from_lines, named
from .first_look import FirstLook, FreeMemory, format_size
from .output import Terminal, silence, write_all
from .ports import Rendezvous, rendezvous
from .runner import JobResult, Planned, Runner, RunOutcome, Settings

if TYPE_CHECKING:
    from rich.table import Table

NAME: Final = "run"
_TRY_S: Final = 30.0
_MACHINE: Final = "this machine"
_EXAMPLES = """\
examples:
  crossover-ddp run -- 'torchrun train.py --lr 0.1' -- 'torchrun train.py --lr 0.2'
  crossover-ddp run --commands sweep.txt --logs logs/     one command per line, two at a time
  crossover-ddp run --try-first -- '…' -- '…'             the first one alone for a while: its memory

A first Ctrl-C (SIGTERM, SIGHUP) goes to all jobs, a second one kills them.

exit codes: 0 all jobs ended well; else that of the first job that failed (128 + n if signal n killed it), 127 if it
cannot be started; 128 + n if signal n ended the run; 2 wrong usage, or the jobs do not fit: nothing was started
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command."""
    parser = add_command(
        commands,
        NAME,
        run,
        help="start sibling jobs side by side",
        description="Start jobs that take turns on the same devices: ports, names, logs and signals are taken care of.",
        examples=_EXAMPLES,
        json_help="one JSON document at the end on standard output; the jobs' lines go to standard error",
    )
    parser.usage = "crossover-ddp run [options] -- 'COMMAND' [-- 'COMMAND' …]"
    parser.add_argument(
        "--commands",
        metavar="FILE",
        help="commands, one per line; - is standard input",
    )
    parser.add_argument(
        "--name",
        action="append",
        default=[],
        metavar="NAME",
        help="of a job, once for each (default a, b, …)",
    )
    parser.add_argument(
        "--at-once",
        type=whole(1),
        default=2,
        metavar="K",
        help="run K jobs at a time, the others afterwards (default 2)",
    )
    parser.add_argument(
        "--group",
        type=group_name,
        metavar="NAME",
        help="siblings' group (default CROSSOVER_GROUP, else a new one)",
    )
    parser.add_argument(
        "--logs", type=Path, metavar="DIR", help="also write each job's lines to DIR/NAME.log"
    )
    parser.add_argument(
        "--grace",
        type=seconds(0.01, 86_400),
        default=30.0,
        metavar="SECONDS",
        help="kill a job that has not ended so long after it was asked to (default 30)",
    )
    parser.add_argument("--fail-fast", action="store_true", help="end all jobs when one fails")
    parser.add_argument(
        "--try-first",
        nargs="?",
        const=_TRY_S,
        type=seconds(0.01, 86_400),
        metavar="SECONDS",
        help="run the first job alone until it has taken turns for SECONDS (default 30): measure its memory, "
        "and run only as many at once as fit",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the jobs; return the exit code."""
    require("psutil")
    if not arguments.json:
        require("rich")  # before hours of training
    group = (
        arguments.group or os.environ.get(environment.GROUP) or f"run-{os.getpid()}-{secrets.token_hex(3)}"
    )
    try:
        jobs, memories, on_gpus = _prepare(arguments, group)
    except CommandError as error:
        sys.stderr.write(f"crossover-ddp run: {error}\n")
        return USAGE
    terminal = Terminal([job.name for job in jobs], only_errors=arguments.json)
    _introduce(arguments, group, jobs, memories, terminal)
    settings = Settings(group, arguments.at_once, arguments.grace, arguments.fail_fast, arguments.logs)
    first_look = FirstLook(arguments.try_first, memories, on_gpus=on_gpus) if arguments.try_first else None
    runner = Runner(jobs, settings, terminal, first_look)
    result = runner.run()
    sweep(group=group)  # what killed jobs have left
    peaks = first_look.peak_bytes if first_look else {}
    document = _document(jobs, group, runner.at_once, memories, peaks, result, arguments.logs)
    text = json_text(document) if arguments.json else _table_text(result)
    try:
        write_all(sys.stdout.buffer, text.encode(errors="replace"))
    except OSError:  # the exit code is that of the jobs, even if nobody can read the table
        silence(sys.stdout)
    return result.exit_code


# --- before the start ---------------------------------------------------------------------------------------------


def _prepare(arguments: argparse.Namespace, group: str) -> tuple[list[Planned], list[FreeMemory], bool]:
    """Return the jobs to start, and their memory; raise `CommandError` if they cannot be started."""
    commands = _read_commands(arguments)
    inherited = {"PYTHONUNBUFFERED": "1", **os.environ, environment.GROUP: group}
    for command in commands:
        _check_program(command, inherited)
    places = rendezvous(commands, inherited, _free_port, at_once=arguments.at_once)
    jobs = [_planned(command, place, inherited) for command, place in zip(commands, places, strict=True)]
    memories, on_gpus = _free_memories(jobs)
    if arguments.logs is not None:
        try:
            arguments.logs.mkdir(parents=True, exist_ok=True)
            for job in jobs:
                (arguments.logs / f"{job.name}.log").open("ab").close()
        except OSError as error:
            raise CommandError(
                f"expected a directory to write to, got --logs {arguments.logs}: {error}"
            ) from error
    return jobs, memories, on_gpus


def _read_commands(arguments: argparse.Namespace) -> tuple[Command, ...]:
    entries = from_groups(arguments.groups)
    if arguments.commands:
        try:
            text = sys.stdin.read() if arguments.commands == "-" else Path(arguments.commands).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise CommandError(
                f"expected a file of commands, got --commands {arguments.commands}: {error}"
            ) from error
        entries += from_lines(text)
    return named(entries, arguments.name)


def _check_program(command: Command, inherited: Mapping[str, str]) -> None:
    path = {**inherited, **command.environment}.get("PATH")
    if shutil.which(command.words[0], path=path) is None:
        raise CommandError(
            f"{command.name}: expected a program to start, got {command.words[0]!r}, which is none or not in PATH"
        )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def _planned(command: Command, place: Rendezvous, inherited: Mapping[str, str]) -> Planned:
    variables = {**inherited, **place.environment, **command.environment}
    timeline = inherited.get(environment.TIMELINE)
    if timeline and environment.TIMELINE not in command.environment:
        variables[environment.TIMELINE] = os.path.join(timeline, command.name)
    return Planned(command.name, place.words, variables, place.where)


def _free_memories(jobs: Sequence[Planned]) -> tuple[list[FreeMemory], bool]:
    """Return the memory that the jobs share, and whether it is memory of GPUs."""
    found = machine_facts.gpus()
    memories = []
    for index, gpu in enumerate(found.listed):
        used = any(sees(job.environment.get("CUDA_VISIBLE_DEVICES"), index, gpu) for job in jobs)
        if used and gpu.free_mib is not None:
            memories.append(FreeMemory(gpu.uuid, gpu.free_mib << 20))
    if memories:
        return memories, True
    return [FreeMemory(_MACHINE, machine_facts.available_memory_bytes())], False


def sees(visible: str | None, index: int, gpu: Gpu) -> bool:
    """Return whether ``CUDA_VISIBLE_DEVICES`` shows a GPU; CUDA stops at the first entry that it does not know."""
    if visible is None:
        return True
    for each in (word.strip() for word in visible.split(",")):
        if not re.fullmatch(r"\d+|(GPU|MIG)-.+", each):
            return False
        if each == str(index) or (each.startswith("GPU-") and gpu.uuid.startswith(each)):
            return True
    return False


def _introduce(
    arguments: argparse.Namespace,
    group: str,
    jobs: Sequence[Planned],
    memories: Sequence[FreeMemory],
    terminal: Terminal,
) -> None:
    terminal.say(f"{len(jobs)} jobs, {arguments.at_once} at once, in group {group}")
    for memory in memories:
        terminal.say(f"memory: {format_size(memory.free_bytes)} free on {memory.name}")
    if not arguments.try_first:
        terminal.say("memory: whether the jobs fit is not known; --try-first checks it")


# --- at the end ---------------------------------------------------------------------------------------------------


def _document(
    jobs: Sequence[Planned],
    group: str,
    at_once: int,
    memories: Sequence[FreeMemory],
    peaks: Mapping[str, int],
    result: RunOutcome,
    logs: Path | None,
) -> dict[str, Any]:
    return {
        "group": group,
        "at_once": at_once,
        "wall_s": result.wall_s,
        "exit_code": result.exit_code,
        "signal": result.signal,
        "jobs": [
            {
                **dataclasses.asdict(each),
                "state": each.state.value,
                "seconds": _seconds_of(each),
                "turns": result.turns[each.name],
                "command": list(job.words),
                "meets_at": job.where,
                "log": str(logs / f"{each.name}.log") if logs is not None else None,
            }
            for each, job in zip(result.jobs, jobs, strict=True)
        ],
        "memory": [
            {"name": memory.name, "free_bytes": memory.free_bytes, "first_job_bytes": peaks.get(memory.name)}
            for memory in memories
        ],
    }


def _seconds_of(result: JobResult) -> float | None:
    if result.began_s is None or result.ended_s is None:
        return None
    return result.ended_s - result.began_s


def _table_text(result: RunOutcome) -> str:
    shown = console()
    with shown.capture() as captured:
        shown.print(table(result))
    return captured.get()


def table(result: RunOutcome) -> "Table":
    """Return the jobs' results as a table."""
    from rich.text import Text

    title = f"{len(result.jobs)} jobs in {result.wall_s:.1f} s"
    shown = new_table(("job",), ("exit code", "seconds", "turns"), title)
    for job in result.jobs:
        took_s = _seconds_of(job)
        shown.add_row(
            Text(job.name),
            "not started" if job.exit_code is None else str(job.exit_code),
            "" if took_s is None else f"{took_s:.1f}",
            str(result.turns[job.name]),
            style="red" if job.failed else None,
        )
    return shown

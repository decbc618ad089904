"""``crossover-ddp status``: show groups, devices and jobs, as seen from outside."""

import argparse
import random
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from crossover_ddp._system.shared_memory import SHARED_MEMORY
from crossover_ddp._turns.view import Look, look

from .output import FINE, FOUND, add_command, console, group_name, new_table, require, seconds, write_json
from .turn_report import COMPUTES, DEAF, GONE, DeviceReport, JobReport, Report, report

if TYPE_CHECKING:
    from rich.console import RenderableType

_INTERVAL_S = 1.0
_BETWEEN_LOOKS_S = 0.05
_STYLES = {COMPUTES: "bold green", GONE: "red", DEAF: "red"}
_EXAMPLES = """\
examples:
  crossover-ddp status                     who computes, who queues, over one second
  crossover-ddp status --watch             live, until Ctrl-C
  crossover-ddp status --watch 5 --json    one line of JSON every five seconds
  crossover-ddp status --group sweep       one group only

exit codes: 0 jobs were found; 1 none, or files that are no segments; 2 wrong usage, or rich is missing
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command."""
    parser = add_command(
        commands,
        "status",
        run,
        help="who holds the turn, who queues, shares and rates",
        description="Show the jobs of this user that take turns. Only looks: joins, locks and wakes nothing.",
        examples=_EXAMPLES,
        json_help="JSON instead of tables; one line each with --watch",
    )
    parser.add_argument(
        "--watch",
        nargs="?",
        const=_INTERVAL_S,
        type=seconds(0.1, 3600),
        metavar="SECONDS",
        help="go on until Ctrl-C, a new picture every SECONDS (default 1)",
    )
    parser.add_argument("--group", type=group_name, metavar="NAME", help="this group only (default: all)")


def run(arguments: argparse.Namespace) -> int:
    """Show the status once or until Ctrl-C; return the exit code."""
    if not arguments.json:
        require("rich")  # before the first second is over
    reports = observe(arguments.group, arguments.watch or _INTERVAL_S)
    if arguments.watch is None:
        last = next(reports)
        if arguments.json:
            write_json(last)
        else:
            console().print(tables(last))
        return exit_code(last)
    return _watch(reports, as_json=arguments.json)


def exit_code(last: Report) -> int:
    """Return the command's exit code."""
    return FINE if last.groups and not last.problems else FOUND


def _watch(reports: Iterator[Report], *, as_json: bool) -> int:
    code = FOUND
    try:
        if as_json:
            for each in reports:
                code = exit_code(each)
                write_json(each, indent=None)
        else:
            code = _watch_live(reports)
    except KeyboardInterrupt:  # this is how the user ends it
        return FINE
    return code


def _watch_live(reports: Iterator[Report]) -> int:
    screen = console()
    if not screen.is_terminal:
        for each in reports:
            screen.print(tables(each))
        return FINE
    from rich.live import Live

    with Live(console=screen, auto_refresh=False) as live:
        for each in reports:
            live.update(tables(each), refresh=True)
    return FINE


def observe(group: str | None, interval_s: float, *, base: str = SHARED_MEMORY) -> Iterator[Report]:
    """Yield a report per interval, without end."""
    first = look(base, group=group)
    while True:
        looks = [first, *_looks_until(time.monotonic() + interval_s, group, base)]
        first = look(base, group=group)
        yield report([*looks, first])


def _looks_until(end_s: float, group: str | None, base: str) -> Iterator[Look]:
    """Look repeatedly, at irregular times: the steps of a job are regular."""
    while (left_s := end_s - time.monotonic()) > 0:
        time.sleep(min(left_s, _BETWEEN_LOOKS_S * random.uniform(0.5, 1.5)))
        yield look(base, group=group, with_log=False)


# --- tables -------------------------------------------------------------------------------------------------------


def tables(shown: Report) -> "RenderableType":
    """Return the report as tables, one per device."""
    from rich.console import Group
    from rich.text import Text

    parts: list[Any] = []
    for group in shown.groups:
        parts += [part for device in group.devices for part in _device(group.group, device)]
    if not shown.groups:
        parts.append(Text(f"no jobs take turns here (nothing in {shown.directory})"))
    parts += [Text(f"! {problem['path']}: {problem['what']}", style="yellow") for problem in shown.problems]
    return Group(*parts)


def _device(group: str, device: DeviceReport) -> list[Any]:
    from rich.text import Text

    figures = ("turn", "ranks", "PIDs", "turns/s", "share", "lease")
    table = new_table(("job", "state"), figures, f"group {group} on {device.device}")
    for job in device.jobs:
        table.add_row(*_cells(job), style=_STYLES.get(job.state))
    idle = "?" if device.idle_share is None else f"{device.idle_share:.0%}"
    summary = (
        f"{_number(device.turns_per_s, '.1f')} turns/s, last hand-over {_number(device.handover_age_s, '.2f')} s ago, "
        f"idle {idle}"
    )
    return [table, Text(summary), *(Text(f"not known: {what}", style="dim") for what in device.not_known)]


def _cells(job: JobReport) -> list[str]:
    return [
        job.job[:8],
        job.state,
        str(job.turn),
        f"{','.join(map(str, job.ranks))} of {job.world_size}",
        ",".join(map(str, job.pids)),
        _number(job.turns_per_s, ".1f"),
        "?" if job.share is None else f"{job.share:.0%}",
        "?" if job.lease_s is None else f"{job.lease_s:.3g} s",
    ]


def _number(value: float | None, form: str) -> str:
    return "?" if value is None else format(value, form)

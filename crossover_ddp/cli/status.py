"""``crossover-ddp status``: shows which jobs compute and which are queued.

It only reads shared memory: it joins no group, takes no lock and wakes no job.
"""

import argparse
import itertools
import json
import operator
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from crossover_ddp._system.shared_memory import SHARED_MEMORY
from crossover_ddp._turns.view import Look, Member, Mode, look

from .output import FINE, FOUND, columns, declare, say, write_json

_INTERVAL_S = 1.0
_EXAMPLES = """\
examples:
  crossover-ddp status                     over one second
  watch -n 1 crossover-ddp status          live
  crossover-ddp status --prometheus > /var/lib/node_exporter/crossover.prom
exit codes: 0 jobs were found; 1 none, or files that are no segments; 2 wrong usage
"""


class JobRow(NamedTuple):
    """One job on one device."""

    group: str
    device: str
    number: int
    slots: Sequence[Member]
    alive: bool
    # The member that publishes the job's mode, perhaps on another device.
    lead: Member

    @property
    def name(self) -> str:
        """Return the name that the table shows for the job."""
        return f"{self.number:x}"[:8]

    @property
    def state(self) -> str:
        """Return whether the job computes, queues, or is between turns."""
        if any(slot.started > slot.returned for slot in self.slots):
            return "computes"
        if any(slot.queued > slot.started for slot in self.slots):
            return "queues"
        return "between turns"


_FIGURES: Final[Mapping[str, Callable[[JobRow], float]]] = {
    "turns_total": lambda job: max(slot.turns for slot in job.slots),
    "computes": lambda job: job.alive and job.state == "computes",
    "queues": lambda job: job.alive and job.state == "queues",
    "side_by_side": lambda job: job.lead.mode == Mode.SIDE_BY_SIDE,
    "alive": lambda job: job.alive,
    "processes": lambda job: len(job.slots),
    "lease_seconds": lambda job: max(slot.lease_s for slot in job.slots),
}
HEAD = ("group", "device", "job", "state", "turn", "turns/s", "ranks", "PIDs", "lease")


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the sub-command and its arguments."""
    about = "Show the jobs of this user that take turns, and who holds the turn, over one second."
    parser = declare(commands, "status", run, "who holds the turn, who queues?", about, _EXAMPLES)
    parser.add_argument("--json", action="store_true", help="a list of objects instead of a table")
    parser.add_argument(
        "--prometheus", action="store_true", help="figures of this moment, for Prometheus"
    )


def run(arguments: argparse.Namespace, *, base: str = SHARED_MEMORY) -> int:
    """Print the jobs found in shared memory, and return the exit code.

    Except for Prometheus, shared memory is read twice, to count the turns in between.
    """
    before = after = look(base)
    if not arguments.prometheus:
        time.sleep(_INTERVAL_S)
        after = look(base)
    shown = [*rows(before, after)]
    if arguments.prometheus:
        sys.stdout.write(exposition(after))
    elif arguments.json:
        write_json([dict(zip(HEAD, row, strict=True)) for row in shown])
    elif shown:
        sys.stdout.write(columns(HEAD, shown))
    else:
        sys.stdout.write(f"no jobs take turns here (nothing in {after.directory})\n")
    for path, problem in after.problems:
        say(f"! {path}: {problem}")
    return FINE if shown and not after.problems else FOUND


def rows(before: Look, after: Look) -> Iterator[list[str]]:
    """Yield a table row for each job on each device."""
    turns = {each.slot.incarnation: each.slot.turns for each in before.processes}
    seconds = (after.at_ns - before.at_ns) / 1e9
    for job in _jobs(after):
        slots = job.slots
        taken = max(slot.turns - turns.get(slot.incarnation, slot.turns) for slot in slots)
        yield [
            job.group,
            job.device,
            job.name,
            _shown_state(job) if job.alive else "gone",
            str(max(slot.started for slot in slots)),
            f"{taken / seconds:.1f}" if seconds else "?",
            f"{','.join(str(slot.rank) for slot in slots)} of "
            f"{max(slot.world_size for slot in slots)}",
            ",".join(str(slot.pid) for slot in slots),
            f"{max(slot.lease_s for slot in slots):.3g} s",
        ]


def exposition(seen: Look) -> str:
    """Return the figures of all jobs in Prometheus' text format 0.0.4."""
    lines = []
    for name, figure in _FIGURES.items():
        lines.append(f"# TYPE crossover_{name} {'counter' if name.endswith('_total') else 'gauge'}")
        for job in _jobs(seen):
            labels = {"group": job.group, "device": job.device, "job": job.name}
            # For printable text, the format uses the same escapes as JSON.
            text = ",".join(
                f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in labels.items()
            )
            lines.append(f"crossover_{name}{{{text}}} {float(figure(job))!r}")
    return "\n".join(lines) + "\n"


def _jobs(seen: Look) -> Iterator[JobRow]:
    job_of = operator.attrgetter("group", "device", "slot.job")
    # Only the lead publishes a mode, so it comes last when sorted by mode.
    by_mode = sorted(seen.processes, key=operator.attrgetter("slot.mode"))
    leads = {(each.group, each.slot.job): each.slot for each in by_mode}
    in_order = sorted(seen.processes, key=job_of)
    for (group, device, number), found in itertools.groupby(in_order, job_of):
        members = [*found]
        # Dead members are shown only if all of the job's members are dead.
        members = [each for each in members if each.alive] or members
        slots = sorted((member.slot for member in members), key=lambda slot: slot.rank)
        yield JobRow(group, device, number, slots, members[0].alive, leads[group, number])


def _shown_state(job: JobRow) -> str:
    lead = job.lead
    if lead.mode == Mode.SIDE_BY_SIDE and lead.pairs and lead.side_s:
        slower = 100 * (lead.turns_s / lead.side_s - 1)
        return f"side by side: turns were {slower:.0f} % slower"
    if lead.mode == Mode.SIDE_BY_SIDE:
        return "side by side"
    if lead.mode in (Mode.TRYING_TURNS, Mode.TRYING_SIDE_BY_SIDE):
        return f"{job.state}, trial"
    return job.state

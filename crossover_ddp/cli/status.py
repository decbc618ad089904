"""``crossover-ddp status``: who computes, who queues, as seen from outside; joins, locks and wakes nothing."""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence

from crossover_ddp._system.shared_memory import SHARED_MEMORY
from crossover_ddp._turns.view import Look, Mode, Slot, look

from .output import FINE, FOUND, columns, declare, forget, say, write_json

_INTERVAL_S = 1.0
_EXAMPLES = """\
examples:
  crossover-ddp status                     over one second
  watch -n 1 crossover-ddp status          live
exit codes: 0 jobs were found; 1 none, or files that are no segments; 2 wrong usage
"""
_GONE = {"--watch": "watch -n 1 crossover-ddp status", "--group": "all groups are shown"}
HEAD = ("group", "device", "job", "state", "turn", "turns/s", "ranks", "PIDs", "lease")


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command."""
    about = "Show the jobs of this user that take turns, and who holds the turn, over one second."
    parser = declare(commands, "status", run, "who holds the turn, who queues?", about, _EXAMPLES)
    parser.add_argument("--json", action="store_true", help="a list of objects instead of a table")
    forget(parser, _GONE)


def run(arguments: argparse.Namespace, *, base: str = SHARED_MEMORY) -> int:
    """Look twice, show one table; return the exit code."""
    before = look(base)
    time.sleep(_INTERVAL_S)
    after = look(base)
    shown = [*rows(before, after)]
    if arguments.json:
        write_json([dict(zip(HEAD, row, strict=True)) for row in shown])
    elif shown:
        sys.stdout.write(columns(HEAD, shown))
    else:
        sys.stdout.write(f"no jobs take turns here (nothing in {after.directory})\n")
    for problem in after.problems:
        say(f"! {problem.path}: {problem.what}")
    return FINE if shown and not after.problems else FOUND


def rows(before: Look, after: Look) -> Iterator[list[str]]:
    """Yield a row for each job on each device."""
    turns = {
        place.slot.incarnation: place.slot.turns for segment in before.segments for place in segment.places
    }
    seconds = (after.at_ns - before.at_ns) / 1e9
    for segment in after.segments:
        for device, job in sorted({(place.device, place.slot.job) for place in segment.places}):
            places = [each for each in segment.places if (each.device, each.slot.job) == (device, job)]
            places = [each for each in places if each.alive] or places
            slots = sorted((place.slot for place in places), key=lambda slot: slot.rank)
            taken = max(slot.turns - turns.get(slot.incarnation, slot.turns) for slot in slots)
            yield [
                segment.group,
                device,
                f"{job:x}"[:8],
                _state(slots) if places[0].alive else "gone",
                str(max(slot.started for slot in slots)),
                f"{taken / seconds:.1f}" if seconds else "?",
                f"{','.join(str(slot.rank) for slot in slots)} of {max(slot.world_size for slot in slots)}",
                ",".join(str(slot.pid) for slot in slots),
                f"{max(slot.lease_s for slot in slots):.3g} s",
            ]


def _state(slots: Sequence[Slot]) -> str:
    mode, lead = max(((slot.mode, slot) for slot in slots), key=lambda each: each[0])
    if mode == Mode.SIDE_BY_SIDE:
        slower = f": turns were {100 * (lead.turns_s / lead.side_s - 1):.0f} % slower" if lead.pairs else ""
        return f"side by side{slower}"
    trying = ", trial" if mode in (Mode.TRYING_TURNS, Mode.TRYING_SIDE_BY_SIDE) else ""
    if any(slot.started > slot.returned for slot in slots):
        return f"computes{trying}"
    return f"{'queues' if any(slot.queued > slot.started for slot in slots) else 'between turns'}{trying}"

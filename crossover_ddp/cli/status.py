"""``crossover-ddp status``: who computes, who queues, as seen from outside; joins, locks and wakes nothing."""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence

from crossover_ddp._system.shared_memory import SHARED_MEMORY
from crossover_ddp._turns.view import Liveness, Look, Place, look

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
    """Yield a row for each job on each device.

    A machine's log says which slot has drawn which turn; of jobs whose lead rank is on another machine, turns a second
    and who queues are not known.
    """
    drawn, counts = _draws(before, after)
    seconds = (after.at_ns - before.at_ns) / 1e9
    for segment in after.segments:
        for job in sorted({place.job for place in segment.places}):
            places = sorted(
                (place for place in segment.places if place.job == job), key=lambda place: place.rank
            )
            living = [place for place in places if place.liveness is not Liveness.GONE] or places
            lease_s = max((place.lease_s for place in living if place.lease_s is not None), default=None)
            yield [
                segment.group,
                segment.device,
                f"{job:x}"[:8],
                _state(living, drawn.get(job)),
                str(max(place.started for place in living)),
                f"{counts[job] / seconds:.1f}" if job in drawn and seconds else "?",
                f"{','.join(str(place.rank) for place in living)} of {max(place.world_size for place in living)}",
                ",".join(str(place.pid) for place in living),
                "?" if lease_s is None else f"{lease_s:.3g} s",
            ]


def _draws(before: Look, after: Look) -> tuple[dict[int, int], Counter[int]]:
    """Return the last turn that each job has drawn, and how many between the looks, as far as logs show it."""
    lengths = {segment.path: segment.log.numel for segment in before.segments if segment.log}
    drawn: dict[int, int] = {}
    counts: Counter[int] = Counter()
    for segment in after.segments:
        new = (segment.log.drawn_since(lengths.get(segment.path, 0)) or b"") if segment.log else b""
        for place in segment.places if segment.log else ():
            last = segment.log.last_turn(place.slot) if segment.log else 0
            if last > place.joined_at:
                drawn[place.job] = max(last, drawn.get(place.job, 0))
            counts[place.job] += new.count(place.slot)
    return drawn, counts


def _state(places: Sequence[Place], drawn: int | None) -> str:
    if places[0].liveness is Liveness.GONE:
        return "gone"
    if any(place.liveness is Liveness.DEAF for place in places):
        return "deaf"
    if any(place.started > place.returned for place in places):
        return "computes"
    return (
        "queues" if drawn is not None and drawn > min(place.started for place in places) else "between turns"
    )

r"""Run jobs on an emulated cluster: nodes, shaped links and pinned cores on one machine.

    python recipes/lab run --nodes 2 --rate 200mbit --out runs/x \
        --job 'a: python recipes/train.py --hook crossover --lr 0.1' \
        --job 'b: python recipes/train.py --hook crossover --lr 0.05'
    python recipes/lab link --rate 200mbit      measure a link
    python recipes/lab clean                    remove the remains of killed labs

Namespaces and shaping need root. ``--unshaped`` works without them. docs/lab.md explains the
lab and its figures.
"""

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .analysis import bound
from .jobs import Job
from .link import measure
from .network import LabError
from .nodes import Cluster, clean
from .records import Run, draw_run, load_run


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    try:
        return int(args.action(args))
    except (LabError, ValueError) as error:
        print(f"lab: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("lab: interrupted; everything has been cleaned up", file=sys.stderr)
        return 130


def run_jobs(args: argparse.Namespace) -> int:
    jobs = [parse_job(text) for text in args.job]
    out: Path = args.out or Path("runs") / "lab" / time.strftime("%Y%m%d-%H%M%S")
    with make_cluster(args) as cluster:
        if args.sequential:
            # Each run has its own directory, since it is analysed as a job that ran alone.
            runs = [run_once(cluster, [job], args.timeout, out / job.name) for job in jobs]
        else:
            runs = [run_once(cluster, jobs, args.timeout, out)]
    result = {"sequential": args.sequential, "runs": [run.as_json() for run in runs]}
    if args.sequential:
        result["one_after_the_other"] = one_after_the_other(runs)
    (out / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    pictures = [draw_run(run) for run in runs if run.spans]
    if args.json:
        print(json.dumps(result))
    else:
        show(result, pictures, out)
    return 0


def run_once(cluster: Cluster, jobs: Sequence[Job], timeout_s: float, out: Path) -> Run:
    with progress(jobs, out) as watch:
        cluster.run(jobs, timeout_s, out=out, watch=watch)
    return load_run(out)


def one_after_the_other(runs: Sequence[Run]) -> dict[str, float | None]:
    """Return the sum of the makespans, and the bound of the speed-up of siblings over it."""
    figures = [job for run in runs for job in run.figures().values()]
    alone = [
        (job.busy_s, job.step_s, job.wire_s or 0.0)
        for job in figures
        if job.busy_s is not None and job.step_s is not None
    ]
    return {
        "makespan_s": sum(job.makespan_s or 0.0 for job in figures),
        "bound": bound(alone) if len(alone) == len(figures) else None,
    }


def measure_link(args: argparse.Namespace) -> int:
    with make_cluster(args) as cluster:
        figures = measure(cluster, duration_s=args.duration)
    print(json.dumps(figures, indent=None if args.json else 2))
    return 0


def clean_up(args: argparse.Namespace) -> int:
    removed = clean()
    print("\n".join(f"removed {each}" for each in removed) or "nothing was left behind")
    return 0


def make_cluster(args: argparse.Namespace) -> Cluster:
    per_node: int = getattr(args, "ranks_per_node", 1)
    return Cluster(
        args.nodes,
        args.rate,
        args.mtu,
        ranks_per_node=per_node,
        pin=args.pin,
        shaped=not args.unshaped,
    )


def parse_job(text: str) -> Job:
    """Parse ``name: command``."""
    name, colon, command = text.partition(":")
    if not colon:
        raise ValueError(f"expected a job as 'name: command', got {text!r}")
    return Job(name.strip(), command.strip())


def parse_rate(text: str) -> float:
    """Parse a rate such as 200mbit, 1gbit or 2.5 (Mbit/s). Return Mbit/s."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?)\s*(kbit|mbit|gbit)?", text.strip().lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"expected a rate such as 200mbit or 1gbit, got {text!r}")
    return float(match[1]) * {"kbit": 1e-3, "mbit": 1.0, "gbit": 1e3}[match[2] or "mbit"]


@contextmanager
def progress(
    jobs: Sequence[Job], out: Path, title: str = "running"
) -> Iterator[Callable[[], None] | None]:
    """Show the last line of each job on a terminal, with the function that it yields.

    It yields None without a terminal. The lab then sleeps while the jobs run.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    began_s = time.monotonic()
    # No automatic refresh: it would take time from the cores that are measured.
    with Live(console=Console(stderr=True), auto_refresh=False, transient=True) as live:

        def watch() -> None:
            lines = [f"{job.name}: {last_line(out / job.name / 'rank0.log')}" for job in jobs]
            live.update(
                Text("\n".join([f"{title}: {time.monotonic() - began_s:.0f} s", *lines])),
                refresh=True,
            )

        yield watch


def last_line(log: Path) -> str:
    """Return the last line of a growing file that is not blank."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    lines = [line.strip() for line in re.split(r"[\r\n]+", text) if line.strip()]
    return lines[-1][:120] if lines else ""


def show(result: dict[str, Any], pictures: Sequence[Path], out: Path) -> None:
    """Print the figures as a table."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    columns = {"step": "step_s", "C": "C_s", "N": "N_s", "M": "M_s"}
    units = ["MB/step", "turns", "hand-over ms", "total s"]
    table = Table(
        *["job", "steps", *(f"{name} ms" for name in columns), *units], title=str(out), box=SIMPLE
    )
    for run in result["runs"]:
        for name, job in run["jobs"].items():
            handover = job["handover"]
            table.add_row(
                *[name, str(job["steps"]), *(number(job[key], 1e3, 0) for key in columns.values())],
                number(job["wire_bytes_per_step"], 1e-6, 2),
                str(job["turns"] or "–"),
                number(handover["median_s"] if handover["count"] else None, 1e3, 2),
                number(job["makespan_s"], 1, 1),
            )
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    if result["sequential"] and result["one_after_the_other"]["bound"]:
        total = result["one_after_the_other"]
        console.print(
            f"one after the other {total['makespan_s']:.1f} s; "
            f"siblings at best {total['bound']:.2f}× faster"
        )
    dropped = sum(run["dropped_packets"] for run in result["runs"])
    if dropped:
        console.print(f"[red]{dropped} packets were dropped: these times are spoiled")
    for picture in pictures:
        console.print(f"picture: {picture}")


def number(value: float | None, factor: float, digits: int) -> str:
    return "–" if value is None else f"{value * factor:.{digits}f}"


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python recipes/lab", description=(__doc__ or "").split("\n")[0]
    )
    actions = parser.add_subparsers(required=True)
    run = actions.add_parser("run", help="run jobs side by side, or one after the other")
    run.add_argument(
        "--job", action="append", required=True, metavar="'NAME: COMMAND'", help="may be repeated"
    )
    run.add_argument(
        "--out", type=Path, help="directory for logs and results (default: runs/lab/<time>)"
    )
    run.add_argument(
        "--timeout", type=float, default=3600.0, metavar="S", help="for each run (default: 1 h)"
    )
    run.add_argument(
        "--ranks-per-node",
        type=int,
        default=1,
        metavar="N",
        help="of each job, on one core (default: 1)",
    )
    run.add_argument(
        "--sequential", action="store_true", help="one job after the other, each alone"
    )
    run.set_defaults(action=run_jobs)
    link = actions.add_parser("link", help="measure a link")
    link.add_argument(
        "--duration", type=float, default=1.0, metavar="S", help="of the larger message"
    )
    link.set_defaults(action=measure_link)
    for command in (run, link):
        command.add_argument("--nodes", type=int, default=2, help="1 to 4 (default: 2)")
        command.add_argument(
            "--rate", type=parse_rate, default=200.0, help="of each link (default: 200mbit)"
        )
        command.add_argument("--mtu", type=int, default=9000, help="bytes (default: 9000)")
        command.add_argument(
            "--pin", choices=("core", "none"), default="core", help="rank i to core i, or not"
        )
        command.add_argument(
            "--unshaped", action="store_true", help="no namespaces, no shaping: needs no root"
        )
        command.add_argument("--json", action="store_true", help="print the result as JSON")
    actions.add_parser("clean", help="remove the remains of killed labs").set_defaults(
        action=clean_up
    )
    return parser.parse_args(argv)

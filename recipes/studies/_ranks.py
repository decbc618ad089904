"""The other side of _worker.py: start a study's ranks on a cluster, give them orders, hear what they say.

And what all studies of this kind do with it: measure all presets at all ratios M/C, and show each row when it is there.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from _models import PRESETS
from lab import STEADY_MEMORY, Cluster
from lab.children import Child
from studies._tables import Cells, show_table

RECIPES = Path(__file__).resolve().parents[1]
CALIBRATION_MBIT = 1000.0
CALIBRATION_STEPS = 10
ANSWER_TIMEOUT_S = 300.0
QUIT_TIMEOUT_S = 30.0

Answer = dict[str, Any]
Row = dict[str, Any]
MeasurePreset = Callable[[Cluster, str, argparse.Namespace, Callable[[], None]], Iterable[Row]]


class AskedRank:
    """One rank of one job, and the conversation with it."""

    def __init__(self, process: Child, name: str, log: Path) -> None:
        self.process = process
        self._name = name
        self._log = log

    def hear(self, event: str) -> Answer:
        """Wait for one answer; a rank that hangs is killed, and a dead one says its last words."""
        try:
            answer: Answer = self.process.hear(ANSWER_TIMEOUT_S)
        except EOFError as error:
            raise RuntimeError(f"{self._name} ended: {self._log.read_text()[-2000:]}") from error
        if answer["event"] != event:
            raise RuntimeError(f"expected {self._name} to say {event!r}, got {answer['event']!r}")
        return answer


class Ranks:
    """All ranks of one job, started, which wait for orders.

    Args:
        cluster: where they run.
        job: its name, and that of its directory in ``out``.
        worker: the script beside this one that they run.
        arguments: the script's.
        out: directory for logs and timelines.
        variables: on top of the cluster's; a PYTHONPATH comes before the own one.
    """

    def __init__(
        self,
        cluster: Cluster,
        job: str,
        worker: str,
        arguments: Sequence[str],
        out: Path,
        variables: Mapping[str, str] = {},
    ) -> None:
        directory, port = out / job, cluster.port()
        directory.mkdir(parents=True, exist_ok=True)
        inherited = variables.get("PYTHONPATH") or os.environ.get("PYTHONPATH")
        path = os.pathsep.join(filter(None, [inherited, str(RECIPES)]))
        self._ranks = []
        for rank, (node, local_rank) in enumerate(cluster.ranks):
            log = directory / f"rank{rank}.log"
            environment = cluster.environment(node, local_rank=local_rank, port=port, directory=directory)
            with log.open("w") as errors:
                process = cluster.popen(
                    node,
                    ["python", str(RECIPES / "studies" / worker), *arguments],
                    {**environment, **STEADY_MEMORY, **variables, "PYTHONPATH": path},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                )
            self._ranks.append(AskedRank(process, f"job {job}, rank {rank}", log))
        # A rank that still starts would disturb what others measure.
        self.hear("up")

    def tell(self, **order: Any) -> None:
        for rank in self._ranks:
            rank.process.tell(order)

    def hear(self, event: str) -> list[Answer]:
        return [rank.hear(event) for rank in self._ranks]

    def run(self, **order: Any) -> list[Answer]:
        """Run something on all ranks, started together; return what each has measured."""
        return run_together([self], [order])[0]

    def close(self) -> None:
        self.tell(do="quit")
        for rank in self._ranks:
            rank.process.wait(timeout=QUIT_TIMEOUT_S)


def run_together(jobs: Sequence[Ranks], orders: Sequence[dict[str, Any]]) -> list[list[Answer]]:
    """Let each job run what it is told, all started together; return each job's answers."""
    for job, order in zip(jobs, orders, strict=True):
        job.tell(do="run", **order)
    for job in jobs:
        job.hear("ready")
    for job in jobs:
        job.tell(do="go")
    return [job.hear("done") for job in jobs]


def mean(answers: Iterable[Answer], figure: str) -> float:
    """Return the mean of a figure over ranks."""
    return float(statistics.mean(answer[figure] for answer in answers))


def slowest_s(answers: Iterable[Answer]) -> float:
    """Return the time of a step of the slowest rank, for which the others wait."""
    return float(max(answer["step_s"] for answer in answers))


def study_parser(
    description: str | None, presets: Sequence[str], out: str, *, choices: Sequence[str] = tuple(PRESETS)
) -> argparse.ArgumentParser:
    """Offer what all these studies can be told."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", nargs="+", choices=choices, default=list(presets))
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument(
        "--ranks-per-node", type=int, default=1, help="they share a core and a link (default 1)"
    )
    parser.add_argument("--out", type=Path, default=Path("runs") / out)
    return parser


def measure_all(
    args: argparse.Namespace,
    measure_preset: MeasurePreset,
    title: str,
    cells: Callable[[Row], Cells],
    file_name: str,
) -> list[Row]:
    """Measure all presets on one cluster; each row is shown and kept in ``args.out`` as soon as it is there."""
    out = args.out = args.out.resolve()
    console = Console(stderr=True)
    rows: list[Row] = []
    with (
        Cluster(nodes=args.nodes, rate_mbit=CALIBRATION_MBIT, ranks_per_node=args.ranks_per_node) as cluster,
        Progress(console=console) as progress,
    ):
        task = progress.add_task("measuring", total=len(args.preset) * len(args.ratio) * args.repeats)
        for preset in args.preset:
            for row in measure_preset(cluster, preset, args, lambda: progress.advance(task)):
                rows.append(row)
                show_table(console, title, [cells(row)])
                (out / file_name).write_text(json.dumps(rows, indent=1))
        if cluster.dropped():
            console.print(f"[red]{cluster.dropped()} packets were dropped: the timings are spoilt[/red]")
    show_table(Console(), title, map(cells, rows))
    return rows

"""Two sibling jobs on an emulated cluster: one after the other, side by side, and taking turns.

    python recipes/siblings.py --preset vit --ratio 0.75 --repeats 5 --out runs/siblings

For each preset and each ratio M/C (wire time of a step's gradients to its compute) it sets the link's rate, then
alternates the variants and prints their speed-ups against one job after the other, beside the bound
S = 2 T1 / max(2 C, T1, 2 M) computed from the same run. Needs root (see docs/lab.md).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from lab_cluster import Cluster
from lab_jobs import STEADY_MEMORY

JOBS = ("a", "b")
WORKER = Path(__file__).with_name("sibling_worker.py")
CALIBRATION_MBIT = 1000.0
CALIBRATION_STEPS = 10
ANSWER_TIMEOUT_S = 300.0
VARIANTS = ("alone", "unmanaged", "crossover")


class Worker:
    """One rank of one job, and the conversation with it."""

    def __init__(
        self,
        cluster: Cluster,
        job: str,
        node: int,
        port: int,
        arguments: Sequence[str],
        out: Path,
        script: Path = WORKER,
    ) -> None:
        directory = out / job
        directory.mkdir(parents=True, exist_ok=True)
        self.name = f"job {job}, rank {node}"
        self._log_path = directory / f"rank{node}.log"
        self._log = self._log_path.open("w")
        self.process = cluster.popen(
            node,
            ["python", str(script), *arguments],
            cluster.environment(node, port=port, directory=directory) | STEADY_MEMORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def tell(self, **order: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def hear(self, event: str) -> dict[str, Any]:
        """Wait for one answer; a rank that hangs is killed, and a dead one says its last words."""
        assert self.process.stdout is not None
        watchdog = threading.Timer(ANSWER_TIMEOUT_S, self.process.kill)
        watchdog.start()
        try:
            line = self.process.stdout.readline()
        finally:
            watchdog.cancel()
        if not line:
            self._log.flush()
            raise RuntimeError(f"{self.name} ended: {self._log_path.read_text()[-2000:]}")
        answer: dict[str, Any] = json.loads(line)
        if answer["event"] != event:
            raise RuntimeError(f"expected {self.name} to say {event!r}, got {answer['event']!r}")
        return answer


@dataclass(frozen=True)
class Outcome:
    """What the ranks of the active jobs said of one run."""

    answers: dict[str, list[dict[str, Any]]]

    @property
    def makespan_s(self) -> float:
        begin_s = min(answer["begin_s"] for answer in self._all())
        return float(max(answer["ends_s"][-1] for answer in self._all()) - begin_s)

    @property
    def step_s(self) -> float:
        """Mean time of one step of a job, over its ranks and the active jobs."""
        return float(
            statistics.mean((a["ends_s"][-1] - a["begin_s"]) / len(a["ends_s"]) for a in self._all())
        )

    @property
    def busy_s(self) -> float:
        """Mean busy time of a device per step of one job."""
        return float(statistics.mean(a["core_busy_s"] / len(a["ends_s"]) for a in self._all()))

    @property
    def wire_bytes(self) -> float:
        return float(statistics.mean(a["wire_bytes"] / len(a["ends_s"]) for a in self._all()))

    def results(self, job: str) -> list[tuple[list[float], str]]:
        """Losses and parameters of a job's ranks, which no variant may change."""
        return [(answer["losses"], answer["digest"]) for answer in self.answers[job]]

    def _all(self) -> Iterable[dict[str, Any]]:
        return [answer for answers in self.answers.values() for answer in answers]


class Siblings:
    """The two jobs of one preset, waiting for orders."""

    def __init__(
        self,
        cluster: Cluster,
        preset: str,
        out: Path,
        work: dict[str, int],
        *,
        script: Path = WORKER,
        arguments: Sequence[str] = (),
    ) -> None:
        self._cluster = cluster
        self.work = work
        ports = {job: cluster.port() for job in JOBS}
        self._workers = {
            job: [
                Worker(
                    cluster,
                    job,
                    node,
                    ports[job],
                    ["--preset", preset, "--seed", str(seed), *arguments],
                    out / preset,
                    script,
                )
                for node in range(cluster.nodes)
            ]
            for seed, job in enumerate(JOBS)
        }
        for worker in self._of(JOBS):
            worker.hear("up")

    def run(self, hook: str, steps: int, jobs: Sequence[str] = JOBS) -> Outcome:
        """Run ``steps`` steps of the jobs under one hook, started together."""
        for job in jobs:
            for worker in self._workers[job]:
                worker.tell(do="run", hook=hook, steps=steps, work=self.work[job])
        for worker in self._of(jobs):
            worker.hear("ready")
        for worker in self._of(jobs):
            worker.tell(do="go")
        return Outcome({job: [worker.hear("done") for worker in self._workers[job]] for job in jobs})

    def close(self) -> None:
        for worker in self._of(JOBS):
            worker.tell(do="quit")
        for worker in self._of(JOBS):
            worker.process.wait(timeout=30)

    def _of(self, jobs: Sequence[str]) -> list[Worker]:
        return [worker for job in jobs for worker in self._workers[job]]


def measure_once(siblings: Siblings, steps: int, baseline: str, order: Sequence[str]) -> dict[str, Any]:
    """Run every variant once, in ``order``; return their figures."""
    outcomes: dict[str, Outcome] = {}
    for variant in order:
        if variant == "alone":
            outcomes |= {f"alone {job}": siblings.run(baseline, steps, [job]) for job in JOBS}
        else:
            outcomes[variant] = siblings.run("crossover" if variant == "crossover" else baseline, steps)
    together = outcomes["crossover"]
    for job in JOBS:
        if together.results(job) != outcomes[f"alone {job}"].results(job):
            raise RuntimeError(f"job {job} has other losses or parameters with a sibling than alone")
    return figures(outcomes, steps)


def figures(outcomes: dict[str, Outcome], steps: int) -> dict[str, Any]:
    alone = [outcomes[f"alone {job}"] for job in JOBS]
    after_s = sum(outcome.makespan_s for outcome in alone)
    crossover = outcomes["crossover"]
    stats = [answer["stats"] for answers in crossover.answers.values() for answer in answers]
    medians = [one["handover_median_s"] for one in stats if one["handover_median_s"] is not None]
    return {
        "steps": steps,
        "t1_s": statistics.mean(outcome.step_s for outcome in alone),
        "c_s": statistics.mean(outcome.busy_s for outcome in alone),
        "wire_bytes": statistics.mean(outcome.wire_bytes for outcome in alone),
        "after_s": after_s,
        "unmanaged_s": outcomes["unmanaged"].makespan_s,
        "crossover_s": crossover.makespan_s,
        "crossover": after_s / crossover.makespan_s,
        "over_unmanaged": outcomes["unmanaged"].makespan_s / crossover.makespan_s,
        "job_s": {
            job: answers[0]["ends_s"][-1] - answers[0]["begin_s"]
            for job, answers in crossover.answers.items()
        },
        "handover_median_s": statistics.median(medians) if medians else None,
        "leases_expired": sum(one["leases_expired"] for one in stats),
        "disabled": [one["disabled_because"] for one in stats if one["disabled_because"]],
    }


def summarize(preset: str, ratio: float, rate_mbit: float, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the repeats, and the bound from the same runs' C, N and M."""
    middle = {key: statistics.median(run[key] for run in runs) for key in MEDIANS}
    m_s = middle["wire_bytes"] * 8 / (rate_mbit * 1e6)
    t1_s, c_s = middle["t1_s"], middle["c_s"]
    bound = 2 * t1_s / max(2 * c_s, t1_s, 2 * m_s)
    return {
        "preset": preset,
        "ratio": ratio,
        "rate_mbit": rate_mbit,
        "m_s": m_s,
        "n_s": t1_s - c_s,
        "bound": bound,
        "of_bound": middle["crossover"] / bound,
        **middle,
        "runs": runs,
    }


MEDIANS = (
    "t1_s",
    "c_s",
    "wire_bytes",
    "crossover",
    "over_unmanaged",
    "after_s",
    "unmanaged_s",
    "crossover_s",
)


def measure_preset(
    cluster: Cluster, preset: str, args: argparse.Namespace, advance: Any
) -> Iterable[dict[str, Any]]:
    """All ratios of one preset; the link's rate follows from the compute time measured first."""
    siblings = Siblings(cluster, preset, args.out, dict(zip(JOBS, args.work, strict=True)))
    cluster.set_rate(CALIBRATION_MBIT)
    first = siblings.run(args.baseline, CALIBRATION_STEPS, JOBS[:1])
    for ratio in args.ratio:
        rate_mbit = first.wire_bytes * 8 / (ratio * first.busy_s) / 1e6
        cluster.set_rate(rate_mbit)
        runs = []
        for repeat in range(args.repeats):
            order = list(VARIANTS)
            random.Random(repeat).shuffle(order)
            runs.append(measure_once(siblings, args.steps, args.baseline, order))
            advance()
        yield summarize(preset, ratio, rate_mbit, runs)
    siblings.close()


def show(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table(title="Two siblings: speed-up against one job after the other (medians)")
    for column in ("model", "M/C", "C s", "N s", "M s", "bound", "crossover", "of bound", "over unmanaged"):
        table.add_column(column, justify="right")
    for row in rows:
        cells = [row["m_s"] / row["c_s"], row["c_s"], row["n_s"], row["m_s"], row["bound"], row["crossover"]]
        cells += [row["of_bound"], row["over_unmanaged"]]
        table.add_row(row["preset"], *(f"{cell:.3f}" for cell in cells))
    console.print(table)


def measure_all(
    args: argparse.Namespace,
    measure_preset: Callable[
        [Cluster, str, argparse.Namespace, Callable[[], None]], Iterable[dict[str, Any]]
    ],
    show: Callable[[list[dict[str, Any]], Console], None],
    file_name: str,
) -> list[dict[str, Any]]:
    """Measure all presets on one cluster; each row is shown and kept in ``args.out`` as soon as it is there."""
    out = args.out = args.out.resolve()
    console = Console(stderr=True)
    rows: list[dict[str, Any]] = []
    with (
        Cluster(nodes=args.nodes, rate_mbit=CALIBRATION_MBIT) as cluster,
        Progress(console=console) as progress,
    ):
        task = progress.add_task("measuring", total=len(args.preset) * len(args.ratio) * args.repeats)
        for preset in args.preset:
            for row in measure_preset(cluster, preset, args, lambda: progress.advance(task)):
                rows.append(row)
                show([row], console)
                (out / file_name).write_text(json.dumps(rows, indent=1))
        if cluster.dropped():
            console.print(f"[red]{cluster.dropped()} packets were dropped: the timings are spoilt[/red]")
    show(rows, Console(file=sys.stdout))
    return rows


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", nargs="+", default=["convnet", "vit", "gpt"])
    parser.add_argument("--ratio", nargs="+", type=float, default=[0.5, 0.75, 1.0], help="M/C")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument(
        "--baseline", choices=["none", "rsag"], default="none", help="hook of the other variants"
    )
    parser.add_argument(
        "--work", nargs=2, type=int, default=[1, 1], help="compute of jobs a and b, in passes a step"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/siblings"))
    args = parser.parse_args(argv)
    return measure_all(args, measure_preset, show, "siblings.json")


if __name__ == "__main__":
    main()

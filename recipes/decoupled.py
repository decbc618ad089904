"""Decoupled training against plain DDP, FSDP2 and ZeRO on an emulated cluster.

    python recipes/decoupled.py --preset convnet deep_vit convnext --ratio 0.75 1.0 1.25 1.5 2.0 --out runs/decoupled

For each preset and each ratio M/C (wire time of a step's gradients to its compute) it sets the link's rate, looks for
plain DDP's best bucket size, lets the package plan its own, and then alternates the ways of training. The wire's
limit is max(C, M), with C and the bytes of plain DDP's own runs. Needs root (see docs/lab.md).
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lab_cluster import Cluster
from siblings import CALIBRATION_MBIT, CALIBRATION_STEPS, Worker, measure_all

WORKER = Path(__file__).with_name("decoupled_worker.py")
FIRST_WAYS = ("ddp", "decoupled")
WAYS = (*FIRST_WAYS, "fsdp", "zero")
UNSHAPED_MBIT = 8000.0
# Plain DDP's candidates: the model in two buckets, in four, ...
BUCKETS = (2, 4, 8, 16)
SEARCH_STEPS = 5
TRIAL_STEPS = 32  # decoupled training has found out by then whether deferring is worth it


@dataclass(frozen=True)
class Outcome:
    """What the ranks said of one run."""

    answers: list[dict[str, Any]]

    def mean(self, figure: str) -> float:
        return float(statistics.mean(answer[figure] for answer in self.answers))

    @property
    def step_s(self) -> float:
        return max(float(answer["step_s"]) for answer in self.answers)

    @property
    def losses(self) -> list[list[float]]:
        return [answer["losses"] for answer in self.answers]


class Ranks:
    """The ranks of one preset, waiting for orders."""

    def __init__(self, cluster: Cluster, preset: str, out: Path) -> None:
        port = cluster.port()
        self._workers = [
            Worker(cluster, "ranks", node, port, ["--preset", preset], out / preset, WORKER)
            for node in range(cluster.nodes)
        ]
        self._hear("up")

    def run(self, way: str, steps: int, options: dict[str, Any] | None = None, **more: int) -> Outcome:
        self._tell(do="run", way=way, steps=steps, options=options or {}, **more)
        self._hear("ready")
        self._tell(do="go")
        return Outcome(self._hear("done"))

    def plan(self) -> dict[str, Any]:
        self._tell(do="plan")
        return self._hear("plan")[0]

    def close(self) -> None:
        self._tell(do="quit")
        for worker in self._workers:
            worker.process.wait(timeout=30)

    def _tell(self, **order: Any) -> None:
        for worker in self._workers:
            worker.tell(**order)

    def _hear(self, event: str) -> list[dict[str, Any]]:
        return [worker.hear(event) for worker in self._workers]


def best_cap_mb(ranks: Ranks, size_bytes: float) -> float:
    """Find plain DDP's best bucket size, by trying."""
    caps = [size_bytes / 2**20 / count for count in BUCKETS]
    return min(caps, key=lambda cap: ranks.run("ddp", SEARCH_STEPS, {"bucket_cap_mb": cap}).step_s)


def measure_once(
    ranks: Ranks, args: argparse.Namespace, options: dict[str, dict[str, Any]], repeat: int
) -> dict[str, Outcome]:
    order = [way for way in args.way if way in FIRST_WAYS or repeat < args.other_repeats]
    random.Random(repeat).shuffle(order)
    steps = args.steps
    more = {way: {"warm_up": args.warm_up} for way in FIRST_WAYS}
    outcomes = {way: ranks.run(way, steps, options.get(way), **more.get(way, {})) for way in order}
    if outcomes["decoupled"].losses != outcomes["ddp"].losses and len(outcomes["ddp"].answers) == 2:
        raise RuntimeError("decoupled training has other losses than plain DDP")
    return outcomes


def summarize(
    preset: str, ratio: float, rate_mbit: float, plan: dict[str, Any], runs: list[dict[str, Outcome]]
) -> dict[str, Any]:
    """Medians over the repeats, and the wire's limit from plain DDP's own C and M."""
    step_s = {way: statistics.median(run[way].step_s for run in runs if way in run) for way in runs[0]}
    c_s = statistics.median(run["ddp"].mean("core_busy_s") for run in runs)
    sent = statistics.median(run["ddp"].mean("wire_bytes") for run in runs)
    m_s = sent * 8 / (rate_mbit * 1e6)
    return {
        "preset": preset,
        "ratio": ratio,
        "rate_mbit": rate_mbit,
        "c_s": c_s,
        "m_s": m_s,
        "decoupled_c_s": statistics.median(run["decoupled"].mean("core_busy_s") for run in runs),
        "limit_s": max(c_s, m_s),
        "of_limit": max(c_s, m_s) / step_s["decoupled"],
        "step_s": step_s,
        "speed_up": {
            way: statistics.median(run[way].step_s / run["decoupled"].step_s for run in runs if way in run)
            for way in step_s
        },
        "deferring": [run["decoupled"].answers[0]["deferring"] for run in runs],
        "wire_ratio": statistics.median(
            run["decoupled"].mean("wire_bytes") / run["ddp"].mean("wire_bytes") for run in runs
        ),
        "plan": plan,
        "runs": [{way: outcome.step_s for way, outcome in run.items()} for run in runs],
    }


def measure_preset(
    cluster: Cluster, preset: str, args: argparse.Namespace, advance: Any
) -> Iterable[dict[str, Any]]:
    """All ratios of one preset; the link's rate follows from the compute time measured first."""
    ranks = Ranks(cluster, preset, args.out)
    cluster.set_rate(CALIBRATION_MBIT)
    first = ranks.run("ddp", CALIBRATION_STEPS)
    for ratio in args.ratio:
        rate_mbit = UNSHAPED_MBIT
        if ratio:
            rate_mbit = first.mean("wire_bytes") * 8 / (ratio * first.mean("core_busy_s")) / 1e6
        cluster.set_rate(rate_mbit)
        plan = ranks.plan()
        ddp_mb = best_cap_mb(ranks, plan["size_bytes"])
        best = {"bucket_cap_mb": ddp_mb}
        own = {"bucket_cap_mb": args.cap_mb} if args.cap_mb else plan["options"]
        options = {"ddp": best, "zero": best, "decoupled": own}
        plan["ddp_cap_mb"] = ddp_mb
        runs = []
        for repeat in range(args.repeats):
            runs.append(measure_once(ranks, args, options, repeat))
            advance()
        yield summarize(preset, ratio, rate_mbit, plan, runs)
    ranks.close()


def show(rows: list[dict[str, Any]], console: Console) -> None:
    ways = [way for way in rows[0]["step_s"] if way != "decoupled"]
    table = Table(title="Decoupled training: speed-up over the other ways (medians)")
    for column in ("model", "M/C", "C s", "M s", "step s", "of limit", "planned s", "buckets", "deferring"):
        table.add_column(column, justify="right")
    for way in ways:
        table.add_column(f"over {way}", justify="right")
    for row in rows:
        cells = [row["m_s"] / row["c_s"], row["c_s"], row["m_s"], row["step_s"]["decoupled"], row["of_limit"]]
        cells.append(row["plan"]["step_s"])
        speed_ups = [f"{row['speed_up'][way]:.3f}" for way in ways]
        table.add_row(
            row["preset"],
            *(f"{cell:.3f}" for cell in cells),
            str(row["plan"]["buckets"]),
            f"{sum(map(bool, row['deferring']))} of {len(row['deferring'])}",
            *speed_ups,
        )
    console.print(table)


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", nargs="+", default=["convnet", "deep_vit", "convnext"])
    parser.add_argument(
        "--ratio", nargs="+", type=float, default=[0.75, 1.0, 1.25, 1.5, 2.0], help="M/C; 0: unshaped"
    )
    parser.add_argument("--way", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--other-repeats", type=int, default=2, help="of fsdp and zero (default 2)")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument(
        "--warm-up",
        type=int,
        default=TRIAL_STEPS,
        help=f"steps before the measured ones (default {TRIAL_STEPS}; with less, decoupled is still trying)",
    )
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--cap-mb", type=float, help="bucket size of decoupled, instead of the planned one")
    parser.add_argument("--out", type=Path, default=Path("runs/decoupled"))
    args = parser.parse_args(argv)
    args.way = list(dict.fromkeys([*FIRST_WAYS, *args.way]))
    return measure_all(args, measure_preset, show, "decoupled.json")


if __name__ == "__main__":
    main()

"""K-FAC beside kfac-pytorch and plain SGD on an emulated cluster: seconds and bytes per step, in alternating runs.

    git clone https://github.com/gpauloski/kfac-pytorch
    python recipes/kfac_comparison.py --peer kfac-pytorch --preset cnn convnet vit --out runs/kfac-comparison

Both get the same model, batches and hyper-parameters, and follow the same losses. kfac-pytorch takes its best strategy:
inverses, triangles, one owner (MEM-OPT) where factors are renewed in every step, else all ranks (COMM-OPT). Each
round runs all ways in random order; ratios are of one round. Needs root (see docs/lab.md).
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lab_cluster import Cluster
from siblings import Worker, measure_all

WORKER = Path(__file__).with_name("kfac_comparison_worker.py")
WAYS = ("sgd", "kfac-pytorch", "kfac")
RATES_MBIT = {"cnn": 1200.0, "convnet": 190.0, "vit": 100.0}
LOSS_TOLERANCE = 1e-2  # the package differs from itself by 7e-3 from one of its strategies to another
COMPARED_STEPS = 10


class Ranks:
    """The ranks of one model, waiting for orders."""

    def __init__(self, cluster: Cluster, model: str, args: argparse.Namespace) -> None:
        port = cluster.port()
        arguments = ["--model", model, "--peer", str(args.peer.resolve())]
        arguments += ["--bucket-mb", str(args.bucket_mb)]
        self._workers = [
            Worker(cluster, "ranks", node, port, arguments, args.out / model, WORKER)
            for node in range(cluster.nodes)
        ]
        self._hear("up")

    def run(self, way: str, steps: int, periods: Sequence[int]) -> list[dict[str, Any]]:
        self._tell(do="run", way=way, steps=steps, periods=list(periods))
        self._hear("ready")
        self._tell(do="go")
        return self._hear("done")

    def close(self) -> None:
        self._tell(do="quit")
        for worker in self._workers:
            worker.process.wait(timeout=30)

    def _tell(self, **order: Any) -> None:
        for worker in self._workers:
            worker.tell(**order)

    def _hear(self, event: str) -> list[dict[str, Any]]:
        return [worker.hear(event) for worker in self._workers]


def measure_round(
    ranks: Ranks, steps: int, periods: Sequence[int], number: int
) -> dict[str, list[dict[str, Any]]]:
    order = list(WAYS)
    random.Random(number).shuffle(order)
    answers = {way: ranks.run(way, steps, periods) for way in order}
    for own, other in zip(answers["kfac"], answers["kfac-pytorch"], strict=True):
        pairs = zip(own["losses"][:COMPARED_STEPS], other["losses"][:COMPARED_STEPS], strict=True)
        worst = max(abs(a - b) / abs(b) for a, b in pairs)
        if worst > LOSS_TOLERANCE:
            raise RuntimeError(
                f"expected both K-FACs to follow the same losses, got {worst:.1e} between them"
            )
    return answers


def measure_preset(
    cluster: Cluster, preset: str, args: argparse.Namespace, advance: Any
) -> Iterable[dict[str, Any]]:
    """All periods of one model."""
    cluster.set_rate(RATES_MBIT[preset])
    ranks = Ranks(cluster, preset, args)
    for periods in args.ratio:
        steps = args.steps if periods[1] == 1 else periods[1]
        rounds = []
        for number in range(args.repeats):
            rounds.append(measure_round(ranks, steps, periods, number))
            advance()
        yield summarize(preset, periods, rounds)
    ranks.close()


def summarize(
    preset: str, periods: Sequence[int], rounds: list[dict[str, list[dict[str, Any]]]]
) -> dict[str, Any]:
    step_s = [{way: max(each["step_s"] for each in run[way]) for way in WAYS} for run in rounds]
    sent = {
        way: statistics.median(statistics.mean(each["wire_bytes"] for each in run[way]) for run in rounds)
        for way in WAYS
    }
    return {
        "preset": preset,
        "rate_mbit": RATES_MBIT[preset],
        "periods": list(periods),
        "sgd_busy_s": statistics.median(run["sgd"][0]["core_busy_s"] for run in rounds),
        "step_s": {way: statistics.median(each[way] for each in step_s) for way in WAYS},
        "over_peer": sorted(each["kfac"] / each["kfac-pytorch"] for each in step_s),
        "over_sgd": statistics.median(each["kfac"] / each["sgd"] for each in step_s),
        "wire_bytes": sent,
    }


def show(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table(title="K-FAC beside kfac-pytorch and SGD (medians)")
    columns = (
        "model",
        "Mbit/s",
        "every",
        "this / kfac-pytorch",
        "least to greatest",
        "this / SGD",
        "MB: this, it, SGD",
    )
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        over = row["over_peer"]
        sent = [row["wire_bytes"][way] / 1e6 for way in ("kfac", "kfac-pytorch", "sgd")]
        table.add_row(
            row["preset"],
            f"{row['rate_mbit']:.0f}",
            " / ".join(map(str, row["periods"])),
            f"{statistics.median(over):.3f}",
            f"{over[0]:.2f} to {over[-1]:.2f}",
            f"{row['over_sgd']:.2f}",
            ", ".join(f"{megabytes:.2f}" for megabytes in sent),
        )
    console.print(table)


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer", type=Path, required=True, help="kfac-pytorch's checkout")
    parser.add_argument("--preset", nargs="+", choices=list(RATES_MBIT), default=list(RATES_MBIT))
    parser.add_argument(
        "--periods",
        dest="ratio",
        nargs="+",
        type=lambda text: tuple(int(part) for part in text.split("/")),
        default=[(1, 1), (10, 100)],
        help="steps between new factors and between new inverses (default 1/1 10/100)",
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=15, help="of a run with new inverses in every step")
    parser.add_argument(
        "--bucket-mb", type=float, default=25.0, help="DDP's bucket_cap_mb (default 25, DDP's own)"
    )
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/kfac-comparison"))
    args = parser.parse_args(argv)
    if not (args.peer / "kfac").is_dir():
        parser.error(
            f"expected a checkout of kfac-pytorch, got {args.peer}; git clone it and pass its directory"
        )
    return measure_all(args, measure_preset, show, "kfac_comparison.json")


if __name__ == "__main__":
    main()

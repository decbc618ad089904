"""What `crossover-ddp advise` predicts, beside what the emulated cluster then measures.

    python recipes/advice.py --preset convnet vit --ratio 0.75 1.0 --repeats 3 --out runs/advice

For each preset and each ratio M/C (wire time of a step's gradients to its compute) it records a short run with
the split hook and asks for advice, then measures two siblings and decoupled training as predicted, alternating with
what they are compared to. Needs root (see docs/lab.md).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import _models
from crossover_ddp._advice import CROSSOVER, DECOUPLED_TRAINING, Option, advise
from crossover_ddp._cli_advise import read_spans
from crossover_ddp._step_figures import Figures, figures
from decoupled import Ranks
from lab_cluster import Cluster
from siblings import CALIBRATION_MBIT, CALIBRATION_STEPS, JOBS, Siblings, Worker, measure_all, measure_once

ORDER = ("alone", "crossover", "unmanaged")


def record(cluster: Cluster, preset: str, out: Path, steps: int) -> Figures:
    """Run the job alone with the split hook for a short while; return what its timeline says."""
    port = cluster.port()
    workers = [
        Worker(cluster, "recorded", node, port, ["--preset", preset], out) for node in range(cluster.nodes)
    ]
    for worker in workers:
        worker.hear("up")
        worker.tell(do="run", hook="rsag", steps=steps)
    for event, order in (("ready", "go"), ("done", "quit")):
        for worker in workers:
            worker.hear(event)
        for worker in workers:
            worker.tell(do=order)
    for worker in workers:
        worker.process.wait(timeout=30)
    return figures(read_spans(out / "recorded" / "timeline"))


def measure_decoupled(ranks: Ranks, preset: str, advised: Option, args: argparse.Namespace) -> float:
    """Return how many times faster decoupled training with the advised buckets is than plain DDP with its own."""
    present = {"bucket_cap_mb": _models.PRESETS[preset].bucket_cap_mb}
    wanted = {"bucket_cap_mb": advised.bucket_cap_mb}
    ratios = []
    for _ in range(args.repeats):
        plain_s = ranks.run("ddp", args.steps, present).step_s
        ratios.append(plain_s / ranks.run("decoupled", args.steps, wanted).step_s)
    return statistics.median(ratios)


def measure_preset(
    cluster: Cluster, preset: str, args: argparse.Namespace, advance: Any
) -> Iterable[dict[str, Any]]:
    """All ratios of one preset; the link's rate follows from the compute time measured first."""
    siblings = Siblings(cluster, preset, args.out, dict.fromkeys(JOBS, 1))
    ranks = Ranks(cluster, preset, args.out / "decoupled")
    cluster.set_rate(CALIBRATION_MBIT)
    first = siblings.run("none", CALIBRATION_STEPS, JOBS[:1])
    for ratio in args.ratio:
        rate_mbit = first.wire_bytes * 8 / (ratio * first.busy_s) / 1e6
        cluster.set_rate(rate_mbit)
        found = record(cluster, preset, args.out / f"{preset}-{ratio}", args.recorded_steps)
        options = {option.what: option for option in advise(found).options}
        runs = []
        for _ in range(args.repeats):
            runs.append(measure_once(siblings, args.steps, "none", ORDER))
            advance()
        middle = {key: statistics.median(run[key] for run in runs) for key in ("c_s", "t1_s", "crossover")}
        yield {
            "preset": preset,
            "ratio": ratio,
            "rate_mbit": rate_mbit,
            "said": {"c_s": found.compute_s, "n_s": found.exposed_s, "m_s": found.wire_s},
            "lab": {
                "c_s": middle["c_s"],
                "n_s": middle["t1_s"] - middle["c_s"],
                "m_s": statistics.median(run["wire_bytes"] for run in runs) * 8 / (rate_mbit * 1e6),
            },
            "crossover": middle["crossover"],
            "crossover_said": options[CROSSOVER].factor,
            "crossover_bound": options[CROSSOVER].bound,
            "decoupled": measure_decoupled(ranks, preset, options[DECOUPLED_TRAINING], args),
            "decoupled_said": options[DECOUPLED_TRAINING].factor,
            "decoupled_bound": options[DECOUPLED_TRAINING].bound,
            "decoupled_cap_mb": options[DECOUPLED_TRAINING].bucket_cap_mb,
        }
    siblings.close()
    ranks.close()


def show(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table(title="Advice beside measurement (said / measured)")
    for column in ("model", "M/C", "C s", "N s", "M s", "crossover", "decoupled"):
        table.add_column(column, justify="right")
    for row in rows:
        pairs = [f"{row['said'][key]:.3f} / {row['lab'][key]:.3f}" for key in ("c_s", "n_s", "m_s")]
        pairs += [f"{row[f'{way}_said']:.2f} / {row[way]:.2f}" for way in ("crossover", "decoupled")]
        table.add_row(row["preset"], f"{row['lab']['m_s'] / row['lab']['c_s']:.2f}", *pairs)
    console.print(table)


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", nargs="+", default=["convnet", "vit"])
    parser.add_argument("--ratio", nargs="+", type=float, default=[0.5, 0.75, 1.0, 1.5], help="M/C")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--recorded-steps", type=int, default=20)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/advice"))
    args = parser.parse_args(argv)
    return measure_all(args, measure_preset, show, "advice.json")


if __name__ == "__main__":
    main()

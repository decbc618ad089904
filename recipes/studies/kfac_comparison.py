"""K-FAC beside kfac-pytorch and plain SGD on an emulated cluster: seconds and bytes per step, in alternating runs.

    git clone https://github.com/gpauloski/kfac-pytorch
    python recipes/studies/kfac_comparison.py --peer kfac-pytorch --preset cnn convnet vit --out runs/kfac-comparison

Both get the same model, batches and hyper-parameters, and follow the same losses. kfac-pytorch takes its best strategy:
inverses, triangles, one owner (MEM-OPT) where factors are renewed in every step, else all ranks (COMM-OPT). Each
round runs all ways in random order; ratios are of one round. "decoupled" is K-FAC as part of a `DecoupledState`, with
the buckets that suit it. Needs root (see docs/lab.md).
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the recipes' directory

from lab import Cluster
from studies._ranks import Answer, Ranks, Row, mean, measure_all, slowest_s, study_parser
from studies._tables import Cells

TITLE = "K-FAC beside kfac-pytorch and SGD (medians)"
WORKER = "kfac_comparison_worker.py"
WAYS = ("sgd", "kfac-pytorch", "kfac", "decoupled")
OURS = ("kfac", "decoupled")
RATES_MBIT = {"cnn": 1200.0, "convnet": 190.0, "vit": 100.0}
LOSS_TOLERANCE = 1e-2  # the package differs from itself by 7e-3 from one of its strategies to another
COMPARED_STEPS = 10


def measure_round(ranks: Ranks, steps: int, periods: Sequence[int], number: int) -> dict[str, list[Answer]]:
    order = list(WAYS)
    random.Random(number).shuffle(order)
    answers = {way: ranks.run(way=way, steps=steps, periods=periods) for way in order}
    for own, other in (
        (a, b) for way in OURS for a, b in zip(answers[way], answers["kfac-pytorch"], strict=True)
    ):
        pairs = zip(own["losses"][:COMPARED_STEPS], other["losses"][:COMPARED_STEPS], strict=True)
        worst = max(abs(a - b) / abs(b) for a, b in pairs)
        if worst > LOSS_TOLERANCE:
            raise RuntimeError(
                f"expected both K-FACs to follow the same losses, got {worst:.1e} between them"
            )
    return answers


def measure_preset(
    cluster: Cluster, preset: str, args: argparse.Namespace, advance: Callable[[], None]
) -> Iterable[Row]:
    """All periods of one model."""
    cluster.set_rate(RATES_MBIT[preset])
    arguments = ["--model", preset, "--peer", str(args.peer.resolve()), "--bucket-mb", str(args.bucket_mb)]
    ranks = Ranks(cluster, "ranks", WORKER, arguments, args.out / preset)
    for periods in args.ratio:
        steps = args.steps if periods[1] == 1 else periods[1]
        rounds = []
        for number in range(args.repeats):
            rounds.append(measure_round(ranks, steps, periods, number))
            advance()
        yield summarize(preset, periods, rounds)
    ranks.close()


def summarize(preset: str, periods: Sequence[int], rounds: list[dict[str, list[Answer]]]) -> Row:
    step_s = [{way: slowest_s(run[way]) for way in WAYS} for run in rounds]
    sent = {way: statistics.median(mean(run[way], "wire_bytes") for run in rounds) for way in WAYS}
    return {
        "preset": preset,
        "rate_mbit": RATES_MBIT[preset],
        "periods": list(periods),
        "sgd_busy_s": statistics.median(run["sgd"][0]["core_busy_s"] for run in rounds),
        "step_s": {way: statistics.median(each[way] for each in step_s) for way in WAYS},
        "over_peer": sorted(each["kfac"] / each["kfac-pytorch"] for each in step_s),
        "decoupled_over_peer": sorted(each["decoupled"] / each["kfac-pytorch"] for each in step_s),
        "over_sgd": statistics.median(each["kfac"] / each["sgd"] for each in step_s),
        "wire_bytes": sent,
    }


def cells(row: Row) -> Cells:
    """What the table says of a row."""
    over, decoupled = row["over_peer"], row["decoupled_over_peer"]
    sent = [row["wire_bytes"][way] / 1e6 for way in ("kfac", "kfac-pytorch", "sgd")]
    return {
        "model": row["preset"],
        "Mbit/s": f"{row['rate_mbit']:.0f}",
        "every": " / ".join(map(str, row["periods"])),
        "this / kfac-pytorch": statistics.median(over),
        "least to greatest": f"{over[0]:.2f} to {over[-1]:.2f}",
        "decoupled / kfac-pytorch": statistics.median(decoupled),
        "its least to greatest": f"{decoupled[0]:.2f} to {decoupled[-1]:.2f}",
        "this / SGD": row["over_sgd"],
        "MB: this, it, SGD": ", ".join(f"{megabytes:.2f}" for megabytes in sent),
    }


def main(argv: Sequence[str] | None = None) -> list[Row]:
    parser = study_parser(__doc__, list(RATES_MBIT), "kfac-comparison", choices=list(RATES_MBIT))
    parser.add_argument("--peer", type=Path, required=True, help="kfac-pytorch's checkout")
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
    args = parser.parse_args(argv)
    if not (args.peer / "kfac").is_dir():
        parser.error(
            f"expected a checkout of kfac-pytorch, got {args.peer}; git clone it and pass its directory"
        )
    return measure_all(args, measure_preset, TITLE, cells, "kfac_comparison.json")


if __name__ == "__main__":
    main()

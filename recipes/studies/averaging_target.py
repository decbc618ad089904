"""Seconds to a test loss, of every way of training at the same tuning budget, on an emulated cluster.

    python recipes/studies/averaging_target.py --task mlp --only-tune
    python recipes/studies/averaging_target.py --task mlp --ratio 3
    python recipes/studies/averaging_target.py --task mlp --ratio 0.2 1 3 --whole --picture docs/averaging.png

First each way is trained with each learning rate of the same list, from the same seed and over the same samples, on
real ranks without the lab's link: the rate that needs the fewest steps to the target is its own; ``tuned.json`` keeps
it. Then each way trains in the lab from ``--repeats`` other seeds. The clock stands still while the model is judged;
there all ranks meet, and exchanges in flight go on. ``--slow 3`` makes the last rank three times slower, by sleeping.
M/C is of plain DDP's step. Needs root (see docs/lab.md).
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the recipes' directory

from lab import Cluster, rate_for
from studies._ranks import CALIBRATION_MBIT, Answer, Ranks, Row, mean
from studies._tables import Cells, show_table

WORKER = "averaging_target_worker.py"
WAYS = ("ddp", "decoupled", "accumulation", "fp16", "powersgd", "delayed", "diloco", "wild")
PLAIN = ("accumulation", "fp16", "powersgd")
OURS = ("delayed", "diloco", "wild")
TARGETS = {"mlp": 0.8, "resnet": 0.8}
RATES = (0.03, 0.06, 0.12, 0.24)
TUNING_SEED = 1000


def order_of(way: str, rate: float, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return what a worker is told."""
    order = {"task": args.task, "way": way, "rate": rate, "seed": seed, "steps": args.steps}
    every = args.sync_every
    return {
        **order,
        "sync_every": every,
        "judge_every": args.judge_every,
        "delay": every - 1,
        "fragments": every,
    }


def steps_to(losses: Sequence[float], target: float, judge_every: int) -> float:
    """Return the steps after which a loss of at most the target was found first."""
    return next((n * judge_every for n, loss in enumerate(losses, 1) if loss <= target), math.inf)


def seconds_to(answers: Sequence[Answer], target: float) -> float:
    """Return the seconds until then, of the slowest rank between any two judgements."""
    judged = steps_to(answers[0]["losses"], target, 1)
    if math.isinf(judged):
        return math.inf
    slowest_s = [max(times) for times in zip(*[answer["times_s"] for answer in answers], strict=True)]
    return float(sum(slowest_s[: int(judged)]))


def tune(args: argparse.Namespace, target: float, path: Path) -> dict[str, Any]:
    """Return each way's learning rate, and what all trials have found; ``path`` keeps those of former calls."""
    trials: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
    missing = [way for way in args.way if way not in trials]
    if not missing:
        return trials
    with Cluster(nodes=args.nodes, shaped=False) as cluster:
        ranks = Ranks(cluster, "tuning", WORKER, [], path.parent)
        for way in missing:
            found = {}
            for rate in RATES:
                answers = ranks.run(**order_of(way, rate, TUNING_SEED, args), target=target)
                losses = answers[0]["losses"]
                found[rate] = steps_to(losses, target, args.judge_every), losses[-1]
            best = min(
                found, key=lambda rate: tuple(x if math.isfinite(x) else math.inf for x in found[rate])
            )
            trials[way] = {"rate": best, "trials": {str(rate): list(each) for rate, each in found.items()}}
            path.write_text(json.dumps(trials))
            Console(stderr=True).print(f"{args.task}, {way}: rate {best:g}", trials[way]["trials"])
        ranks.close()
    return trials


def measure(
    cluster: Cluster,
    ranks: Ranks,
    ratio: float,
    tuned: Mapping[str, Any],
    args: argparse.Namespace,
    target: float,
) -> Row:
    """Train all ways in alternating order, from the same seeds; what there is is kept after each repeat."""
    cluster.set_rate(CALIBRATION_MBIT)
    alone = ranks.run(**{**order_of("ddp", tuned["ddp"]["rate"], 0, args), "steps": 96, "judge_every": 96})
    c_s, sent = mean(alone, "core_busy_s"), mean(alone, "wire_bytes")
    cluster.set_rate(rate_for(ratio, c_s, sent))
    kind = "whole" if args.whole else "target"
    runs: list[dict[str, list[Answer]]] = []
    for repeat in range(args.repeats):
        order = list(args.way)
        random.Random(repeat).shuffle(order)
        runs.append({way: ranks.run(**lab_order(way, repeat, c_s, tuned, args, target)) for way in order})
        row = summarize(runs, ratio, c_s, tuned, args, target)
        (args.out / args.task / f"{kind}-{ratio:g}-slow{args.slow:g}.json").write_text(json.dumps(row))
    return row


def lab_order(
    way: str, seed: int, c_s: float, tuned: Mapping[str, Any], args: argparse.Namespace, target: float
) -> dict[str, Any]:
    order = order_of(way, tuned[way]["rate"], seed, args)
    if args.slow > 1:
        share = int(args.slow) if way == "wild" else 1
        order |= {"slow_s": (args.slow - 1) * c_s, "slow_share": share}
    return order if args.whole else {**order, "target": target}


def summarize(
    runs: Sequence[Mapping[str, list[Answer]]],
    ratio: float,
    c_s: float,
    tuned: Mapping[str, Any],
    args: argparse.Namespace,
    target: float,
) -> Row:
    """Medians over the repeats."""
    ways = list(runs[0])
    every = args.judge_every
    to_target = {way: statistics.median(seconds_to(run[way], target) for run in runs) for way in ways}
    curves = {way: [run[way][0]["losses"] for run in runs] for way in ways}
    segments = {
        way: [[max(t) for t in zip(*[a["times_s"] for a in run[way]], strict=True)] for run in runs]
        for way in ways
    }
    row: Row = {
        "task": args.task,
        "repeats": len(runs),
        "ratio": ratio,
        "slow": args.slow,
        "c_s": c_s,
        "target": target,
        "rate": {way: tuned[way]["rate"] for way in ways},
        "steps": {
            way: statistics.median(steps_to(each, target, every) for each in curves[way]) for way in ways
        },
        "step_s": {way: statistics.median(t / every for each in segments[way] for t in each) for way in ways},
        "to_target_s": to_target,
        "curves": curves,
        "segments_s": segments,
    }
    ours, plain = ([to_target[way] for way in ways if way in some] for some in (OURS, PLAIN))
    if ours and "ddp" in to_target:
        row["over_ddp"] = to_target["ddp"] / min(ours)
    if ours and plain:
        row["over_best_plain"] = min(plain) / min(ours)
    return row


def cells(row: Row) -> list[Cells]:
    """A line for each way."""
    return [
        {
            "model": row["task"],
            "M/C": row["ratio"],
            "slow": row["slow"],
            "way": way,
            "learning rate": row["rate"][way],
            "steps": row["steps"][way],
            "ms a step": 1e3 * row["step_s"][way],
            "s to target": row["to_target_s"][way],
            "DDP's over it": row["to_target_s"]["ddp"] / row["to_target_s"][way],
        }
        for way in row["to_target_s"]
    ]


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw the mean test loss of all repeats over training seconds, a panel for each row."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * len(rows), 3.8), layout="constrained")
    for place, row in enumerate(rows):
        axes = figure.add_subplot(1, len(rows), place + 1)
        for way, curves in row["curves"].items():
            losses = [statistics.fmean(each) for each in zip(*curves, strict=True)]
            at_s = [statistics.fmean(each) for each in zip(*row["segments_s"][way], strict=True)]
            so_far = [sum(at_s[: n + 1]) for n in range(len(at_s))]
            axes.plot(so_far, losses, label=way, linewidth=1.2, linestyle="-" if way in OURS else "--")
        slow = f", one rank {row['slow']:g} times slower" if row["slow"] > 1 else ""
        axes.set(title=f"M/C {row['ratio']:g}{slow}", xlabel="training seconds", yscale="log")
        axes.axhline(row["target"], color="grey", linewidth=0.6)
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("test loss")
    figure.axes[-1].legend(fontsize=7)
    figure.savefig(path, dpi=75)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", choices=sorted(TARGETS), default="mlp")
    parser.add_argument("--ratio", nargs="+", type=float, default=[3.0], help="M/C (default 3)")
    parser.add_argument("--way", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--target", type=float, help="test loss; default: the task's")
    parser.add_argument("--steps", type=int, default=384, help="at most, of each rank (default 384)")
    parser.add_argument("--judge-every", type=int, default=24, help="steps (default 24)")
    parser.add_argument("--sync-every", type=int, default=4)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--slow", type=float, default=1.0, help="how many times slower the last rank is")
    parser.add_argument("--whole", action="store_true", help="do not stop at the target: for the picture")
    parser.add_argument("--only-tune", action="store_true", help="no lab")
    parser.add_argument(
        "--picture", type=Path, help="draw all results in --out of this task, made with --whole"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/averaging-target"))
    args = parser.parse_args(argv)
    args.way = ["ddp", *(way for way in args.way if way != "ddp")]  # of which C is
    return args


def main(argv: Sequence[str] | None = None) -> list[Row]:
    args = parse(argv)
    args.out = args.out.resolve()
    directory: Path = args.out / args.task
    directory.mkdir(parents=True, exist_ok=True)
    target = TARGETS[args.task] if args.target is None else args.target
    tuned, rows = tune(args, target, directory / "tuned.json"), list[Row]()
    if args.only_tune:
        return rows
    with Cluster(nodes=args.nodes, rate_mbit=CALIBRATION_MBIT) as cluster:
        ranks = Ranks(cluster, "ranks", WORKER, [], directory)
        for ratio in args.ratio:
            rows.append(measure(cluster, ranks, ratio, tuned, args, target))
        ranks.close()
    show_table(Console(), "Seconds to the target (medians)", [each for row in rows for each in cells(row)])
    if args.picture:
        drawn = [json.loads(path.read_text()) for path in directory.glob("whole-*.json")]
        draw(sorted(drawn, key=lambda row: (row["slow"], row["ratio"])), args.picture)
    return rows


if __name__ == "__main__":
    main()

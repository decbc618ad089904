"""Decoupled training against plain DDP, FSDP2 and ZeRO on an emulated cluster.

    python recipes/studies/decoupled.py --preset convnet deep_vit convnext --ratio 0.75 1.0 1.25 1.5 2.0

For each preset and each ratio M/C (wire time of a step's gradients to its compute) it sets the link's rate, looks for
plain DDP's best bucket size, lets the package plan its own, and then alternates the ways of training. The wire's
limit is max(C, M), with C and the bytes of plain DDP's own runs. Needs root (see docs/lab.md).
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the recipes' directory

from lab import Cluster, rate_for
from lab.analysis import wire_s
from studies._ranks import (
    CALIBRATION_MBIT,
    CALIBRATION_STEPS,
    Answer,
    Ranks,
    Row,
    mean,
    measure_all,
    slowest_s,
    study_parser,
)
from studies._tables import Cells

TITLE = "Decoupled training: speed-up over the other ways (medians)"
WORKER = "decoupled_worker.py"
FIRST_WAYS = ("ddp", "decoupled")
WAYS = (*FIRST_WAYS, "fsdp", "zero")
UNSHAPED_MBIT = 8000.0
# Plain DDP's candidates: the model in two buckets, in four, ...
BUCKETS = (2, 4, 8, 16)
SEARCH_STEPS = 5
TRIAL_STEPS = 32  # decoupled training has found out by then whether deferring is worth it


def start(cluster: Cluster, preset: str, out: Path) -> Ranks:
    """Start the ranks of one preset."""
    return Ranks(cluster, "ranks", WORKER, ["--preset", preset], out / preset)


def train(
    ranks: Ranks, way: str, steps: int, options: dict[str, Any] | None = None, **more: int
) -> list[Answer]:
    """Train one way, with such options of DDP."""
    return ranks.run(way=way, steps=steps, options=options or {}, **more)


def plan_of(ranks: Ranks) -> dict[str, Any]:
    """Let the package plan buckets on the link as it is now."""
    ranks.tell(do="plan")
    return ranks.hear("plan")[0]


def best_cap_mb(ranks: Ranks, size_bytes: float) -> float:
    """Find plain DDP's best bucket size, by trying."""
    caps = [size_bytes / 2**20 / count for count in BUCKETS]
    return min(caps, key=lambda cap: slowest_s(train(ranks, "ddp", SEARCH_STEPS, {"bucket_cap_mb": cap})))


def measure_once(
    ranks: Ranks, args: argparse.Namespace, options: dict[str, dict[str, Any]], repeat: int
) -> dict[str, list[Answer]]:
    order = [way for way in args.way if way in FIRST_WAYS or repeat < args.other_repeats]
    random.Random(repeat).shuffle(order)
    more = {way: {"warm_up": args.warm_up} for way in FIRST_WAYS}
    answers = {way: train(ranks, way, args.steps, options.get(way), **more.get(way, {})) for way in order}
    losses = {way: [answer["losses"] for answer in answers[way]] for way in FIRST_WAYS}
    if losses["decoupled"] != losses["ddp"] and len(losses["ddp"]) == 2:
        raise RuntimeError("decoupled training has other losses than plain DDP")
    return answers


def summarize(
    preset: str,
    ratio: float,
    rate_mbit: float,
    plan: dict[str, Any],
    runs: Sequence[Mapping[str, list[Answer]]],
) -> Row:
    """Medians over the repeats, and the wire's limit from plain DDP's own C and M."""
    times = [{way: slowest_s(answers) for way, answers in run.items()} for run in runs]
    step_s = {way: statistics.median(each[way] for each in times if way in each) for way in times[0]}
    c_s = statistics.median(mean(run["ddp"], "core_busy_s") for run in runs)
    m_s = wire_s(statistics.median(mean(run["ddp"], "wire_bytes") for run in runs), rate_mbit)
    return {
        "preset": preset,
        "ratio": ratio,
        "rate_mbit": rate_mbit,
        "c_s": c_s,
        "m_s": m_s,
        "decoupled_c_s": statistics.median(mean(run["decoupled"], "core_busy_s") for run in runs),
        "limit_s": max(c_s, m_s),
        "of_limit": max(c_s, m_s) / step_s["decoupled"],
        "step_s": step_s,
        "speed_up": {
            way: statistics.median(each[way] / each["decoupled"] for each in times if way in each)
            for way in step_s
        },
        "deferring": [run["decoupled"][0]["deferring"] for run in runs],
        "wire_ratio": statistics.median(
            mean(run["decoupled"], "wire_bytes") / mean(run["ddp"], "wire_bytes") for run in runs
        ),
        "plan": plan,
        "runs": times,
    }


def measure_preset(
    cluster: Cluster, preset: str, args: argparse.Namespace, advance: Callable[[], None]
) -> Iterable[Row]:
    """All ratios of one preset; the link's rate follows from the compute time measured first."""
    ranks = start(cluster, preset, args.out)
    cluster.set_rate(CALIBRATION_MBIT)
    first = train(ranks, "ddp", CALIBRATION_STEPS)
    for ratio in args.ratio:
        rate_mbit = UNSHAPED_MBIT
        if ratio:
            rate_mbit = rate_for(ratio, mean(first, "core_busy_s"), mean(first, "wire_bytes"))
        cluster.set_rate(rate_mbit)
        plan = plan_of(ranks)
        plan["ddp_cap_mb"] = best_cap_mb(ranks, plan["size_bytes"])
        best = {"bucket_cap_mb": plan["ddp_cap_mb"]}
        own = {"bucket_cap_mb": args.cap_mb} if args.cap_mb else plan["options"]
        options = {"ddp": best, "zero": best, "decoupled": own}
        runs = []
        for repeat in range(args.repeats):
            runs.append(measure_once(ranks, args, options, repeat))
            advance()
        yield summarize(preset, ratio, rate_mbit, plan, runs)
    ranks.close()


def cells(row: Row) -> Cells:
    """What the table says of a row."""
    return {
        "model": row["preset"],
        "M/C": row["m_s"] / row["c_s"],
        "C s": row["c_s"],
        "M s": row["m_s"],
        "step s": row["step_s"]["decoupled"],
        "of limit": row["of_limit"],
        "planned s": row["plan"]["step_s"],
        "buckets": str(row["plan"]["buckets"]),
        "deferring": f"{sum(map(bool, row['deferring']))} of {len(row['deferring'])}",
        **{f"over {way}": factor for way, factor in row["speed_up"].items() if way != "decoupled"},
    }


def main(argv: Sequence[str] | None = None) -> list[Row]:
    parser = study_parser(__doc__, ["convnet", "deep_vit", "convnext"], "decoupled")
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
    parser.add_argument("--cap-mb", type=float, help="bucket size of decoupled, instead of the planned one")
    args = parser.parse_args(argv)
    args.way = list(dict.fromkeys([*FIRST_WAYS, *args.way]))
    return measure_all(args, measure_preset, TITLE, cells, "decoupled.json")


if __name__ == "__main__":
    main()

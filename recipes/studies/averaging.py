"""Replicas that do not wait for the network, against plain DDP and what else helps, on an emulated cluster.

    python recipes/studies/averaging.py --preset convnet --ratio 1 2 3
    python recipes/studies/averaging.py --preset gpt --ratio 1
    python recipes/studies/averaging.py --preset convnet --ratio 3 --way apart async sync --slow 3

For each preset and each ratio M/C (wire time of a step's gradients to its compute) it sets the link's rate, and then
alternates the ways of training. Delayed averaging streams one fragment a step. The bound is max(C, M / sync_every),
with C and the bytes of plain DDP's own runs. ``--slow 3`` makes the last rank three times slower, by sleeping; "apart"
are replicas that exchange nothing, whose pace is each rank's own. Needs root (see docs/lab.md).
"""

from __future__ import annotations

import argparse
import json
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
    Answer,
    Ranks,
    Row,
    mean,
    measure_all,
    slowest_s,
    study_parser,
)
from studies._tables import Cells

TITLE = "Averaged replicas: speed-up over the other ways (medians)"
WORKER = "averaging_worker.py"
WAYS = ("ddp", "decoupled", "accumulation", "fp16", "apart", "local", "delayed", "sync", "async", "wild")
CALIBRATION_STEPS = 8
DECOUPLED_WARM_UP = 32  # it has found out by then whether deferring is worth it


def order_of(way: str, args: argparse.Namespace, c_s: float) -> dict[str, Any]:
    """Return what a worker is told for one way."""
    every = args.sync_every
    order: dict[str, Any] = {"way": way, "steps": args.steps, "sync_every": every, "warm_up": 2 * every}
    if way == "delayed":
        order |= {"delay": args.delay, "fragments": args.fragments or every}
    if way == "decoupled":
        order["warm_up"] = DECOUPLED_WARM_UP
    if args.slow > 1:
        # Ranks that wait for each other make as many steps as the slow one; others do not.
        share = int(args.slow) if way in ("apart", "async", "wild") else 1
        order |= {"slow_s": (args.slow - 1) * c_s, "slow_share": share}
    return order


def measure_once(ranks: Ranks, args: argparse.Namespace, c_s: float, repeat: int) -> dict[str, list[Answer]]:
    order = list(args.way)
    random.Random(repeat).shuffle(order)
    return {way: ranks.run(**order_of(way, args, c_s)) for way in order}


def samples_per_s(answers: Iterable[Answer]) -> float:
    """Return the mini-batches of all ranks in a second."""
    return float(sum(1 / answer["step_s"] for answer in answers))


def summarize(
    preset: str,
    ratio: float,
    rate_mbit: float,
    args: argparse.Namespace,
    runs: Sequence[Mapping[str, list[Answer]]],
    alone: Sequence[Answer],
) -> Row:
    """Medians over the repeats; C and the bytes of plain DDP's own runs make the bound."""
    step_s = {way: statistics.median(slowest_s(run[way]) for run in runs) for way in runs[0]}
    reference = "ddp" if "ddp" in runs[0] else args.way[0]
    c_s = (
        statistics.median(mean(run[reference], "core_busy_s") for run in runs)
        if args.slow <= 1
        else mean(alone, "core_busy_s")
    )
    m_s = wire_s(mean(alone, "wire_bytes"), rate_mbit)
    bound_s = max(c_s, m_s / args.sync_every)
    row: Row = {
        "preset": preset,
        "ratio": ratio,
        "rate_mbit": rate_mbit,
        "slow": args.slow,
        "sync_every": args.sync_every,
        "delay": args.delay,
        "c_s": c_s,
        "m_s": m_s,
        "bound_s": bound_s,
        "step_s": step_s,
        "fastest_s": {
            way: statistics.median(min(a["step_s"] for a in run[way]) for run in runs) for way in step_s
        },
        "own_c_s": {way: statistics.median(mean(run[way], "core_busy_s") for run in runs) for way in step_s},
        "samples_per_s": {way: statistics.median(samples_per_s(run[way]) for run in runs) for way in step_s},
        "wire_share": {
            way: statistics.median(mean(run[way], "wire_bytes") for run in runs) / mean(alone, "wire_bytes")
            for way in step_s
        },
    }
    if "delayed" in step_s:
        row["of_bound"] = bound_s / step_s["delayed"]
        waited = [[sum(a["waits_s"]) / a["measured"] / c_s for a in run["delayed"]] for run in runs]
        row["waited_of_c"] = statistics.median(each for run in waited for each in run)
        # A rank that is ahead waits for its peers; the one that waits least has nothing to wait for but the wire.
        row["waited_for_wire_of_c"] = statistics.median(min(run) for run in waited)
        row["waits_s"] = [a["waits_s"] for run in runs for a in run["delayed"]]
        row["speed_up"] = {way: step_s[way] / step_s["delayed"] for way in step_s if way != "delayed"}
    if {"apart", "async"} <= step_s.keys():
        paces = [
            min(a["step_s"] for a in run["apart"]) / min(a["step_s"] for a in run["async"]) for run in runs
        ]
        row["own_pace"] = statistics.median(paces)
    return row


def measure_preset(
    cluster: Cluster, preset: str, args: argparse.Namespace, advance: Callable[[], None]
) -> Iterable[Row]:
    """All ratios of one preset; the link's rate follows from the compute time measured first."""
    words = ["--preset", preset, *(["--batch-size", str(args.batch_size)] if args.batch_size else [])]
    ranks = Ranks(cluster, "ranks", WORKER, words, args.out / preset)
    cluster.set_rate(CALIBRATION_MBIT)
    alone = ranks.run(way="ddp", steps=CALIBRATION_STEPS)
    c_s = mean(alone, "core_busy_s")
    for ratio in args.ratio:
        rate_mbit = rate_for(ratio, c_s, mean(alone, "wire_bytes"))
        cluster.set_rate(rate_mbit)
        runs = []
        for repeat in range(args.repeats):
            runs.append(measure_once(ranks, args, c_s, repeat))
            # What there is, if somebody ends the study.
            row = summarize(preset, ratio, rate_mbit, args, runs, alone)
            (args.out / preset / f"so-far-{ratio:g}.json").write_text(json.dumps([row]))
            advance()
        yield {**row, "repeats": len(runs)}
    ranks.close()


def cells(row: Row) -> Cells:
    """What the table says of a row."""
    found: dict[str, float | str | None] = {
        "model": row["preset"],
        "M/C": row["m_s"] / row["c_s"],
        "C s": row["c_s"],
        "bound s": row["bound_s"],
        **{f"{way} s": taken_s for way, taken_s in row["step_s"].items()},
    }
    if "of_bound" in row:
        found = {**found, "of bound": row["of_bound"], "waited/C": row["waited_of_c"]}
        found["for the wire/C"] = row["waited_for_wire_of_c"]
    if row["slow"] > 1:
        found = {**found, **{f"{way} samples/s": rate for way, rate in row["samples_per_s"].items()}}
        found = {**found, **{f"{way} fastest s": taken_s for way, taken_s in row["fastest_s"].items()}}
    if "own_pace" in row:
        found["of own pace"] = row["own_pace"]
    return found


def main(argv: Sequence[str] | None = None) -> list[Row]:
    parser = study_parser(__doc__, ["convnet"], "averaging")
    parser.add_argument("--ratio", nargs="+", type=float, default=[1.0, 2.0, 3.0], help="M/C")
    parser.add_argument(
        "--way", nargs="+", choices=WAYS, default=["ddp", "decoupled", "accumulation", "delayed"]
    )
    parser.add_argument("--sync-every", type=int, default=4)
    parser.add_argument("--delay", type=int, default=2)
    parser.add_argument("--fragments", type=int, default=0, help="default: as many as --sync-every")
    parser.add_argument(
        "--slow", type=float, default=1.0, help="how many times slower the last rank is (default 1)"
    )
    parser.add_argument("--batch-size", type=int, help="of a rank; default: the preset's")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=16, help="a multiple of --sync-every (default 16)")
    args = parser.parse_args(argv)
    if args.steps % args.sync_every:
        parser.error(f"expected --steps to be a multiple of --sync-every={args.sync_every}, got {args.steps}")
    return measure_all(args, measure_preset, TITLE, cells, "averaging.json")


if __name__ == "__main__":
    main()

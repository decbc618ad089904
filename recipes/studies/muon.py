"""Muon on its owners against plain DDP with torch.optim.Muon on an emulated cluster.

    python recipes/studies/muon.py --preset vit gpt --ratio 0 1.0

For each preset and each ratio M/C (wire time of plain DDP's gradients to its compute, Newton-Schulz included; 0: an
unshaped link) it alternates both ways of training. With two ranks their losses must be equal to the last bit. Needs
root (see docs/lab.md).
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

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

TITLE = "Muon on its owners: speed-up over plain DDP with torch.optim.Muon (medians)"
WORKER = "muon_worker.py"
WAYS = ("ddp", "owners")
UNSHAPED_MBIT = 8000.0
Runs = Sequence[Mapping[str, list[Answer]]]


def measure_once(ranks: Ranks, steps: int, repeat: int) -> dict[str, list[Answer]]:
    order = list(WAYS)
    random.Random(repeat).shuffle(order)
    answers = {way: ranks.run(way=way, steps=steps) for way in order}
    losses = {way: [answer["losses"] for answer in answers[way]] for way in WAYS}
    if len(losses["ddp"]) == 2 and losses["ddp"] != losses["owners"]:
        raise RuntimeError("Muon on its owners has other losses than plain DDP with torch's Muon")
    return answers


def median_of(runs: Runs, way: str, figure: str) -> float:
    return statistics.median(mean(run[way], figure) for run in runs)


def summarize(preset: str, ratio: float, rate_mbit: float, runs: Runs) -> Row:
    """Medians over the repeats; work and state of all ranks against plain DDP's."""
    times = [{way: slowest_s(answers) for way, answers in run.items()} for run in runs]
    last = runs[-1]
    trained = len(last["owners"][0]["losses"])
    return {
        "preset": preset,
        "ratio": ratio,
        "rate_mbit": rate_mbit,
        "c_s": median_of(runs, "ddp", "core_busy_s"),
        "m_s": wire_s(median_of(runs, "ddp", "wire_bytes"), rate_mbit),
        "owners_c_s": median_of(runs, "owners", "core_busy_s"),
        "step_s": {way: statistics.median(each[way] for each in times) for way in WAYS},
        "speed_up": statistics.median(each["ddp"] / each["owners"] for each in times),
        "wire_ratio": median_of(runs, "owners", "wire_bytes") / median_of(runs, "ddp", "wire_bytes"),
        "calls_per_matrix": sum(each["calls"] for each in last["owners"])
        / (last["owners"][0]["matrices"] * trained),
        "busiest_share": last["owners"][0]["busiest_share"],
        "momentum_ratio": max(each["momentum_bytes"] for each in last["owners"])
        / last["ddp"][0]["momentum_bytes"],
        "runs": times,
    }


def measure_preset(
    cluster: Cluster, preset: str, args: argparse.Namespace, advance: Callable[[], None]
) -> Iterable[Row]:
    """All ratios of one preset; the link's rate follows from the compute time measured first."""
    ranks = Ranks(cluster, "ranks", WORKER, ["--preset", preset], args.out / preset)
    cluster.set_rate(CALIBRATION_MBIT)
    first = ranks.run(way="ddp", steps=CALIBRATION_STEPS)
    for ratio in args.ratio:
        rate_mbit = UNSHAPED_MBIT
        if ratio:
            rate_mbit = rate_for(ratio, mean(first, "core_busy_s"), mean(first, "wire_bytes"))
        cluster.set_rate(rate_mbit)
        runs = []
        for repeat in range(args.repeats):
            runs.append(measure_once(ranks, args.steps, repeat))
            advance()
        yield summarize(preset, ratio, rate_mbit, runs)
    ranks.close()


def cells(row: Row) -> Cells:
    """What the table says of a row."""
    return {
        "model": row["preset"],
        "M/C": row["m_s"] / row["c_s"],
        "C s": row["c_s"],
        "M s": row["m_s"],
        "owners' C s": row["owners_c_s"],
        **{f"{way} s": row["step_s"][way] for way in WAYS},
        "speed-up": row["speed_up"],
        "wire bytes": row["wire_ratio"],
        "NS calls": row["calls_per_matrix"],
        "busiest": row["busiest_share"],
        "momentum": row["momentum_ratio"],
    }


def main(argv: Sequence[str] | None = None) -> list[Row]:
    parser = study_parser(__doc__, ["vit", "gpt"], "muon")
    parser.add_argument("--ratio", nargs="+", type=float, default=[0.0, 1.0], help="M/C; 0: unshaped")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    return measure_all(parser.parse_args(argv), measure_preset, TITLE, cells, "muon.json")


if __name__ == "__main__":
    main()

"""Muon on its owners beside other public Muons under DDP on an emulated cluster: seconds and bytes, alternating runs.

    git clone https://github.com/KellerJordan/Muon keller
    git clone https://github.com/microsoft/dion
    python recipes/studies/muon_comparison.py --keller keller --dion dion --preset vit gpt --ratio 0 1.0

All get the same model, batches and hyper-parameters; the other parameters are AdamW's. KellerJordan's follows torch's
losses; dion's Newton-Schulz has other coefficients, and is compared by time and bytes only. ``layers`` is the general
form, ``DecoupledState([muon, adamw], owners="layers")``. Each round runs all ways in random order; ratios are of one
round. M/C as in `muon.py`. Needs root (see docs/lab.md).
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

TITLE = "Muon on its owners beside other Muons under DDP (medians)"
WORKER = "muon_comparison_worker.py"
OURS = ("owners", "layers")
UNSHAPED_MBIT = 8000.0
LOSS_TOLERANCE = 1e-2
COMPARED_STEPS = 8
PEERS = {"keller": "muon.py", "dion": "dion/muon.py"}
Round = Mapping[str, list[Answer]]


def measure_round(ranks: Ranks, ways: Sequence[str], steps: int, number: int) -> dict[str, list[Answer]]:
    order = list(ways)
    random.Random(number).shuffle(order)
    answers = {way: ranks.run(way=way, steps=steps) for way in order}
    check_losses(answers)
    return answers


def check_losses(answers: Round) -> None:
    """Ours are torch's to the last bit with two ranks; KellerJordan's are near."""
    losses = {way: [answer["losses"] for answer in answers[way]] for way in answers}
    for way in OURS:
        if way in losses and len(losses["ddp"]) == 2 and losses[way] != losses["ddp"]:
            raise RuntimeError(
                f"expected the losses of plain DDP with torch's Muon to the last bit from {way}"
            )
    if "keller" in losses:
        pairs = zip(losses["keller"][0][:COMPARED_STEPS], losses["ddp"][0][:COMPARED_STEPS], strict=True)
        worst = max(abs(a - b) / abs(b) for a, b in pairs)
        if worst > LOSS_TOLERANCE:
            raise RuntimeError(f"expected both Muons to follow the same losses, got {worst:.1e} between them")


def summarize(preset: str, ratio: float, rate_mbit: float, rounds: Sequence[Round]) -> Row:
    ways = list(rounds[0])
    step_s = [{way: slowest_s(run[way]) for way in ways} for run in rounds]
    sent = {way: statistics.median(mean(run[way], "wire_bytes") for run in rounds) for way in ways}
    return {
        "preset": preset,
        "ratio": ratio,
        "rate_mbit": rate_mbit,
        "c_s": statistics.median(mean(run["ddp"], "core_busy_s") for run in rounds),
        "m_s": wire_s(sent["ddp"], rate_mbit),
        "step_s": {way: statistics.median(each[way] for each in step_s) for way in ways},
        "owners_over": {
            way: sorted(each[way] / each["owners"] for each in step_s) for way in ways if way not in OURS
        },
        "bytes_over_ddp": {way: sent[way] / sent["ddp"] for way in ways},
    }


def measure_preset(
    cluster: Cluster, preset: str, args: argparse.Namespace, advance: Callable[[], None]
) -> Iterable[Row]:
    """All ratios of one preset; the link's rate follows from the compute time measured first."""
    peers = [name for name in PEERS if getattr(args, name) is not None]
    ways = ["ddp", *OURS, *peers]
    arguments = ["--preset", preset]
    for name in peers:
        arguments += [f"--{name}", str(getattr(args, name).resolve())]
    ranks = Ranks(cluster, "ranks", WORKER, arguments, args.out / preset)
    cluster.set_rate(CALIBRATION_MBIT)
    first = ranks.run(way="ddp", steps=CALIBRATION_STEPS)
    for ratio in args.ratio:
        rate_mbit = UNSHAPED_MBIT
        if ratio:
            rate_mbit = rate_for(ratio, mean(first, "core_busy_s"), mean(first, "wire_bytes"))
        cluster.set_rate(rate_mbit)
        rounds = []
        for number in range(args.repeats):
            rounds.append(measure_round(ranks, ways, args.steps, number))
            advance()
        yield summarize(preset, ratio, rate_mbit, rounds)
    ranks.close()


def cells(row: Row) -> Cells:
    """What the table says of a row."""
    return {
        "model": row["preset"],
        "M/C": row["m_s"] / row["c_s"],
        "Mbit/s": f"{row['rate_mbit']:.0f}",
        **{f"{way} s": seconds for way, seconds in row["step_s"].items()},
        **{f"{way} / owners": statistics.median(over) for way, over in row["owners_over"].items()},
        "bytes": ", ".join(f"{way} {ratio:.2f}" for way, ratio in row["bytes_over_ddp"].items()),
    }


def main(argv: Sequence[str] | None = None) -> list[Row]:
    parser = study_parser(__doc__, ["vit", "gpt"], "muon-comparison")
    for name, file in PEERS.items():
        parser.add_argument(f"--{name}", type=Path, help=f"checkout with {file}; default: without it")
    parser.add_argument("--ratio", nargs="+", type=float, default=[0.0, 1.0], help="M/C; 0: unshaped")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args(argv)
    for name, file in PEERS.items():
        path = getattr(args, name)
        if path is not None and not (path / file).is_file():
            parser.error(
                f"expected a checkout with {file}, got --{name} {path}; git clone it and pass its directory"
            )
    return measure_all(args, measure_preset, TITLE, cells, "muon_comparison.json")


if __name__ == "__main__":
    main()

"""Codecs on an emulated cluster: step times, two siblings, and what `plan_codec` chooses.

    python recipes/studies/codecs_lab.py steps --preset resnet18 vit_tiny mlp --rate 200
    python recipes/studies/codecs_lab.py siblings --preset convnet vit --ratio 2 3
    python recipes/studies/codecs_lab.py plan --preset vit --rate 50 200 1000 8000

``steps``: a step with each codec, and with torch's PowerSGD of rank 2, over plain DDP's, in alternating runs. The
models are of full size, with small batches. ``siblings``: two jobs with Int8 that take turns, against both in float32
one after the other, beside the bound with Int8's own C, N and M; ``--ratio`` is M/C in float32. ``plan``: the step with
the codec that is chosen after a run without one, over the best of all. Needs root (see docs/lab.md).
"""

from __future__ import annotations

import argparse
import functools
import random
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the recipes' directory

from _models import PRESETS
from lab import Cluster, bound, rate_for
from lab.analysis import wire_s
from studies._ranks import (
    CALIBRATION_MBIT,
    CALIBRATION_STEPS,
    Answer,
    Ranks,
    Row,
    mean,
    measure_all,
    run_together,
    slowest_s,
    study_parser,
)
from studies._tables import Cells
from studies.codecs_worker import CODECS, MODELS

WORKER = "codecs_worker.py"
JOBS = ("a", "b")
FIXED = tuple(CODECS)
Runs = Sequence[Mapping[str, list[Answer]]]


def median_of(runs: Runs, way: str, figure: str) -> float:
    return statistics.median(mean(run[way], figure) for run in runs)


def measure_ways(ranks: Ranks, ways: Sequence[str], steps: int, repeat: int) -> dict[str, list[Answer]]:
    """Run each way once, in random order; all ranks must end with the same parameters."""
    order = list(ways)
    random.Random(repeat).shuffle(order)
    found = {way: ranks.run(way=way, steps=steps) for way in order}
    for way, answers in found.items():
        if len({answer["digest"] for answer in answers}) > 1:
            raise RuntimeError(f"the ranks' parameters differ with {way}")
    return found


# --- steps ---------------------------------------------------------------------------------------------------


def measure_steps(
    cluster: Cluster, preset: str, args: argparse.Namespace, advance: Callable[[], None]
) -> Iterable[Row]:
    """All rates of one model."""
    ranks = Ranks(cluster, "ranks", WORKER, ["--preset", preset], args.out / preset)
    for rate_mbit in args.ratio:
        cluster.set_rate(rate_mbit)
        runs = []
        for repeat in range(args.repeats):
            runs.append(measure_ways(ranks, args.way, args.steps, repeat))
            advance()
        times = [{way: slowest_s(answers) for way, answers in run.items()} for run in runs]
        bytes_of = {way: median_of(runs, way, "wire_bytes") for way in args.way}
        busy_s = {way: median_of(runs, way, "core_busy_s") for way in args.way}
        yield {
            "preset": preset,
            "rate_mbit": rate_mbit,
            "c_s": busy_s["ddp"],
            "m_s": wire_s(bytes_of["ddp"], rate_mbit),
            "ddp_s": statistics.median(each["ddp"] for each in times),
            "over": {way: statistics.median(each[way] / each["ddp"] for each in times) for way in args.way},
            "bytes": {way: each / bytes_of["ddp"] for way, each in bytes_of.items()},
            "busy": {way: each / busy_s["ddp"] for way, each in busy_s.items()},
            "runs": times,
        }
    ranks.close()


def steps_cells(row: Row) -> Cells:
    """What the table says of a row."""
    others = [way for way in row["over"] if way != "ddp"]
    return {
        "model": row["preset"],
        "Mbit/s": row["rate_mbit"],
        "C s": row["c_s"],
        "M s": row["m_s"],
        "ddp s": row["ddp_s"],
        **{way: f"{row['over'][way]:.3f}" for way in others},
        "bytes": " ".join(f"{row['bytes'][way]:.3f}" for way in others),
        "busy": " ".join(f"{row['busy'][way]:.3f}" for way in others),
    }


# --- siblings ------------------------------------------------------------------------------------------------


def measure_siblings(
    cluster: Cluster, preset: str, args: argparse.Namespace, advance: Callable[[], None]
) -> Iterable[Row]:
    """All ratios of one preset; the link's rate follows from the compute time of plain DDP, measured first."""
    jobs = [
        Ranks(cluster, job, WORKER, ["--preset", preset, "--seed", str(seed)], args.out / preset)
        for seed, job in enumerate(JOBS)
    ]
    cluster.set_rate(CALIBRATION_MBIT)
    first = jobs[0].run(way="ddp", steps=CALIBRATION_STEPS)
    for ratio in args.ratio:
        rate_mbit = rate_for(ratio, mean(first, "core_busy_s"), mean(first, "wire_bytes"))
        cluster.set_rate(rate_mbit)
        runs = []
        for repeat in range(args.repeats):
            runs.append(_siblings_once(jobs, args.steps, repeat))
            advance()
        yield {"preset": preset, "ratio": ratio, "rate_mbit": rate_mbit, **_siblings_row(runs, rate_mbit)}
    for job in jobs:
        job.close()


def _siblings_once(jobs: Sequence[Ranks], steps: int, repeat: int) -> dict[str, list[list[Answer]]]:
    """Run float32 and Int8 one after the other, and Int8 side by side without and with turns."""
    alone, together = ("ddp", "compressed int8"), ("compressed int8", "crossover int8")
    order = [(way, True) for way in alone] + [(way, False) for way in together]
    random.Random(repeat).shuffle(order)
    found: dict[str, list[list[Answer]]] = {}
    for way, is_alone in order:
        told = {"way": way, "steps": steps}
        if is_alone:
            found[f"alone {way}"] = [job.run(**told) for job in jobs]
        else:
            found[way] = run_together(jobs, [told, told])
    for number in range(len(jobs)):
        digests = {
            each["digest"] for name, answers in found.items() if "int8" in name for each in answers[number]
        }
        if len(digests) > 1:
            raise RuntimeError("a job with Int8 has other parameters with a sibling than alone")
    return found


def _siblings_row(runs: Sequence[Mapping[str, list[list[Answer]]]], rate_mbit: float) -> Row:
    def each(way: str, figure: Callable[[list[list[Answer]]], float]) -> float:
        return statistics.median(figure(run[way]) for run in runs)

    def makespan_s(answers: list[list[Answer]]) -> float:
        ranks = [answer for job in answers for answer in job]
        return float(max(one["ends_s"][-1] for one in ranks) - min(one["begin_s"] for one in ranks))

    def after_s(answers: list[list[Answer]]) -> float:
        return sum(makespan_s([job]) for job in answers)

    def figure(name: str) -> Callable[[list[list[Answer]]], float]:
        return lambda answers: statistics.mean(mean(job, name) for job in answers)

    coded, exact = "alone compressed int8", "alone ddp"
    c_s, t1_s = each(coded, figure("core_busy_s")), each(coded, figure("step_s"))
    m_s = wire_s(each(coded, figure("wire_bytes")), rate_mbit)
    times = [
        {
            "fp32 after": after_s(run[exact]),
            "int8 after": after_s(run[coded]),
            "side by side": makespan_s(run["compressed int8"]),
            "turns": makespan_s(run["crossover int8"]),
        }
        for run in runs
    ]
    gained = statistics.median(one["int8 after"] / one["turns"] for one in times)
    limit = bound([(c_s, t1_s, m_s)] * 2)
    return {
        "c_s": c_s,
        "m_s": m_s,
        "n_s": t1_s - c_s,
        "exact_c_s": each(exact, figure("core_busy_s")),
        "exact_m_s": wire_s(each(exact, figure("wire_bytes")), rate_mbit),
        "bound": limit,
        "of_int8": gained,
        "of_bound": gained / limit,
        "over_side_by_side": statistics.median(one["side by side"] / one["turns"] for one in times),
        "of_fp32": statistics.median(one["fp32 after"] / one["turns"] for one in times),
        "runs": times,
    }


def siblings_cells(row: Row) -> Cells:
    """What the table says of a row."""
    return {
        "model": row["preset"],
        "fp32 M/C": row["exact_m_s"] / row["exact_c_s"],
        "Int8's C s": row["c_s"],
        "N s": row["n_s"],
        "M s": row["m_s"],
        "bound": row["bound"],
        "turns": row["of_int8"],
        "of bound": row["of_bound"],
        "over side by side": row["over_side_by_side"],
        "over fp32 in turn": row["of_fp32"],
    }


# --- plan ----------------------------------------------------------------------------------------------------


def measure_plan(
    cluster: Cluster, preset: str, args: argparse.Namespace, advance: Callable[[], None]
) -> Iterable[Row]:
    """All rates of one model: each fixed codec in every repeat, and a plan after the run without one."""
    ranks = Ranks(cluster, "ranks", WORKER, ["--preset", preset], args.out / preset)
    for rate_mbit in args.ratio:
        cluster.set_rate(rate_mbit)
        planned = ranks.run(way="compressed split", steps=CALIBRATION_STEPS, plan=True)
        choice = planned[0]["plan"]
        if any(answer["plan"] != choice for answer in planned):
            raise RuntimeError("the ranks have different plans")
        ways = [f"compressed {name}" for name in FIXED]
        runs = []
        for repeat in range(args.repeats):
            runs.append(measure_ways(ranks, ways, args.steps, repeat))
            advance()
        step_s = {
            name: statistics.median(slowest_s(run[f"compressed {name}"]) for run in runs) for name in FIXED
        }
        yield {
            "preset": preset,
            "rate_mbit": rate_mbit,
            "choice": choice,
            "busy_s": {way: median_of(runs, f"compressed {way}", "core_busy_s") for way in FIXED},
            "step_s": step_s,
            "predicted_s": planned[0]["predicted_s"],
            "over_best": step_s[choice] / min(step_s.values()),
        }
    ranks.close()


def plan_cells(row: Row) -> Cells:
    """What the table says of a row."""
    return {
        "model": row["preset"],
        "Mbit/s": row["rate_mbit"],
        "choice": row["choice"],
        **{f"{name} s": row["step_s"][name] for name in FIXED},
        "over the best": row["over_best"],
        "predicted": " ".join(f"{row['predicted_s'][name]:.3f}" for name in FIXED),
    }


def main(argv: Sequence[str] | None = None) -> list[Row]:
    parser = study_parser(__doc__, ["vit"], "codecs", choices=sorted([*MODELS, *PRESETS]))
    parser.add_argument("study", choices=["steps", "siblings", "plan"])
    parser.add_argument("--rate", "--ratio", dest="ratio", nargs="+", type=float, default=[200.0])
    parser.add_argument("--way", nargs="+", default=["compressed int8", "compressed sidco", "powersgd"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args(argv)
    args.way = ["ddp", *args.way]
    measured = functools.partial(measure_all, args)
    if args.study == "siblings":
        return measured(measure_siblings, "Two siblings with Int8 (medians)", siblings_cells, "siblings.json")
    if args.study == "plan":
        return measured(measure_plan, "The codec that is chosen (medians)", plan_cells, "plan.json")
    return measured(measure_steps, "A step over plain DDP's (medians)", steps_cells, "steps.json")


if __name__ == "__main__":
    main()

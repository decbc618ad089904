"""Two sibling jobs on an emulated cluster: one after the other, side by side, and taking turns.

    python recipes/studies/siblings.py --preset vit --ratio 0.75 --repeats 5 --out runs/siblings

For each preset and each ratio M/C (wire time of a step's gradients to its compute) it sets the link's rate, then
alternates the variants and prints their speed-ups against one job after the other, beside the bound
S = 2 T1 / max(2 C, T1, 2 M) computed from the same run. Needs root (see docs/lab.md).
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the recipes' directory

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
    study_parser,
)
from studies._tables import Cells

JOBS = ("a", "b")
TITLE = "Two siblings: speed-up against one job after the other (medians)"
WORKER = "sibling_worker.py"
# The hooks of both jobs where they run at once; "alone" is one after the other.
VARIANTS = {"unmanaged": "none", "crossover": "crossover"}


@dataclass(frozen=True)
class SiblingOutcome:
    """What the ranks of the active jobs said of one run."""

    answers: dict[str, list[Answer]]

    @property
    def makespan_s(self) -> float:
        begin_s = min(answer["begin_s"] for answer in self.all())
        return float(max(answer["ends_s"][-1] for answer in self.all()) - begin_s)

    def mean(self, figure: str) -> float:
        """Mean of a figure per step of a job, over its ranks and the active jobs."""
        return mean(self.all(), figure)

    def results(self, job: str) -> list[tuple[list[float], str]]:
        """Losses and parameters of a job's ranks, which no variant may change."""
        return [(answer["losses"], answer["digest"]) for answer in self.answers[job]]

    def all(self) -> list[Answer]:
        return [answer for answers in self.answers.values() for answer in answers]


class Siblings:
    """The two jobs of one preset, waiting for orders.

    Args:
        cluster: where they run.
        preset: what they train, each with another seed.
        out: directory for logs and timelines.
        work: compute of jobs a and b, in passes a step.
        arguments: further ones of sibling_worker.py.
    """

    def __init__(
        self,
        cluster: Cluster,
        preset: str,
        out: Path,
        work: Sequence[int] = (1, 1),
        arguments: Sequence[str] = (),
    ) -> None:
        self.work = dict(zip(JOBS, work, strict=True))
        self._jobs = {
            job: Ranks(
                cluster, job, WORKER, ["--preset", preset, "--seed", str(seed), *arguments], out / preset
            )
            for seed, job in enumerate(JOBS)
        }

    def run(self, hook: str, steps: int, jobs: Sequence[str] = JOBS) -> SiblingOutcome:
        """Run ``steps`` steps of the jobs under one hook, started together."""
        orders = [{"hook": hook, "steps": steps, "work": self.work[job]} for job in jobs]
        answers = run_together([self._jobs[job] for job in jobs], orders)
        return SiblingOutcome(dict(zip(jobs, answers, strict=True)))

    def close(self) -> None:
        for job in self._jobs.values():
            job.close()


def measure_once(
    siblings: Siblings, steps: int, variants: Mapping[str, str], seed: int, baseline: str = "none"
) -> dict[str, SiblingOutcome]:
    """Run each job alone under the baseline's hook, and both under every variant's, in random order."""
    outcomes: dict[str, SiblingOutcome] = {}
    order = ["alone", *variants]
    random.Random(seed).shuffle(order)
    for variant in order:
        if variant == "alone":
            outcomes |= {f"alone {job}": siblings.run(baseline, steps, [job]) for job in JOBS}
        else:
            outcomes[variant] = siblings.run(variants[variant], steps)
    return outcomes


def figures(outcomes: Mapping[str, SiblingOutcome], steps: int) -> dict[str, Any]:
    """Compare the variants; speed-ups are against one job after the other."""
    alone = [outcomes[f"alone {job}"] for job in JOBS]
    after_s = sum(outcome.makespan_s for outcome in alone)
    together_s = {name: each.makespan_s for name, each in outcomes.items() if not name.startswith("alone")}
    crossover = outcomes["crossover"]
    stats = [answer["stats"] for answer in crossover.all()]
    medians = [one["handover_median_s"] for one in stats if one["handover_median_s"] is not None]
    busy_s = [answer["core_busy_s"] for outcome in alone for answer in outcome.all()]
    return {
        "steps": steps,
        "t1_s": statistics.mean(outcome.mean("step_s") for outcome in alone),
        "c_s": None if None in busy_s else statistics.mean(busy_s),
        "wire_bytes": statistics.mean(outcome.mean("wire_bytes") for outcome in alone),
        "after_s": after_s,
        **{f"{name}_s": taken_s for name, taken_s in together_s.items()},
        **{name: after_s / taken_s for name, taken_s in together_s.items()},
        "over_unmanaged": together_s["unmanaged"] / together_s["crossover"],
        "same_results": all(crossover.results(job) == outcomes[f"alone {job}"].results(job) for job in JOBS),
        "job_s": {
            job: answers[0]["ends_s"][-1] - answers[0]["begin_s"]
            for job, answers in crossover.answers.items()
        },
        "turns": [one["turns"] for one in stats],
        "handovers": sum(one["handovers"] for one in stats),
        "handover_median_s": statistics.median(medians) if medians else None,
        "leases_expired": sum(one["leases_expired"] for one in stats),
        "disabled": [one["disabled_because"] for one in stats if one["disabled_because"]],
        "ordered_by": sorted({str(one["ordered_by"]) for one in stats}),
        "devices": sorted({one["device"] for one in stats}),
    }


def summarize(preset: str, rate_mbit: float | None, runs: Sequence[Mapping[str, Any]]) -> Row:
    """Medians over the repeats, and the bound from the same runs' C, N and M."""
    keys = [key for key, value in runs[0].items() if isinstance(value, float) and key != "handover_median_s"]
    middle = {key: statistics.median(run[key] for run in runs) for key in keys}
    m_s = wire_s(middle["wire_bytes"], rate_mbit)
    limit = bound([(middle["c_s"], middle["t1_s"], m_s)] * 2)
    return {
        "preset": preset,
        "rate_mbit": rate_mbit,
        "m_s": m_s,
        "n_s": middle["t1_s"] - middle["c_s"],
        "bound": limit,
        "of_bound": middle["crossover"] / limit,
        "same_results": all(run["same_results"] for run in runs),
        "ordered_by": sorted({way for run in runs for way in run["ordered_by"]}),
        **middle,
        "runs": runs,
    }


def measure_preset(
    cluster: Cluster, preset: str, args: argparse.Namespace, advance: Callable[[], None]
) -> Iterable[Row]:
    """All ratios of one preset; the link's rate follows from the compute time measured first."""
    siblings = Siblings(cluster, preset, args.out, args.work)
    variants = {**VARIANTS, "unmanaged": args.baseline}
    cluster.set_rate(CALIBRATION_MBIT)
    first = siblings.run(args.baseline, CALIBRATION_STEPS, JOBS[:1])
    for ratio in args.ratio:
        rate_mbit = rate_for(ratio, first.mean("core_busy_s"), first.mean("wire_bytes"))
        cluster.set_rate(rate_mbit)
        runs = []
        for repeat in range(args.repeats):
            outcomes = measure_once(siblings, args.steps, variants, repeat, args.baseline)
            runs.append(figures(outcomes, args.steps))
            if not runs[-1]["same_results"]:
                raise RuntimeError("a job has other losses or parameters with a sibling than alone")
            advance()
        yield {"ratio": ratio, **summarize(preset, rate_mbit, runs)}
    siblings.close()


def cells(row: Row) -> Cells:
    """What the table says of a row."""
    return {
        "model": row["preset"],
        "M/C": row["m_s"] / row["c_s"],
        "C s": row["c_s"],
        "N s": row["n_s"],
        "M s": row["m_s"],
        "bound": row["bound"],
        "crossover": row["crossover"],
        "of bound": row["of_bound"],
        "over unmanaged": row["over_unmanaged"],
    }


def main(argv: Sequence[str] | None = None) -> list[Row]:
    parser = study_parser(__doc__, ["convnet", "vit", "gpt"], "siblings")
    parser.add_argument("--ratio", nargs="+", type=float, default=[0.5, 0.75, 1.0], help="M/C")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument(
        "--baseline", choices=["none", "rsag"], default="none", help="hook of the other variants"
    )
    parser.add_argument(
        "--work", nargs=2, type=int, default=[1, 1], help="compute of jobs a and b, in passes a step"
    )
    args = parser.parse_args(argv)
    return measure_all(args, measure_preset, TITLE, cells, "siblings.json")


if __name__ == "__main__":
    main()

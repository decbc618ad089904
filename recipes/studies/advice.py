"""What `crossover-ddp advise` predicts, beside what the emulated cluster then measures.

    python recipes/studies/advice.py --ratio 0.5 0.75 1.0 1.5                      compute that only sleeps
    python recipes/studies/advice.py --preset convnet vit --repeats 3              real models: on an idle machine only

For each ratio M/C (wire time of a step's gradients to its compute), as often as wanted, it has the steps of a short run
measured and asks for advice, then measures two siblings and decoupled training, and what they are compared to. Medians
are shown; "off" is what was said over what was measured right after it. The job that sleeps
(recipes/studies/sleepy_job.py) leaves the cores alone, so that it measures the prediction and not the machine.
Needs root (see docs/lab.md).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the recipes' directory

from _models import PRESETS
from crossover_ddp.cli.advise import CROSSOVER, DECOUPLED, Figures, figures, measuring
from lab import Cluster, Job, rate_for
from lab.analysis import wire_s
from studies import decoupled
from studies._ranks import (
    CALIBRATION_MBIT,
    CALIBRATION_STEPS,
    Ranks,
    Row,
    measure_all,
    slowest_s,
    study_parser,
)
from studies._tables import Cell, Cells
from studies.siblings import JOBS, WORKER, Siblings
from studies.sleepy_job import LAYER_BYTES

TITLE = "Advice beside measurement (said/measured)"
SLEEP = "sleep"
SLEEPY_JOB = Path(__file__).with_name("sleepy_job.py")
LAYERS, FORWARD_S, BACKWARD_S = 8, 0.2, 0.4
WARM_UP_STEPS = 4
RECORDED_STEPS = 41
TIMEOUT_S = 300.0
WAYS = ("crossover", "decoupled")


def said(found: Figures) -> dict[str, float]:
    """What the advice expects, with what it rests on."""
    return {
        "c_s": found.compute_s,
        "n_s": found.exposed_s,
        "m_s": found.wire_s,
        "crossover": CROSSOVER.expected(found),
        "crossover_bound": CROSSOVER.bound(found),
        "decoupled": DECOUPLED.expected(found),
        "decoupled_bound": DECOUPLED.bound(found),
    }


def row_of(preset: str, ratio: float, rate_mbit: float, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Put what was said beside what was measured: medians over the repeats, each of which has both."""
    row: dict[str, Any] = {"preset": preset, "ratio": ratio, "rate_mbit": rate_mbit, "runs": runs}
    for side in ("said", "measured"):
        row[side] = {key: statistics.median(run[side][key] for run in runs) for key in runs[0][side]}
    row["off"] = {
        way: statistics.median(run["said"][way] / run["measured"][way] for run in runs) - 1 for way in WAYS
    }
    return row


def advised_cap_mb(found: Figures) -> float:
    """Return the bucket size that the advice on decoupled training is for: a sixteenth of the model."""
    return found.size_bytes / 16 / 2**20


# --- compute that sleeps ------------------------------------------------------------------------------------------


class Sleepers:
    """Runs of the job that sleeps, each in a directory of its own."""

    def __init__(self, cluster: Cluster, out: Path, steps: int) -> None:
        self._cluster = cluster
        self._out = out
        self._steps = steps

    def run(
        self,
        hook: str,
        names: Sequence[str] = ("one",),
        cap_mb: float | None = None,
        *,
        steps: int | None = None,
        env: Mapping[str, str] = {},
    ) -> list[list[list[float]]]:
        """Return when each step of each rank of each job ended."""
        steps = steps or self._steps + WARM_UP_STEPS
        words = ["--hook", hook, "--layers", str(LAYERS), "--steps", str(steps)]
        words += ["--forward", str(FORWARD_S / LAYERS), "--backward", str(BACKWARD_S / LAYERS)]
        words += [] if cap_mb is None else ["--bucket-cap-mb", str(cap_mb)]
        jobs = [Job(name, ["python", str(SLEEPY_JOB), *words], env) for name in names]
        self._cluster.run(jobs, TIMEOUT_S, out=self._out / hook)
        logs = [
            [self._out / hook / name / f"rank{rank}.log" for rank in range(self._cluster.nodes)]
            for name in names
        ]
        return [[json.loads(log.read_text().splitlines()[-1])["ends_s"] for log in job] for job in logs]

    def measured(self) -> Figures:
        """Let `advise` measure the job."""
        recording = self._out / "recorded"
        self.run("plain", steps=RECORDED_STEPS, env=measuring(recording))
        return figures(recording)


def step_s(ranks: Sequence[Sequence[float]]) -> float:
    """Return the median: a few steps are always disturbed."""
    settled = [pairwise(ends_s[WARM_UP_STEPS:]) for ends_s in ranks]
    return max(statistics.median(end_s - begin_s for begin_s, end_s in pairs) for pairs in settled)


def shared_step_s(jobs: Sequence[Sequence[Sequence[float]]]) -> float:
    """Return the time per step of all jobs together, while all are in full swing."""
    first = [ranks[0] for ranks in jobs]
    begin_s = max(ends_s[WARM_UP_STEPS] for ends_s in first)
    end_s = min(ends_s[-1] for ends_s in first)
    return (end_s - begin_s) / sum(begin_s < at_s <= end_s for ends_s in first for at_s in ends_s)


def measure_sleep(cluster: Cluster, args: argparse.Namespace, advance: Callable[[], None]) -> Iterable[Row]:
    compute_s = FORWARD_S + BACKWARD_S
    for ratio in args.ratio:
        rate_mbit = rate_for(ratio, compute_s, LAYERS * LAYER_BYTES)
        cluster.set_rate(rate_mbit)
        runs = []
        for repeat in range(args.repeats):
            sleepers = Sleepers(cluster, args.out / f"sleep-{ratio}-{repeat}", args.steps)
            found = sleepers.measured()
            plain_s = step_s(sleepers.run("plain")[0])
            decoupled_s = step_s(sleepers.run("decoupled", cap_mb=advised_cap_mb(found))[0])
            shared_s = shared_step_s(sleepers.run("crossover", JOBS))
            measured = {
                "c_s": compute_s,
                "n_s": plain_s - compute_s,
                "m_s": ratio * compute_s,
                "crossover": plain_s / shared_s,
                "decoupled": plain_s / decoupled_s,
            }
            runs.append({"said": said(found), "measured": measured})
            advance()
        yield row_of(SLEEP, ratio, rate_mbit, runs)


# --- real models --------------------------------------------------------------------------------------------------


def record(cluster: Cluster, preset: str, out: Path) -> Figures:
    """Let `advise` measure the job, alone."""
    recording = out / "meter"
    ranks = Ranks(cluster, "recorded", WORKER, ["--preset", preset], out, measuring(recording))
    ranks.run(hook="none", steps=RECORDED_STEPS)
    ranks.close()
    return figures(recording)


def measure_siblings(siblings: Siblings, steps: int, rate_mbit: float) -> dict[str, float]:
    """Both jobs one after the other with plain DDP, over both at once; one before and one after, against drift."""
    first = siblings.run("none", steps, JOBS[:1])
    together = siblings.run("crossover", steps)
    alone = dict(zip(JOBS, (first, siblings.run("none", steps, JOBS[1:])), strict=True))
    if any(together.results(job) != alone[job].results(job) for job in JOBS):
        raise RuntimeError("a job has other losses or parameters with a sibling than alone")
    step_s, c_s, wire_bytes = (
        statistics.mean(outcome.mean(figure) for outcome in alone.values())
        for figure in ("step_s", "core_busy_s", "wire_bytes")
    )
    return {
        "c_s": c_s,
        "n_s": step_s - c_s,
        "m_s": wire_s(wire_bytes, rate_mbit),
        "crossover": sum(outcome.makespan_s for outcome in alone.values()) / together.makespan_s,
    }


def measure_decoupled(ranks: Ranks, preset: str, cap_mb: float | None, steps: int) -> dict[str, float]:
    """Plain DDP with its own buckets, before and after, over decoupled training with the advised ones."""
    ways = (
        ("ddp", PRESETS[preset].bucket_cap_mb),
        ("decoupled", cap_mb),
        ("ddp", PRESETS[preset].bucket_cap_mb),
    )
    before_s, decoupled_s, after_s = (
        slowest_s(decoupled.train(ranks, way, steps, {"bucket_cap_mb": size_mb})) for way, size_mb in ways
    )
    return {"decoupled": (before_s + after_s) / 2 / decoupled_s}


def measure_preset(
    cluster: Cluster, preset: str, args: argparse.Namespace, advance: Callable[[], None]
) -> Iterable[Row]:
    """All ratios of one preset; the link's rate follows from the compute time measured first."""
    if preset == SLEEP:
        yield from measure_sleep(cluster, args, advance)
        return
    siblings = Siblings(cluster, preset, args.out)
    ranks = decoupled.start(cluster, preset, args.out / "decoupled")
    cluster.set_rate(CALIBRATION_MBIT)
    first = siblings.run("none", CALIBRATION_STEPS, JOBS[:1])
    for ratio in args.ratio:
        rate_mbit = rate_for(ratio, first.mean("core_busy_s"), first.mean("wire_bytes"))
        cluster.set_rate(rate_mbit)
        runs = []
        for repeat in range(args.repeats):
            found = record(cluster, preset, args.out / f"{preset}-{ratio}-{repeat}")
            measured = measure_siblings(siblings, args.steps, rate_mbit)
            measured |= measure_decoupled(ranks, preset, advised_cap_mb(found), args.steps)
            runs.append({"said": said(found), "measured": measured})
            advance()
        yield row_of(preset, ratio, rate_mbit, runs)
    siblings.close()
    ranks.close()


def cells(row: Row) -> Cells:
    """What the table says of a row, as said/measured."""
    said, measured = row["said"], row["measured"]
    found: dict[str, Cell] = {"model": row["preset"], "M/C": f"{measured['m_s'] / measured['c_s']:.2f}"}
    for letter, key in (("C s", "c_s"), ("N s", "n_s"), ("M s", "m_s")):
        found[letter] = f"{said[key]:.3f}/{measured[key]:.3f}"
    for way in WAYS:
        found[way] = f"{said[way]:.2f}/{measured[way]:.2f} ({row['off'][way]:+.0%})"
    return found


def main(argv: Sequence[str] | None = None) -> list[Row]:
    parser = study_parser(__doc__, [SLEEP], "advice", choices=[SLEEP, *PRESETS])
    parser.add_argument("--ratio", nargs="+", type=float, default=[0.5, 0.75, 1.0, 1.5], help="M/C")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--steps", type=int, default=12)
    args = parser.parse_args(argv)
    return measure_all(args, measure_preset, TITLE, cells, "advice.json")


if __name__ == "__main__":
    main()

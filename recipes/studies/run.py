"""Measures rows of docs/measurements.md again, on the emulated cluster.

    python recipes/studies/run.py --list                     the claims
    python recipes/studies/run.py --claim decoupled          all rows of a claim, as Markdown
    python recipes/studies/run.py --claim siblings --preset vit --ratio 1.0 --repeats 3

Each way of a claim is a run of train.py. The link is calibrated so that M/C, with plain gradients,
is the given ratio. Then all ways run in random order, ``--repeats`` times. A factor is computed
within a repeat, and the table has medians over repeats. Losses that must be equal are compared.
Needs root and an idle machine (docs/lab.md).
"""

import argparse
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the recipes' directory

from _models import PRESETS
from crossover_ddp.cli.advise import CROSSOVER, DECOUPLED, Figures, figures, measuring
from lab import STEADY_MEMORY, Cluster, Job, load_run, rate_for
from lab.analysis import MeteredStep, wire_s
from studies.claims import CLAIMS, PLAIN, Claim, Way, fastest

RECIPES = Path(__file__).resolve().parents[1]
CALIBRATION_MBIT = 1000.0
UNSHAPED_MBIT = 8000.0
CALIBRATION_STEPS = 10
ADVISED_STEPS = 41
TIMEOUT_S = 1800.0
# The learning rate of the first thousand steps does not depend on their number, so that ways with
# different warm-ups have the same losses.
TRAINING = "--threads 1 --eval-every 0 --warmup-steps 1000 --log-every 1000000"
NOTHING = replace(PLAIN, arguments="--hook local_sgd --sync-every 1000000")
"""A way that exchanges nothing. It measures C where the load of a core is not known."""

Row = dict[str, Any]
Losses = dict[str, list[list[float]]]


@dataclass(frozen=True)
class Trained:
    """The result of a way in one repeat. Times and bytes are per mini-batch of a job."""

    step_s: float
    busy_s: float | None
    wire_bytes: float
    # By job and rank.
    losses: Losses


def batch_s(logs: Sequence[Sequence[MeteredStep]], way: Way) -> float:
    """Return the seconds per mini-batch of all jobs together, while all of them train.

    Args:
        logs: the logs of one rank number, one for each job.
        way: the way of training.
    """
    begin_s = max(log[way.warm_up].begin_s for log in logs)
    end_s = min(log[-1].end_s for log in logs)
    if end_s <= begin_s:
        raise ValueError(
            "expected jobs that train at the same time, got one after the other; give more --steps"
        )
    done = sum(steps_between(log, begin_s, end_s) for log in logs)
    return (end_s - begin_s) / done / way.batches


def steps_between(log: Iterable[MeteredStep], begin_s: float, end_s: float) -> float:
    """Count a job's steps between two times. Steps at the edges count in part."""
    inside = ((min(end_s, each.end_s) - max(begin_s, each.begin_s)) / each.length_s for each in log)
    return sum(max(0.0, part) for part in inside)


def same_losses(
    expected: Losses, got: Losses, tolerance: float = 0.0, steps: int | None = None
) -> bool:
    """Return whether all ranks of all jobs had the same losses.

    ``steps`` is how many steps are compared, None for all that both trained.
    """
    pairs = (
        (a, b)
        for job in got
        for ranks in zip(expected[job], got[job], strict=True)
        for a, b in islice(zip(*ranks, strict=False), steps)
    )
    return all(abs(a - b) <= tolerance * abs(a) for a, b in pairs)


class Study:
    """One model of one claim, on one cluster."""

    def __init__(self, cluster: Cluster, claim: Claim, preset: str, out: Path) -> None:
        self._cluster = cluster
        self._claim = claim
        self._preset = preset
        self._out = out
        self._first = next(iter(claim.ways))
        self._jobs = "ab" if any(way.jobs > 1 for way in claim.ways.values()) else "a"

    def rows(self) -> Iterator[Row]:
        """Measure at every rate."""
        if self._cluster.rate_mbit is None:
            yield self._row(None)
        elif not self._claim.ratios:
            for rate_mbit in self._claim.rates_mbit:
                yield self._row(rate_mbit)
        else:
            self._cluster.set_rate(CALIBRATION_MBIT)
            alone = self._train("calibration", PLAIN, steps=CALIBRATION_STEPS)
            for ratio in self._claim.ratios:
                shaped = ratio and rate_for(ratio, self._compute_s(alone), alone.wire_bytes)
                yield self._row(min(shaped or UNSHAPED_MBIT, UNSHAPED_MBIT))

    def _row(self, rate_mbit: float | None) -> Row:
        if rate_mbit is not None:
            self._cluster.set_rate(rate_mbit)
        runs = [self._repeat(number) for number in range(self._claim.repeats)]
        return summarize(self._claim, runs, rate_mbit, self._compute_s(runs[-1][self._first])) | {
            "preset": self._preset,
            "said": self._advice() if self._claim.advise else None,
        }

    def _repeat(self, number: int) -> dict[str, Trained]:
        order = list(self._claim.ways)
        random.Random(number).shuffle(order)
        found = {name: self._train(name, self._claim.ways[name]) for name in order}
        expected = found[self._first].losses
        # More than two ranks add in a different order.
        for name in self._claim.exact if self._cluster.nodes == 2 else ():
            if not same_losses(
                expected, found[name].losses, self._claim.tolerance, self._claim.compared
            ):
                raise RuntimeError(
                    f"expected the losses of {self._first!r} with {name!r}, got others"
                )
        return found

    def _train(
        self, name: str, way: Way, steps: int | None = None, env: Mapping[str, str] = {}
    ) -> Trained:
        """Train one way, with its jobs side by side or one after the other."""
        steps = way.warm_up + (steps or self._claim.steps)
        jobs = [
            Job(
                job,
                f"{self._command(way)} --seed {seed} --steps {steps}",
                {**STEADY_MEMORY, **way.variables, **env},
            )
            for seed, job in enumerate(self._jobs)
        ]
        at_once = [jobs] if way.jobs > 1 else [[job] for job in jobs]
        runs = []
        for together in at_once:
            out = self._out / self._preset / name.replace(" ", "-") / together[0].name
            self._cluster.run(together, TIMEOUT_S, out=out)
            runs.append(load_run(out).steps)
        ranks = range(len(runs[0]["a"]))
        settled = [
            log[way.warm_up :] for run in runs for job in run.values() for log in job.values()
        ]
        busy_s = [
            each.core_busy_s for log in settled for each in log if each.core_busy_s is not None
        ]
        return Trained(
            statistics.mean(
                max(batch_s([run[job][rank] for job in run], way) for rank in ranks) for run in runs
            ),
            statistics.mean(busy_s) / way.batches if busy_s else None,
            statistics.mean(each.wire_bytes or 0 for log in settled for each in log) / way.batches,
            {
                job: [[each.loss or 0.0 for each in log] for log in run[job].values()]
                for run in runs
                for job in run
            },
        )

    def _command(self, way: Way) -> str:
        claim = self._claim
        script = RECIPES / way.script
        common = f"--preset {self._preset} {TRAINING} --device cpu {claim.arguments}"
        return f"python {script} {common} {way.arguments}"

    def _compute_s(self, alone: Trained) -> float:
        """Return C: the load of a core or, where that is not known, a step without exchange."""
        if alone.busy_s is not None:
            return alone.busy_s
        return self._train("nothing", NOTHING).step_s

    def _advice(self) -> dict[str, float]:
        """Return the figures and predictions of `crossover-ddp advise` for the first way."""
        directory = self._out / self._preset / "meter"
        jobs = self._jobs
        self._jobs = "a"  # advice is for one job
        self._train("advised", self._claim.ways[self._first], ADVISED_STEPS, measuring(directory))
        self._jobs = jobs
        found: Figures = figures(directory)
        factors = {"turns": CROSSOVER.expected(found), "decoupled": DECOUPLED.expected(found)}
        return {"C": found.compute_s, "N": found.exposed_s, "M": found.wire_s, **factors}


def summarize(
    claim: Claim, runs: Sequence[Mapping[str, Trained]], rate_mbit: float | None, compute_s: float
) -> Row:
    """Compare the ways: medians over repeats of the ratios within a repeat."""
    names = list(claim.ways)
    step_s = {name: statistics.median(run[name].step_s for run in runs) for name in names}
    # The counter of a node has the bytes of both siblings, so only ways with one job count.
    sent = {
        name: statistics.median(run[name].wire_bytes for run in runs)
        for name, way in claim.ways.items()
        if way.jobs == 1
    }
    base = fastest(step_s, claim.against or names[:1])
    m_s = wire_s(sent[names[0]], rate_mbit)
    return {
        "rate_mbit": rate_mbit,
        "c_s": compute_s,
        "n_s": max(0.0, step_s[names[0]] - compute_s),
        "m_s": m_s,
        "bound": claim.limit(compute_s, step_s[base], m_s) if claim.limit else None,
        "over": base,
        "step_s": step_s,
        "factor": {
            name: statistics.median(run[base].step_s / run[name].step_s for run in runs)
            for name in names
        },
        "bytes": {name: each / sent[names[0]] for name, each in sent.items() if sent[names[0]]},
    }


def cells(row: Row) -> dict[str, str]:
    """Return the cells of a row, by heading."""
    bound, said = row["bound"], row["said"] or {}
    found = {
        "model": row["preset"],
        "M/C": f"{row['m_s'] / row['c_s']:.2f}",
        "Mbit/s": f"{row['rate_mbit']:.0f}" if row["rate_mbit"] else "",
        "C, N, M s": f"{row['c_s']:.3f}, {row['n_s']:.3f}, {row['m_s']:.3f}",
        "bound": f"{bound:.2f}" if bound else "",
        "over": row["over"],
    }
    for name, factor in row["factor"].items():
        if name != row["over"]:
            share = f" ({factor / bound:.2f} of the bound)" if bound else ""
            predicted = f", said {said[name]:.2f}" if name in said else ""
            found[name] = f"{factor:.2f}{share}{predicted}"
    found["bytes"] = "; ".join(f"{name} {part:.3f}" for name, part in row["bytes"].items())
    return found


def as_markdown(rows: Sequence[Row]) -> str:
    """Return a table of all rows."""
    lines = [cells(row) for row in rows]
    headings = list(dict.fromkeys(heading for line in lines for heading in line))
    table = [
        headings,
        ["---"] * len(headings),
        *([line.get(each, "") for each in headings] for line in lines),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in table)


def circumstances() -> str:
    """Return the circumstances of all figures: date, machine, load, version of torch."""
    load = os.getloadavg()[0]
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    return (
        f"{time.strftime('%Y-%m-%d')}, {machine}, load {load:.1f} before, torch {torch.__version__}"
    )


def measure(name: str, claim: Claim, args: argparse.Namespace) -> list[Row]:
    """Measure one claim. The rows are saved in ``args.out`` after each of them."""
    out = args.out.resolve() / name
    out.mkdir(parents=True, exist_ok=True)
    repeats = f"{claim.repeats} repeats of {claim.steps} steps"
    print(f"\n{name}: {claim.text}\n{circumstances()}, {repeats}\n", flush=True)
    rows: list[Row] = []
    shaped = args.nodes > 1 and not args.unshaped
    with Cluster(
        nodes=args.nodes,
        rate_mbit=CALIBRATION_MBIT,
        pin="core",
        ranks_per_node=claim.ranks_per_node,
        shaped=shaped,
    ) as cluster:
        for preset in claim.presets:
            for row in Study(cluster, claim, preset, out).rows():
                rows.append(row)
                (out / "rows.json").write_text(json.dumps(rows, indent=1) + "\n")
                print(f"{preset}: {cells(row)}", file=sys.stderr, flush=True)
        if cluster.dropped():
            raise RuntimeError(
                f"expected no dropped packets, got {cluster.dropped()}: these times are spoiled"
            )
    print(as_markdown(rows), flush=True)
    return rows


def main(argv: Sequence[str] | None = None) -> list[Row]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--claim", nargs="+", choices=CLAIMS, default=[], help="what to show")
    parser.add_argument("--list", action="store_true", help="print the claims")
    parser.add_argument("--preset", nargs="+", choices=PRESETS, help="other models")
    parser.add_argument("--ratio", nargs="+", type=float, help="other M/C; 0 for an unshaped link")
    parser.add_argument("--steps", type=int, help="measured in every run")
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--unshaped", action="store_true", help="no emulated link: needs no root")
    parser.add_argument("--arguments", default="", help="further ones of train.py, for all ways")
    parser.add_argument("--out", type=Path, default=Path("runs/studies"))
    args = parser.parse_args(argv)
    if args.list:
        print("\n".join(f"{name:10} {claim.text}" for name, claim in CLAIMS.items()))
    rows: list[Row] = []
    for name in args.claim:
        claim = CLAIMS[name]
        if missing := [each for each in claim.needs if each not in os.environ]:
            parser.error(
                f"expected {missing[0]} in the environment for --claim {name}, got none; "
                "see peer.py"
            )
        given = {
            "presets": args.preset,
            "ratios": args.ratio,
            "steps": args.steps,
            "repeats": args.repeats,
            "arguments": args.arguments and f"{claim.arguments} {args.arguments}",
        }
        claim = replace(claim, **{key: value for key, value in given.items() if value})
        rows += measure(name, claim, args)
    return rows


if __name__ == "__main__":
    main()

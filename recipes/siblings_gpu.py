"""Two sibling jobs that share one GPU: one after the other, side by side, and taking turns.

    PYTHONPATH=. python recipes/siblings_gpu.py --out runs/siblings_gpu

Two set-ups, each alternating its variants in processes that stay alive:

* ``gloo``: two ranks per job on two nodes of the emulated cluster (shaped link), *both on the same GPU*. What stands
  for two devices is one: C is the compute of both ranks of a job, and a turn lets both of them compute. It
  measures how well turns fill the GPU while gradients are on the wire, with staging, IPC events and the host's
  run-ahead as on a real cluster, but not the agreement between two devices.
* ``nccl``: one rank per job, nothing on any wire. N is 0, so the bound is 1: what turns cost, and what sharing a
  busy GPU costs without them.

``--mps also`` measures everything once more under a private NVIDIA MPS daemon, ``--mps only`` nothing else.
docs/gpu.md says how to read the table.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table

from lab_cluster import Cluster
from lab_network import why_not_shaped
from siblings import CALIBRATION_MBIT, JOBS, Outcome, Siblings

WORKER = Path(__file__).with_name("sibling_gpu_worker.py")
# Of the variants that run both jobs at once. Who compares needs both unmanaged ones: turns come with the split.
HOOKS = {"unmanaged": "none", "unmanaged, split": "rsag", "crossover": "crossover"}
MIN_MBIT, MAX_MBIT = 50.0, 8000.0  # what the emulated link can do
MPS_TIMEOUT_S = 20.0

Setup = Literal["gloo", "nccl"]


@contextlib.contextmanager
def mps() -> Iterator[str | None]:
    """Run a daemon of our own for the block, and leave the card's settings alone; yield why that failed, or None."""
    with tempfile.TemporaryDirectory(prefix="crossover-mps-") as directory:
        names = {f"CUDA_MPS_{kind}_DIRECTORY": directory for kind in ("PIPE", "LOG")}
        before = {name: os.environ.get(name) for name in names}
        os.environ.update(names)
        try:
            problem = _control(["-d"], "")
            yield problem
        finally:
            _control([], "quit\n")
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def _control(arguments: Sequence[str], orders: str) -> str | None:
    """Talk to the MPS control daemon; return what went wrong."""
    try:
        ended = subprocess.run(
            ["nvidia-cuda-mps-control", *arguments],
            input=orders,
            text=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=MPS_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    return None if ended.returncode == 0 else f"nvidia-cuda-mps-control ended with {ended.returncode}"


def measure_once(siblings: Siblings, steps: int, order: Sequence[str]) -> dict[str, Any]:
    """Run every variant once, in ``order``; return their figures."""
    outcomes: dict[str, Outcome] = {}
    for variant in order:
        if variant == "alone":
            outcomes |= {f"alone {job}": siblings.run("none", steps, [job]) for job in JOBS}
            outcomes["compute"] = siblings.run("compute", steps, JOBS[:1])
        else:
            outcomes[variant] = siblings.run(HOOKS[variant], steps)
    alone = [outcomes[f"alone {job}"] for job in JOBS]
    after_s = sum(outcome.makespan_s for outcome in alone)
    crossover = outcomes["crossover"]
    stats = [answer["stats"] for answers in crossover.answers.values() for answer in answers]
    medians = [one["handover_median_s"] for one in stats if one["handover_median_s"] is not None]
    return {
        "t1_s": statistics.mean(outcome.step_s for outcome in alone),
        "c_s": outcomes["compute"].step_s,
        "wire_bytes": statistics.mean(outcome.wire_bytes for outcome in alone),
        "after_s": after_s,
        "unmanaged_s": outcomes["unmanaged"].makespan_s,
        "crossover_s": crossover.makespan_s,
        "split_s": outcomes["unmanaged, split"].makespan_s,
        "crossover": after_s / crossover.makespan_s,
        "unmanaged": after_s / outcomes["unmanaged"].makespan_s,
        "split": after_s / outcomes["unmanaged, split"].makespan_s,
        "same_results": all(crossover.results(job) == outcomes[f"alone {job}"].results(job) for job in JOBS),
        "turns": [one["turns"] for one in stats],
        "handovers": sum(one["handovers"] for one in stats),
        "handover_median_s": statistics.median(medians) if medians else None,
        "leases_expired": sum(one["leases_expired"] for one in stats),
        "disabled": [one["disabled_because"] for one in stats if one["disabled_because"]],
        "ordered_by": sorted({str(one["ordered_by"]) for one in stats}),
        "devices": sorted({one["device"] for one in stats}),
    }


def measure(args: argparse.Namespace, setup: Setup, preset: str, scale: int) -> dict[str, Any]:
    """Measure one preset in one set-up."""
    shaped = setup == "gloo" and why_not_shaped() is None
    nodes = 2 if setup == "gloo" else 1
    arguments = ["--scale", str(scale), "--device", args.device, "--backend", setup]
    with Cluster(nodes=nodes, rate_mbit=CALIBRATION_MBIT, pin="none", shaped=shaped) as cluster:
        siblings = Siblings(
            cluster,
            preset,
            args.out / f"{setup}-{scale}",
            dict.fromkeys(JOBS, 1),
            script=WORKER,
            arguments=arguments,
        )
        first = siblings.run("none", args.calibration_steps, JOBS[:1])
        c_s = siblings.run("compute", args.calibration_steps, JOBS[:1]).step_s
        rate_mbit = first.wire_bytes * 8 / (args.ratio * c_s) / 1e6
        if shaped:
            rate_mbit = min(max(rate_mbit, MIN_MBIT), MAX_MBIT)
            cluster.set_rate(rate_mbit)
        runs = []
        for repeat in range(args.repeats):
            order = ["alone", *HOOKS]
            random.Random(repeat).shuffle(order)
            runs.append(measure_once(siblings, args.steps, order))
        siblings.close()
    return {"scale": scale, **summarize(setup, preset, rate_mbit if shaped else None, runs)}


def summarize(setup: str, preset: str, rate_mbit: float | None, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the repeats, and the bound from the same runs' C, N and M."""
    keys = [key for key, value in runs[0].items() if isinstance(value, float) and key != "handover_median_s"]
    middle = {key: statistics.median(run[key] for run in runs) for key in keys}
    m_s = middle["wire_bytes"] * 8 / (rate_mbit * 1e6) if rate_mbit else 0.0
    bound = 2 * middle["t1_s"] / max(2 * middle["c_s"], middle["t1_s"], 2 * m_s)
    return {
        "setup": setup,
        "preset": preset,
        "rate_mbit": rate_mbit,
        "m_s": m_s,
        "n_s": middle["t1_s"] - middle["c_s"],
        "bound": bound,
        "of_bound": middle["crossover"] / bound,
        "same_results": all(run["same_results"] for run in runs),
        "ordered_by": sorted({way for run in runs for way in run["ordered_by"]}),
        **middle,
        "runs": runs,
    }


def show(report: dict[str, Any], console: Console) -> None:
    title = f"Two siblings on one {report['device']}, {report['date']}: speed-up against one after the other"
    table = Table(title=title)
    for column in (
        "set-up",
        "model",
        "batch ×",
        "Mbit/s",
        "C ms",
        "N ms",
        "M ms",
        "bound",
        "crossover",
        "unmanaged",
        "with split",
        "same",
        "ordered by",
    ):
        table.add_column(column, justify="right")
    for row in report["rows"]:
        name = f"{row['setup']}{', MPS' if row['mps'] else ''}"
        if "error" in row:
            table.add_row(name, row["preset"], str(row["scale"]), row["error"][:60])
            continue
        rate = "–" if row["rate_mbit"] is None else f"{row['rate_mbit']:.0f}"
        times = [f"{row[key] * 1e3:.1f}" for key in ("c_s", "n_s", "m_s")]
        ratios = [f"{row[key]:.3f}" for key in ("bound", "crossover", "unmanaged", "split")]
        same, ordered = "yes" if row["same_results"] else "NO", ", ".join(row["ordered_by"])
        table.add_row(name, row["preset"], str(row["scale"]), rate, *times, *ratios, same, ordered)
    console.print(table)


def describe(device: str) -> dict[str, Any]:
    """Say where and when: a figure without that does not belong into a document."""
    on_gpu = torch.device(device).type == "cuda"
    return {
        "device": torch.cuda.get_device_name(torch.device(device)) if on_gpu else "CPU",
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "command": " ".join(sys.argv),
        "unshaped_because": why_not_shaped(),
        "rows": [],
    }


def measure_all(args: argparse.Namespace, report: dict[str, Any], *, under_mps: bool) -> None:
    """Measure every set-up; one that fails is a row that says so, and the others go on."""
    for setup, preset, scale in itertools.product(args.setup, args.preset, args.scale):
        try:
            row = measure(args, setup, preset, scale)
        except Exception as error:
            row = {
                "setup": setup,
                "preset": preset,
                "scale": scale,
                "error": f"{type(error).__name__}: {error}"[:2000],
            }
        report["rows"].append({"mps": under_mps, **row})
        (args.out / "siblings_gpu.json").write_text(json.dumps(report, indent=1) + "\n")
        show(report, Console(file=sys.stdout, width=160))


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", nargs="+", default=["convnet", "gpt"])
    parser.add_argument("--setup", nargs="+", choices=["gloo", "nccl"], default=["gloo", "nccl"])
    parser.add_argument("--ratio", type=float, default=0.75, help="M/C")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--calibration-steps", type=int, default=8)
    parser.add_argument(
        "--scale",
        type=int,
        nargs="+",
        default=[16],
        help="batch sizes, in batches of the preset (default 16)",
    )
    parser.add_argument(
        "--device", default="cuda:0", help="cpu tries the script itself; its figures mean nothing"
    )
    parser.add_argument(
        "--mps", choices=["no", "also", "only"], default="no", help="under a private MPS daemon"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/siblings_gpu"))
    args = parser.parse_args(argv)
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    report = describe(args.device)
    if args.mps != "only":
        measure_all(args, report, under_mps=False)
    if args.mps != "no":
        with mps() as problem:
            if problem is None:
                measure_all(args, report, under_mps=True)
            else:
                report["no_mps_because"] = problem
                (args.out / "siblings_gpu.json").write_text(json.dumps(report, indent=1) + "\n")
                print(f"no MPS here: {problem}")
    return report


if __name__ == "__main__":
    main()

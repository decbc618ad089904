"""Two sibling jobs that share one GPU: one after the other, side by side, and taking turns.

    PYTHONPATH=. python recipes/studies/siblings_gpu.py --out runs/siblings_gpu

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
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the recipes' directory

from lab import Cluster, rate_for, why_not_shaped
from studies._ranks import CALIBRATION_MBIT, Row
from studies._tables import Cells, show_table
from studies.siblings import JOBS, Siblings, figures, measure_once, summarize

# Who compares needs both unmanaged ones: turns come with the split.
VARIANTS = {"unmanaged": "none", "split": "rsag", "crossover": "crossover"}
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


def measure(args: argparse.Namespace, setup: Setup, preset: str, scale: int) -> Row:
    """Measure one preset in one set-up; C is that of steps without any exchange."""
    shaped = setup == "gloo" and why_not_shaped() is None
    nodes = 2 if setup == "gloo" else 1
    arguments = ["--scale", str(scale), "--device", args.device, "--backend", setup]
    with Cluster(nodes=nodes, rate_mbit=CALIBRATION_MBIT, pin="none", shaped=shaped) as cluster:
        siblings = Siblings(cluster, preset, args.out / f"{setup}-{scale}", arguments=arguments)
        first = siblings.run("none", args.calibration_steps, JOBS[:1])
        c_s = siblings.run("compute", args.calibration_steps, JOBS[:1]).mean("step_s")
        rate_mbit = None
        if shaped:
            rate_mbit = min(max(rate_for(args.ratio, c_s, first.mean("wire_bytes")), MIN_MBIT), MAX_MBIT)
            cluster.set_rate(rate_mbit)
        runs = []
        for repeat in range(args.repeats):
            outcomes = measure_once(siblings, args.steps, VARIANTS, repeat)
            c_s = siblings.run("compute", args.steps, JOBS[:1]).mean("step_s")
            runs.append({**figures(outcomes, args.steps), "c_s": c_s})
        siblings.close()
    return {"setup": setup, "scale": scale, **summarize(preset, rate_mbit, runs)}


def cells(row: Row) -> Cells:
    """What the table says of a row."""
    name = f"{row['setup']}{', MPS' if row['mps'] else ''}"
    found: Cells = {"set-up": name, "model": row["preset"], "batch ×": str(row["scale"])}
    if "error" in row:
        return {**found, "Mbit/s": row["error"][:60]}
    rate = None if row["rate_mbit"] is None else f"{row['rate_mbit']:.0f}"
    times = {
        letter: f"{row[key] * 1e3:.1f}" for letter, key in (("C ms", "c_s"), ("N ms", "n_s"), ("M ms", "m_s"))
    }
    return {
        **found,
        "Mbit/s": rate,
        **times,
        "bound": row["bound"],
        "crossover": row["crossover"],
        "unmanaged": row["unmanaged"],
        "with split": row["split"],
        "same": "yes" if row["same_results"] else "NO",
        "ordered by": ", ".join(row["ordered_by"]),
    }


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
        title = (
            f"Two siblings on one {report['device']}, {report['date']}: speed-up against one after the other"
        )
        show_table(Console(width=160), title, map(cells, report["rows"]))


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

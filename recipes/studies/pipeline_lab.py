"""Run plans on the emulated cluster: measured over simulated step, and two jobs in bands.

    python recipes/studies/pipeline_lab.py step --rate 50 200 1000
    python recipes/studies/pipeline_lab.py siblings

Blocks sleep, so that a step hardly depends on who else uses the machine. Needs what the lab needs (docs/lab.md).
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the recipes' directory

import lab
from crossover_ddp.pipeline import Cluster, Plan, Profile, Stage, plan_pipeline
from crossover_ddp.pipeline.model import StagedChain
from crossover_ddp.pipeline.schedule import best_order
from studies.pipeline_worker import WIDTH, blocks

WORKER = Path(__file__).with_name("pipeline_worker.py")
NODES = 4


def results(out: Path, name: str) -> list[dict[str, Any]]:
    """Read what the ranks of a job printed."""
    found = []
    for rank in range(NODES):
        lines = (out / name / f"rank{rank}.log").read_text().splitlines()
        found.append(
            json.loads(next(line for line in lines if line.startswith("RESULT ")).removeprefix("RESULT "))
        )
    return found


def step(rates: list[float], rows: int, seconds: float, steps: int, replicas: int, out: Path) -> None:
    """Plan for a rate, run the plan on links of that rate, and compare a step's times."""
    profile = Profile.measure(blocks(8, seconds, 2 * seconds), torch.randn(rows, WIDTH))
    for rate in rates:
        directory = out / f"{rate:g}"
        directory.mkdir(parents=True, exist_ok=True)
        devices = Cluster(((rate * 1e6 / 8,) * NODES,) * NODES, latency_s=1e-4)
        plan = plan_pipeline(profile, devices, microbatches=8, max_replicas=replicas)
        plan.save(directory / "plan.json")
        command = [sys.executable, str(WORKER), "--plan", str((directory / "plan.json").resolve())]
        command += ["--rows", str(rows), "--forward", str(seconds), "--backward", str(2 * seconds)]
        command += ["--steps", str(steps)]
        with lab.Cluster(nodes=NODES, rate_mbit=rate) as cluster:
            cluster.run([lab.Job("a", command)], timeout_s=150, out=directory)
        # The first steps connect the ranks and rebuild DDP's buckets.
        measured_s = statistics.median(results(directory, "a")[0]["seconds"][3:])
        row = {"figure": "measured over simulated step", "rate_mbit": rate, "ratio": measured_s / plan.step_s}
        row |= {"measured_s": measured_s, "simulated_s": plan.step_s, "steps": steps - 3}
        print(
            json.dumps({**row, "devices": [stage.devices for stage in plan.stages], "method": plan.method}),
            flush=True,
        )


def four_stages(seconds: float, rows: int, microbatches: int) -> Plan:
    """Return S = 4 stages of one block each, one on each node."""
    profile = Profile.measure(blocks(NODES, seconds, seconds), torch.randn(rows, WIDTH))
    stages = tuple([Stage(k, k + 1, (k,)) for k in range(NODES)])
    devices = Cluster(((1e8,) * NODES,) * NODES)
    found = best_order(StagedChain(profile, devices, stages, microbatches))
    assert found is not None
    return Plan(
        stages, found.orders, microbatches, found.step_s, "search", {}, devices.names,
        tuple([layer.name for layer in profile.layers]),
        tuple([(layer.shape, layer.dtype) for layer in profile.layers]), found.spans,
    )  # fmt: skip


def siblings(seconds: float, steps: int, out: Path) -> None:
    """Run one job alone, then two at once in bands, and compare times and losses."""
    out.mkdir(parents=True, exist_ok=True)
    plan = four_stages(seconds, 64, NODES)
    plan.save(out / "plan.json")
    words = [sys.executable, str(WORKER), "--plan", str((out / "plan.json").resolve()), "--steps", str(steps)]
    words += ["--forward", str(seconds), "--backward", str(seconds)]
    with lab.Cluster(nodes=NODES, rate_mbit=1000) as cluster:
        cluster.run([lab.Job("alone", words)], timeout_s=150, out=out)
        found = results(out, "alone")
        alone_s = sum(found[0]["seconds"])
        expected = found[-1]["losses"]
        cluster.run([lab.Job(name, [*words, "--turns"]) for name in "ab"], timeout_s=150, out=out)
    both = {name: results(out, name) for name in "ab"}
    begins = [ranks[0]["end_s"] - sum(ranks[0]["seconds"]) for ranks in both.values()]
    ends = [max(rank["end_s"] for rank in ranks) for ranks in both.values()]
    times = {"both_s": max(ends) - min(begins), "one_after_the_other_s": 2 * alone_s}
    same = all(ranks[-1]["losses"] == expected for ranks in both.values())
    row = {
        "figure": "two jobs in bands",
        "speed_up": 2 * alone_s / times["both_s"],
        "losses_identical": same,
        **times,
    }
    row |= {"step_alone_s": alone_s / steps, "simulated_s": plan.step_s, "steps": steps}
    row |= {"bands": len(plan.bands()[0]), "turns": [ranks[0]["turns"]["turns"] for ranks in both.values()]}
    print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("figure", choices=("step", "siblings"))
    parser.add_argument("--rate", type=float, nargs="+", default=[50, 200, 1000], help="Mbit/s")
    parser.add_argument("--rows", type=int, default=256, help="of a micro-batch; a row has 1 KiB")
    parser.add_argument("--seconds", type=float, default=0.02, help="of a block's forward")
    parser.add_argument("--max-replicas", type=int, default=NODES)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--out", type=Path, default=Path("runs/pipeline") / time.strftime("%H%M%S"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.figure == "step":
        step(args.rate, args.rows, args.seconds, args.steps, args.max_replicas, args.out)
    else:
        siblings(args.seconds, args.steps, args.out)


if __name__ == "__main__":
    main()

"""How good plans are: against exhaustive search, a constraint solver, known designs, and the clock.

    python -m tests.benchmarks.pipeline_plans partition actions device-orders minimum-cut time
    python -m tests.benchmarks.pipeline_plans clusters --clusters 200

Each figure is a line of JSON on standard output. What `clusters` plans is kept in a file, so that it can be stopped and
go on. See docs/pipeline.md.
"""

import argparse
import itertools
import json
import math
import random
import resource
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from crossover_ddp.pipeline import Cluster, LayerProfile, Profile, plan_pipeline
from crossover_ddp.pipeline.partition import Partitioner, minimum_cut_order
from crossover_ddp.pipeline.schedule import best_order
from tests.unit.pipeline.planning_oracles import (
    WholeSeconds,
    exhaustive_bottleneck,
    proven_bounds_s,
    random_instance,
)

FLOPS = 20e12
GIGABIT = 1e9 / 8
COPIES = 4.0
TRIES = 60


def show(name: str, ratios: Sequence[float] = (), **more: Any) -> None:
    ordered = sorted(ratios)
    if ordered:
        more = {
            "count": len(ordered), "median": statistics.median(ordered), "p95": ordered[int(0.95 * (len(ordered) - 1))],
            "smallest": ordered[0], "largest": ordered[-1], **more,
        }  # fmt: skip
    print(json.dumps({"figure": name, **more}), flush=True)


def seeds(count: int, seconds: float) -> Iterator[int]:
    """Yield numbers until their count or the time is used up."""
    end_s = time.monotonic() + seconds
    yield from itertools.takewhile(lambda _: time.monotonic() < end_s, range(count))


def partition(count: int) -> None:
    """The dynamic programme against exhaustive search."""
    equal = checked = 0
    for seed in range(count):
        dice = random.Random(seed)
        layers, devices, micros = dice.randint(2, 8), dice.randint(1, 4), dice.randint(1, 8)
        profile, cluster = random_instance(dice, layers=layers, devices=devices, memory=bool(seed % 2))
        order = dice.sample(range(devices), devices)
        most = min(layers, devices)
        found = Partitioner(profile, cluster, order, micros, max_stages=most, parameter_copies=COPIES).solve()
        same = True
        for stages in range(1, most + 1):
            expected = exhaustive_bottleneck(profile, cluster, order, micros, stages, COPIES)
            got = found[stages][0] if stages in found else float("inf")
            same &= got == expected or abs(got - expected) < 1e-9 * expected
            checked += 1
        equal += same
    show("partition = exhaustive search", instances=count, equal=equal, values=checked)


def device_orders(count: int, seconds: float) -> None:
    """The plan chosen against the best plan of all device orders."""
    ratios = []
    for seed in seeds(count, seconds):
        dice = random.Random(seed)
        profile, cluster = random_instance(dice, layers=dice.randint(2, 8), devices=dice.randint(2, 4))
        every = list(itertools.permutations(range(len(cluster))))
        chosen = plan_pipeline(profile, cluster, microbatches=4)
        best = plan_pipeline(profile, cluster, microbatches=4, orders=every)
        ratios.append(chosen.step_s / min(best.step_s, chosen.step_s))
    show("chosen plan / best of all device orders", ratios)


def actions(small: int, large: int, solver_s: float, seconds: float) -> None:
    """The order found against the optimum that the solver proves, or its bound."""
    for stages, micros, count in ((0, 0, small), (8, 16, large)):
        ratios, unproven = [], []
        for seed in seeds(count, seconds):
            dice = random.Random(seed)
            chain = WholeSeconds(dice, stages or dice.randint(2, 4), micros or dice.randint(2, 4))
            step = best_order(chain, tries=TRIES)
            assert step is not None
            low_s = high_s = step.step_s
            if step.step_s > chain.lower_bound_s() + 1e-6:
                low_s, high_s = proven_bounds_s(chain, known_s=step.step_s, seconds=solver_s)
            if high_s - low_s < 0.5:
                ratios.append(step.step_s / high_s)
            else:
                unproven.append((step.step_s / high_s, step.step_s / low_s))
        if not ratios and not unproven:
            continue
        name = f"list order / optimum, {stages or 4} x {micros or 4}"
        show(name, ratios, unproven=len(unproven))
        if unproven:
            show(f"{name}, unproven: over the solver's best", [best for best, _ in unproven])
            show(f"{name}, unproven: over its lower bound", [bound for _, bound in unproven])


def minimum_cut(count: int, seconds: float) -> None:
    """The plan chosen against the plan on the order by minimum cut alone."""
    ratios = []
    for seed in seeds(count, seconds):
        dice = random.Random(seed)
        devices = dice.choice((4, 6, 8))
        cluster = random_cluster(dice, devices)
        profile = MODELS[sorted(MODELS)[seed % len(MODELS)]]()
        alone = plan_pipeline(profile, cluster, microbatches=8, orders=[minimum_cut_order(cluster)], moves=0)
        best = plan_pipeline(profile, cluster, microbatches=8)
        ratios.append(alone.step_s / best.step_s)
    show("plan on the minimum-cut order alone / chosen plan, random matrices", ratios)


def planning_time() -> None:
    """Plan 100 layers on 64 devices."""
    torch.set_num_threads(1)
    dice = random.Random(0)
    profile = Profile(
        tuple(
            [LayerProfile(f"l{k}", dice.uniform(1, 2), dice.uniform(2, 4), 1e8, 1e8, 1e8) for k in range(100)]
        )
    )
    begin_s, cpu_s = time.perf_counter(), time.process_time()
    plan_pipeline(profile, random_cluster(dice, 64), microbatches=16)
    show(
        "planning 64 devices, 100 layers",
        wall_s=time.perf_counter() - begin_s,
        cpu_s=time.process_time() - cpu_s,
        peak_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    )


# --- models ----------------------------------------------------------------------------------------------------------


def counted(layers: Sequence[tuple[str, nn.Module]], shape: tuple[int, ...]) -> Profile:
    """Return a profile by counting operations on a device without data."""
    found, inputs = [], torch.empty(shape, device="meta")
    for name, layer in layers:
        with FlopCounterMode(display=False) as counter:
            outputs = layer(inputs)
        # What is no matrix product is bound by memory: eight bytes moved for each element, at 1 TB/s.
        seconds = counter.get_total_flops() / FLOPS + (inputs.numel() + outputs.numel()) * 8e-12
        size = sum(p.numel() for p in layer.parameters()) * 4
        stored = inputs.numel() * 4 * max(1, sum(1 for each in layer.modules() if not list(each.children())))
        found.append(LayerProfile(name, seconds, 2 * seconds, outputs.numel() * 4, size, stored))
        inputs = outputs
    return Profile(tuple(found))


def vgg() -> Profile:
    with torch.device("meta"):
        model = torchvision.models.vgg19()
    layers = [*model.features, model.avgpool, nn.Flatten(), *model.classifier]
    return counted([(str(k), layer) for k, layer in enumerate(layers)], (8, 3, 224, 224))


def resnet() -> Profile:
    with torch.device("meta"):
        model = torchvision.models.resnet152()
    stem = nn.Sequential(model.conv1, model.bn1, model.relu, model.maxpool)
    blocks = [*model.layer1, *model.layer2, *model.layer3, *model.layer4]
    head = nn.Sequential(model.avgpool, nn.Flatten(), model.fc)
    layers = [stem, *blocks, head]
    return counted([(str(k), layer) for k, layer in enumerate(layers)], (8, 3, 224, 224))


def transformer(blocks: int, width: int, tokens: int, vocabulary: int) -> Profile:
    """Blocks of 12 width² parameters between an embedding and a head; two bytes a value travel, four are stored."""

    def layer(name: str, parameters: float, flops: float, stored: float) -> LayerProfile:
        seconds = flops / FLOPS
        return LayerProfile(name, seconds, 2 * seconds, tokens * width * 2, parameters * 4, stored * 4)

    size, wide = tokens * width, 12 * width * width
    return Profile(
        (
            layer("embedding", vocabulary * width, 2 * size, size),
            *[layer(f"block{k}", wide, 2 * tokens * wide + 4 * size * 512, 16 * size) for k in range(blocks)],
            layer("head", vocabulary * width, 2 * size * vocabulary, tokens * vocabulary),
        )
    )


MODELS: dict[str, Callable[[], Profile]] = {
    "VGG-19": vgg,
    "ResNet-152": resnet,
    "BERT-like": lambda: transformer(24, 1024, 2048, 30522),
    "GPT-like": lambda: transformer(48, 1600, 1024, 50257),
}


# --- clusters --------------------------------------------------------------------------------------------------------


def random_cluster(dice: random.Random, devices: int) -> Cluster:
    rates = [[10 ** dice.uniform(-0.5, 2) * GIGABIT for _ in range(devices)] for _ in range(devices)]
    both = tuple([tuple([rates[min(a, b)][max(a, b)] for b in range(devices)]) for a in range(devices)])
    return Cluster(both, 20e-6, memory_bytes=(32e9,) * devices)


def cluster_of(kind: str, dice: random.Random, devices: int) -> Cluster:
    if kind == "random":
        return random_cluster(dice, devices)
    memory = (32e9,) * devices
    if kind == "uniform":
        return Cluster(
            ((dice.choice((1, 10, 25)) * GIGABIT,) * devices,) * devices, 20e-6, memory_bytes=memory
        )
    if kind == "two-tier":  # nodes of four devices
        inner, outer = dice.choice((100, 300)) * GIGABIT, dice.choice((10, 25)) * GIGABIT
        nodes = tuple([str(device // 4) for device in range(devices)])
        rates = tuple([tuple([inner if one == two else outer for two in nodes]) for one in nodes])
        return Cluster(rates, 20e-6, nodes, memory_bytes=memory, cards=dict.fromkeys(nodes, outer))
    ends = [
        dice.choice((1, 5, 10, 25)) * GIGABIT for _ in range(devices)
    ]  # star: each device's own link to a switch
    return Cluster(tuple([tuple([min(a, b) for b in ends]) for a in ends]), 20e-6, memory_bytes=memory)


KINDS = ("uniform", "two-tier", "star", "random")
SIZES = (4, 4, 8, 8, 8, 16, 16, 32, 8, 64)


BOUND = "zero bubble with replicas"  # of which no DDP model and no schedule of torch's is capable


def clusters(count: int, path: Path, seconds: float) -> None:
    """Plans against the known designs, for each model; what the file holds already is not planned again."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    seen = {(row["seed"], row["model"]) for row in rows}
    profiles = {name: make() for name, make in sorted(MODELS.items())}
    end_s = time.monotonic() + seconds
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        # In this order any part of the pairs is a fair sample of all kinds, sizes and models.
        pairs = list(itertools.product(range(count), profiles))
        random.Random(0).shuffle(pairs)
        for seed, name in pairs:
            if (seed, name) not in seen and time.monotonic() < end_s:
                rows.append({"seed": seed, "model": name, **compared(seed, profiles[name])})
                print(json.dumps(rows[-1]), file=file, flush=True)
    summary(rows)


def compared(seed: int, profile: Profile) -> dict[str, Any]:
    """Plan for a seeded cluster, and with a split backward too where zero bubble is shorter than the plan."""
    kind, devices = KINDS[seed % 4], SIZES[seed // 4 % len(SIZES)]
    cluster = cluster_of(kind, random.Random(seed), devices)
    micros = 32 if devices >= 32 else 16
    begin_s = time.perf_counter()
    plan = plan_pipeline(profile, cluster, microbatches=micros)
    row = {
        "kind": kind,
        "devices": devices,
        "planning_s": time.perf_counter() - begin_s,
        "step_s": plan.step_s,
    }
    row |= {"method": plan.method, "baselines": plan.baselines, "stages": len(plan.stages)}
    row["split_s"] = None
    if (plan.baselines.get("zero bubble") or plan.step_s) < plan.step_s:
        row["split_s"] = plan_pipeline(profile, cluster, microbatches=micros, split=True).step_s
    return row


def summary(rows: Sequence[dict[str, Any]]) -> None:
    counts, ratios = Counter[str](), defaultdict[str, list[float]](list)
    for row in rows:
        known = {name: step_s for name, step_s in row["baselines"].items() if step_s is not None}
        runs = {name: step_s for name, step_s in known.items() if not name.startswith("zero bubble")}
        zero_s, split_s = known.get("zero bubble", math.inf), row["split_s"] or row["step_s"]
        counts[f"method {row['method']}"] += 1
        counts["longer than a baseline that DDP runs"] += any(row["step_s"] > each for each in runs.values())
        counts["longer than zero bubble"] += row["step_s"] > zero_s
        counts["longer than zero bubble, both with split backwards"] += split_s > zero_s
        counts["longer than zero bubble with replicas, a bound"] += split_s > known.get(BOUND, math.inf)
        for name in ("all", row["kind"], row["model"]):
            if runs:
                ratios[name].append(min(runs.values()) / row["step_s"])
        if known:
            ratios["with zero bubble among the designs"].append(min(known.values()) / split_s)
    for name, found in ratios.items():
        show(f"best known design / chosen plan: {name}", found)
    show("planning", [row["planning_s"] for row in rows], **counts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "figures",
        nargs="+",
        choices=("partition", "actions", "device-orders", "minimum-cut", "time", "clusters"),
    )
    parser.add_argument("--instances", type=int, default=300, help="of each figure but clusters")
    parser.add_argument("--large", type=int, default=50, help="orders of 8 stages and 16 micro-batches")
    parser.add_argument("--solver-seconds", type=float, default=60.0)
    parser.add_argument("--clusters", type=int, default=200)
    parser.add_argument("--rows", type=Path, default=Path("runs/pipeline/clusters.jsonl"), help="of clusters")
    parser.add_argument("--seconds", type=float, default=math.inf, help="of a figure; clusters goes on later")
    args = parser.parse_args()
    torch.set_num_threads(1)
    runs: dict[str, Callable[[], None]] = {
        "partition": lambda: partition(args.instances),
        "actions": lambda: actions(args.instances, args.large, args.solver_seconds, args.seconds),
        "device-orders": lambda: device_orders(args.instances, args.seconds),
        "minimum-cut": lambda: minimum_cut(args.instances, args.seconds),
        "time": planning_time,
        "clusters": lambda: clusters(args.clusters, args.rows, args.seconds),
    }
    for figure in args.figures:
        runs[figure]()


if __name__ == "__main__":
    main()

"""Simulated steps of plans, beside torch's stock schedules with equal cuts, and beside the bound.

    python recipes/studies/pipeline_plans.py stock --clusters 200
    python recipes/studies/pipeline_plans.py gap --clusters 9

``stock`` plans for torch's runtime on 2 to 8 devices. Its rival has as many layers in all stages,
one stage on each device in the given order, or two, and the best order of torch's schedules: GPipe,
1F1B, interleaved 1F1B, and zero bubble. ``gap`` plans 100 layers on 64 devices.
"""

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator

from crossover_ddp.pipeline import Cluster, LayerProfile, Profile, Stage, plan_pipeline
from crossover_ddp.pipeline.model import StagedChain
from crossover_ddp.pipeline.schedule import depths, gpipe, interleaved, one_forward_one_backward
from crossover_ddp.pipeline.simulate import list_schedule, simulate

GIGABIT = 1e9 / 8
LATENCY_S = 20e-6


def uniform(dice: random.Random, devices: int) -> Cluster:
    rate = dice.choice((1, 10, 25)) * GIGABIT
    return Cluster(((rate,) * devices,) * devices, LATENCY_S)


def two_tier(dice: random.Random, devices: int) -> Cluster:
    """Nodes of four devices, or of two."""
    size = 4 if devices >= 8 else 2
    inner, outer = dice.choice((50, 200)) * GIGABIT, dice.choice((10, 25)) * GIGABIT
    nodes = tuple(str(device // size) for device in range(devices))
    rates = tuple(tuple(inner if one == two else outer for two in nodes) for one in nodes)
    return Cluster(rates, LATENCY_S, nodes, cards=dict.fromkeys(nodes, outer))


def star(dice: random.Random, devices: int) -> Cluster:
    """Each device has its own link to a switch."""
    ends = [dice.choice((1, 5, 10, 25)) * GIGABIT for _ in range(devices)]
    return Cluster(tuple(tuple(min(a, b) for b in ends) for a in ends), LATENCY_S)


def unlike(dice: random.Random, devices: int) -> Cluster:
    """Two machines: the devices of one are faster."""
    inner, outer = 100 * GIGABIT, dice.choice((1, 10)) * GIGABIT
    nodes = tuple("ab"[device >= devices // 2] for device in range(devices))
    rates = tuple(tuple(inner if one == two else outer for two in nodes) for one in nodes)
    speed = tuple(1.0 if node == "a" else dice.choice((0.4, 0.6)) for node in nodes)
    return Cluster(rates, LATENCY_S, nodes, speed)


def random_links(dice: random.Random, devices: int) -> Cluster:
    rates = [
        [10 ** dice.uniform(-0.5, 2) * GIGABIT for _ in range(devices)] for _ in range(devices)
    ]
    both = tuple(tuple(rates[min(a, b)][max(a, b)] for b in range(devices)) for a in range(devices))
    return Cluster(both, LATENCY_S)


KINDS: tuple[Callable[[random.Random, int], Cluster], ...] = (
    uniform,
    two_tier,
    star,
    unlike,
    random_links,
)


def convolutional(dice: random.Random, layers: int) -> Profile:
    """Activations shrink and parameters grow along the chain."""
    found = []
    for place in range(layers):
        part = place / (layers - 1)
        time_s = dice.uniform(1e-3, 4e-3)
        sent_bytes = 2 ** dice.uniform(25, 26) / 2 ** (5 * part)
        found.append(
            LayerProfile(f"l{place}", time_s, 2 * time_s, sent_bytes, 10 ** (5 + 2.5 * part))
        )
    return Profile(tuple(found))


def transformer(dice: random.Random, layers: int) -> Profile:
    """Equal blocks between an embedding and a head, which has much of the parameters."""
    width = dice.choice((768, 1024, 1600))
    tokens = 1024
    block_s = 24 * tokens * width**2 / 20e12
    block = LayerProfile("", block_s, 2 * block_s, 2 * tokens * width, 48 * width**2)
    table = 4 * 50_000 * width
    head_s = 2 * tokens * width * 50_000 / 20e12
    ends = (
        LayerProfile("embedding", block_s / 50, block_s / 25, block.activation_bytes, table),
        LayerProfile("head", head_s, 2 * head_s, 4.0, table),
    )
    blocks = [
        LayerProfile(f"l{k}", block_s, 2 * block_s, block.activation_bytes, block.parameter_bytes)
        for k in range(layers - 2)
    ]
    return Profile((ends[0], *blocks, ends[1]))


def stock_steps_s(profile: Profile, cluster: Cluster, microbatches: int) -> Iterator[float]:
    """Yield the step of each of torch's schedules with equal cuts."""
    devices = range(len(cluster))
    looped = [*devices, *devices]
    for places in ([*devices], looped, [*devices, *reversed(devices)]):
        count = len(places)
        if count > len(profile):
            continue
        edges = [len(profile) * k // count for k in range(count + 1)]
        stages = [
            Stage(*edge, (place,))
            for edge, place in zip(itertools.pairwise(edges), places, strict=True)
        ]
        whole = StagedChain(profile, cluster, stages, microbatches)
        halves = StagedChain(profile, cluster, stages, microbatches, split=True)
        step = list_schedule(halves, depths(halves))
        if step is not None:
            yield step.step_s
        if count == len(cluster):
            yield simulate(whole, gpipe(whole)).step_s
            yield simulate(whole, one_forward_one_backward(whole)).step_s
        elif places == looped and (orders := interleaved(whole, len(cluster))):
            yield simulate(whole, orders).step_s


def stock(clusters: int) -> None:
    """Print the ratio of the best stock step to the plan's step for each cluster."""
    ratios: dict[str, list[float]] = {}
    for seed in range(clusters):
        dice = random.Random(seed)
        kind = KINDS[seed % len(KINDS)]
        devices = 2 if seed % 10 == 3 else dice.choice((4, 4, 8))
        cluster = kind(dice, devices)
        profile = dice.choice((convolutional, transformer))(dice, dice.choice((16, 24)))
        microbatches = dice.choice((8, 16))
        plan = plan_pipeline(
            profile, cluster, microbatches=microbatches, runtime="torch", split=True
        )
        ratio = min(stock_steps_s(profile, cluster, microbatches)) / plan.step_s
        ratios.setdefault(kind.__name__, []).append(ratio)
        print(f"{seed} {kind.__name__} {devices} devices: {ratio:.3f}", flush=True)
    every = [ratio for found in ratios.values() for ratio in found]
    for name, found in [*ratios.items(), ("all", every)]:
        print(f"{name}: median {statistics.median(found):.3f}, least {min(found):.3f}")


def gap(clusters: int) -> None:
    """Print the gap and the time of planning for large clusters."""
    gaps, seconds = [], []
    for seed in range(clusters):
        dice = random.Random(seed)
        kind = KINDS[seed % len(KINDS)]
        cluster = kind(dice, 64)
        profile = dice.choice((convolutional, transformer))(dice, 100)
        microbatches = dice.choice((32, 64))
        begin_s = time.perf_counter()
        plan = plan_pipeline(profile, cluster, microbatches=microbatches)
        seconds.append(time.perf_counter() - begin_s)
        gaps.append(plan.gap)
        print(f"{seed} {kind.__name__}: gap {plan.gap:.3f}, {seconds[-1]:.1f} s", flush=True)
    print(f"gap: median {statistics.median(gaps):.3f}, greatest {max(gaps):.3f}")
    print(f"planning: median {statistics.median(seconds):.1f} s, longest {max(seconds):.1f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("figure", choices=("stock", "gap"))
    parser.add_argument("--clusters", type=int, default=200)
    arguments = parser.parse_args()
    {"stock": stock, "gap": gap}[arguments.figure](arguments.clusters)

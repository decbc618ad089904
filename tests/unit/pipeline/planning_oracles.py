"""Slow and simple: the least bottleneck, by trying everything."""

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Sequence

from crossover_ddp.pipeline import Cluster, LayerProfile, Profile


def random_instance(
    dice: random.Random, *, layers: int, devices: int, memory: bool = False
) -> tuple[Profile, Cluster]:
    """Return a chain and a cluster with costs of one magnitude; with ``memory`` some stages do not fit."""
    costs = ((0.5, 2), (1, 4), (0, 2), (0, 3), (0, 2))
    profile = Profile(
        tuple(
            [
                LayerProfile(f"l{k}", *[dice.uniform(*each) for each in costs], frozen_bytes=k % 3)
                for k in range(layers)
            ]
        )
    )
    rates = tuple([tuple([10 ** dice.uniform(-0.5, 1) for _ in range(devices)]) for _ in range(devices)])
    rooms = tuple([dice.uniform(20, 60) for _ in range(devices)]) if memory else ()
    nodes = tuple([str(dice.randrange(max(2, devices - 1))) for _ in range(devices)])
    speed = tuple([dice.choice((0.5, 1.0, 1.0)) for _ in range(devices)])
    return profile, Cluster(rates, latency_s=0.1, nodes=nodes, speed=speed, memory_bytes=rooms)


def exhaustive_bottleneck(
    profile: Profile, cluster: Cluster, order: Sequence[int], microbatches: int, count: int
) -> float:
    """Return the least bottleneck of ``count`` stages on runs of ``order``, by trying all; infinite if none fits."""
    best = math.inf
    for cuts in itertools.combinations(range(1, len(profile)), count - 1):
        edges = [0, *cuts, len(profile)]
        for places in itertools.combinations(range(len(order) + 1), count + 1):
            runs = [list(order[a:b]) for a, b in itertools.pairwise(places)]
            if all(len(run) <= microbatches for run in runs):
                best = min(best, _bottleneck(profile, cluster, edges, runs, microbatches))
    return best


def _bottleneck(
    profile: Profile,
    cluster: Cluster,
    edges: Sequence[int],
    runs: Sequence[list[int]],
    microbatches: int,
) -> float:
    worst = 0.0
    for stage, run in enumerate(runs):
        layers = profile.layers[edges[stage] : edges[stage + 1]]
        share = math.ceil(microbatches / len(run))
        parameters = sum(layer.parameter_bytes for layer in layers)
        frozen = sum(layer.frozen_bytes for layer in layers)
        stored = min(len(runs) - stage, share) * sum(layer.stored_bytes for layer in layers)
        if any(4 * parameters + frozen + stored > cluster.memory_bytes[device] for device in run):
            return math.inf
        speed = min(cluster.speed[device] for device in run)
        backward_s = sum(layer.backward_s for layer in layers) / speed
        exchange_s = _ring_s(cluster, run, parameters) if len(run) > 1 else 0.0
        step_s = share * (sum(layer.forward_s for layer in layers) / speed + backward_s)
        worst = max(worst, step_s + max(0.0, exchange_s - backward_s))
        if stage + 1 < len(runs):
            following = runs[stage + 1]
            worst = max(worst, _channel_s(cluster, run, following, layers[-1].activation_bytes, microbatches))
    return worst


def _channel_s(
    cluster: Cluster, run: Sequence[int], following: Sequence[int], size: float, microbatches: int
) -> float:
    worst = 0.0
    for back in (False, True):
        load: dict[str, float] = defaultdict(float)
        for micro in range(microbatches):
            pair = run[micro % len(run)], following[micro % len(following)]
            source, target = pair[::-1] if back else pair
            for port in cluster.ports(source, target):
                load[port] += size / cluster.rate(source, target)
        worst = max(worst, *load.values())
    return worst


def _ring_s(cluster: Cluster, run: Sequence[int], size: float) -> float:
    load: dict[str, float] = defaultdict(float)
    slowest_s = 0.0
    for place, source in enumerate(run):
        target = run[(place + 1) % len(run)]
        for port in cluster.ports(source, target):
            load[port] += 2 * (len(run) - 1) / len(run) * size / cluster.rate(source, target)
        slowest_s = max(slowest_s, cluster.latency(source, target))
    return max(load.values()) + 2 * (len(run) - 1) * slowest_s

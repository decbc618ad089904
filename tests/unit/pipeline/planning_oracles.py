"""Slow and simple: the least bottleneck, by trying everything."""

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Sequence

from crossover_ddp.pipeline import Cluster, LayerProfile, Profile, Stage
from crossover_ddp.pipeline.model import StagedChain


def random_instance(
    dice: random.Random, *, layers: int, devices: int, memory: bool = False
) -> tuple[Profile, Cluster]:
    """Return a chain and a cluster with costs of one magnitude; with ``memory`` some stages do not fit."""
    costs = ((0.5, 2), (1, 4), (0, 2), (0, 3), (0, 2))
    made = [
        LayerProfile(f"l{k}", *[dice.uniform(*each) for each in costs], frozen_bytes=k % 3)
        for k in range(layers)
    ]
    profile = Profile(tuple(made))
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
        layers = [*itertools.pairwise([0, *cuts, len(profile)])]
        for places in itertools.combinations(range(len(order) + 1), count + 1):
            runs = [tuple(order[a:b]) for a, b in itertools.pairwise(places)]
            if all(len(run) <= microbatches for run in runs):
                stages = [Stage(*edges, run) for edges, run in zip(layers, runs, strict=True)]
                best = min(best, _bottleneck(StagedChain(profile, cluster, stages, microbatches)))
    return best


def _bottleneck(chain: StagedChain) -> float:
    """Return the longest time of a stage, or of what leaves it through one port, as the simulator knows them."""
    worst, micros = 0.0, range(chain.microbatches)
    for k, stage in enumerate(chain.stages):
        share = math.ceil(len(micros) / len(stage.devices))
        if chain.limit(k) < min(len(chain.stages) - k, share):
            return math.inf
        forward_s, backward_s = (max(chain.seconds(k, kind, micro) for micro in micros) for kind in "FB")
        exchange = chain.exchanges[k]
        exchange_s = exchange[0].wire_s + exchange[0].latency_s if exchange else 0.0
        worst = max(worst, share * (forward_s + backward_s) + max(0.0, exchange_s - backward_s))
        for back in (False, True) if k + 1 < len(chain.stages) else ():
            load: dict[str, float] = defaultdict(float)
            for hop in filter(None, (chain.hop(k, micro, back=back) for micro in micros)):
                for port in hop.ports:
                    load[port] += hop.wire_s
            worst = max(worst, *load.values())
    return worst

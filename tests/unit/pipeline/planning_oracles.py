"""Slow and simple: what the planner's parts must find, by trying everything or by a constraint solver."""

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from crossover_ddp.pipeline import Action, Cluster, LayerProfile, Profile, Stage
from crossover_ddp.pipeline.model import Hop, StagedChain


def random_instance(
    dice: random.Random, *, layers: int, devices: int, memory: bool = False
) -> tuple[Profile, Cluster]:
    """Return a chain and a cluster with costs of one magnitude; with ``memory`` some stages do not fit."""
    profile = Profile(tuple([LayerProfile(f"l{k}", *_drawn(dice)) for k in range(layers)]))
    rates = tuple([tuple([10 ** dice.uniform(-0.5, 1) for _ in range(devices)]) for _ in range(devices)])
    rooms = tuple([dice.uniform(20, 60) for _ in range(devices)]) if memory else ()
    nodes = tuple([str(dice.randrange(max(2, devices - 1))) for _ in range(devices)])
    speed = tuple([dice.choice((0.5, 1.0, 1.0)) for _ in range(devices)])
    return profile, Cluster(rates, latency_s=0.1, nodes=nodes, speed=speed, memory_bytes=rooms)


def _drawn(dice: random.Random) -> tuple[float, float, float, float, float]:
    one, two, three, four, five = (dice.uniform(*each) for each in ((0.5, 2), (1, 4), (0, 2), (0, 3), (0, 2)))
    return one, two, three, four, five


def exhaustive_bottleneck(
    profile: Profile, cluster: Cluster, order: Sequence[int], microbatches: int, count: int, copies: float
) -> float:
    """Return the least bottleneck of ``count`` stages on runs of ``order``, by trying all; infinite if none fits."""
    best = math.inf
    for cuts in itertools.combinations(range(1, len(profile)), count - 1):
        edges = [0, *cuts, len(profile)]
        for places in itertools.combinations(range(len(order) + 1), count + 1):
            runs = [list(order[a:b]) for a, b in itertools.pairwise(places)]
            if all(len(run) <= microbatches for run in runs):
                best = min(best, _bottleneck(profile, cluster, edges, runs, microbatches, copies))
    return best


def _bottleneck(
    profile: Profile,
    cluster: Cluster,
    edges: Sequence[int],
    runs: Sequence[list[int]],
    microbatches: int,
    copies: float,
) -> float:
    worst = 0.0
    for stage, run in enumerate(runs):
        layers = profile.layers[edges[stage] : edges[stage + 1]]
        share = math.ceil(microbatches / len(run))
        parameters = sum(layer.parameter_bytes for layer in layers)
        stored = min(len(runs) - stage, share) * sum(layer.stored_bytes for layer in layers)
        if any(copies * parameters + stored > cluster.memory_bytes[device] for device in run):
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


class WholeSeconds(StagedChain):
    """A chain whose transfers take whole seconds, drawn at random; for the solver."""

    def __init__(self, dice: random.Random, stages: int, microbatches: int) -> None:
        layers = [
            LayerProfile(f"l{k}", dice.randint(1, 20), dice.randint(1, 40), 1, 0) for k in range(stages)
        ]
        cluster = Cluster(((1.0,) * stages,) * stages)
        self._wires = {(a, b): dice.randint(1, 20) for a in range(stages) for b in range(stages)}
        cut = [Stage(k, k + 1, (k,)) for k in range(stages)]
        super().__init__(Profile(tuple(layers)), cluster, cut, microbatches)

    def _transfer(self, stage: int, source: int, target: int) -> Hop:
        return super()._transfer(stage, source, target)._replace(wire_s=float(self._wires[source, target]))


def proven_bounds_s(
    chain: StagedChain, *, known_s: float, seconds: float = 60.0, workers: int = 1
) -> tuple[float, float]:
    """Return a time that no step beats, as far as the solver got, and the shortest step found; equal if proven.

    Devices and ports are used by one at a time, as in the simulator; any order of actions and of transfers is allowed.
    ``known_s`` is the length of a known step.
    """
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    horizon = int(known_s)
    used: dict[Any, list[Any]] = defaultdict(list)
    ends: dict[Action, Any] = {}
    length = model.new_int_var(int(chain.lower_bound_s()), horizon, "length")

    def interval(duration: float, users: tuple[Any, ...], after: list[Any]) -> Any:
        assert duration == int(duration)
        start = model.new_int_var(0, horizon, "")
        for user in users:
            used[user].append(model.new_fixed_size_interval_var(start, int(duration), ""))
        for end in after:
            model.add(start >= end)
        model.add(start + int(duration) <= length)
        return start + int(duration)

    last = len(chain.stages) - 1
    for micro in range(chain.microbatches):
        arrived: list[Any] = []
        for stage in range(last + 1):
            action = Action(stage, "F", micro)
            ends[action] = interval(chain.seconds(*action), (chain.device(stage, micro),), arrived)
            if stage < last:
                hop = chain.hop(stage, micro, back=False)
                arrived = [interval(hop.wire_s, hop.ports, [ends[action]]) if hop else ends[action]]
        arrived = []
        for stage in reversed(range(last + 1)):
            action = Action(stage, "B", micro)
            needs = [*arrived, ends[Action(stage, "F", micro)]]
            ends[action] = interval(chain.seconds(*action), (chain.device(stage, micro),), needs)
            if stage:
                hop = chain.hop(stage - 1, micro, back=True)
                arrived = [interval(hop.wire_s, hop.ports, [ends[action]]) if hop else ends[action]]
    for intervals in used.values():
        model.add_no_overlap(intervals)
    model.minimize(length)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = workers
    status = solver.solve(model)
    shortest_s = solver.objective_value if status in (cp_model.OPTIMAL, cp_model.FEASIBLE) else known_s
    return solver.best_objective_bound, min(shortest_s, known_s)

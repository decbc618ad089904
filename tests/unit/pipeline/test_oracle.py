"""Plans against the shortest step of any plan, and that oracle against naive enumeration.

``python -m tests.unit.pipeline.test_oracle --instances 200 --cache FILE`` prints a table of all
instances and a summary. It keeps the oracle's results in the file, which should lie outside of the
repository, so that another run only plans.
"""

import argparse
import hashlib
import itertools
import json
import math
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from crossover_ddp.pipeline import Cluster, LayerProfile, Plan, Profile, Stage, plan_pipeline
from crossover_ddp.pipeline.model import StagedChain
from tests.harness.campaign import IN_CAMPAIGN
from tests.unit.pipeline.oracle import Layout, ProofLimitError, best_plan, best_step_s

PROOF_LIMIT = 300_000
# Ratios of a plan's step to the shortest step: the median, the 95th percentile and the worst.
ALLOWED = {"median": 1.001, "95 %": 1.03, "worst": 1.10}


class Instance(NamedTuple):
    profile: Profile
    cluster: Cluster
    microbatches: int


def instance(seed: int, *, is_tiny: bool = False) -> Instance:
    """Return a random instance. A third of the seeds limit memory, and then some have no plan."""
    dice = random.Random(seed)
    layers, devices = dice.randint(3, 4 if is_tiny else 6), dice.randint(2, 3 if is_tiny else 4)
    microbatches = dice.randint(2, 3 if is_tiny else 4)
    # Small gradients favour replicas, large ones favour stages.
    parameters = dice.choice((0.5, 2.0, 6.0))
    made = [costs_of(dice, k, parameters) for k in range(layers)]
    rates = [[10 ** dice.uniform(-0.5, 1) for _ in range(devices)] for _ in range(devices)]
    nodes = [str(dice.randrange(max(2, devices - 1))) for _ in range(devices)]
    cards = {
        node: 10 ** dice.uniform(-0.3, 0.7) for node in sorted({*nodes}) if dice.random() < 0.5
    }
    speed = [dice.choice((0.5, 0.8, 1.0, 1.0)) for _ in range(devices)]
    whole_bytes = sum(layer.state_bytes + 2 * layer.stored_bytes for layer in made)
    rooms = (
        [whole_bytes * dice.uniform(0.15, 0.65) for _ in range(devices)] if seed % 3 == 0 else []
    )
    cluster = Cluster(
        tuple(map(tuple, rates)),
        latency_s=dice.choice((0.0, 0.1)),
        nodes=tuple(nodes),
        speed=tuple(speed),
        memory_bytes=tuple(rooms),
        cards=cards,
    )
    return Instance(Profile(tuple(made)), cluster, microbatches)


def costs_of(dice: random.Random, number: int, parameters: float) -> LayerProfile:
    """Return a layer with random costs, and at most ``parameters`` bytes of parameters."""
    return LayerProfile(
        f"l{number}",
        forward_s=dice.uniform(0.5, 2),
        backward_s=dice.uniform(1, 4),
        activation_bytes=dice.uniform(0, 3),
        parameter_bytes=dice.uniform(0, parameters),
        stored_bytes=dice.uniform(0, 2),
        frozen_bytes=number % 3,
    )


class Shortest(NamedTuple):
    """The oracle's result. No step means that no plan fits, or that the proof is too long."""

    step_s: float | None
    stages: str
    is_proved: bool
    search_s: float


class Row(NamedTuple):
    """A plan beside the oracle's. No step of the plan means that the planner refused."""

    seed: int
    max_replicas: int
    shortest: Shortest
    step_s: float | None
    stages: str
    # Whether the oracle's search covers such a plan.
    is_covered: bool

    @property
    def ratio(self) -> float:
        assert self.step_s and self.shortest.step_s
        return self.step_s / self.shortest.step_s

    @property
    def is_refused_wrongly(self) -> bool:
        return self.step_s is None and self.shortest.step_s is not None


def text_of(stages: Sequence[Stage]) -> str:
    """Return stages as text, such as ``0-2@1 3-3@0,4``: layers 0 to 2 are on device 1."""
    return " ".join(
        f"{stage.start}-{stage.stop - 1}@{','.join(map(str, stage.devices))}" for stage in stages
    )


def shortest_of(one: Instance, max_replicas: int) -> Shortest:
    """Run the oracle."""
    begin_s = time.perf_counter()
    try:
        best = best_plan(*one, max_replicas=max_replicas, proof_limit=PROOF_LIMIT)
    except ProofLimitError:
        return Shortest(None, "", False, time.perf_counter() - begin_s)
    search_s = time.perf_counter() - begin_s
    if best is None:
        return Shortest(None, "", True, search_s)
    return Shortest(best.step_s, text_of(best.stages), True, search_s)


def row_of(seed: int, one: Instance, max_replicas: int, shortest: Shortest) -> Row:
    """Plan an instance, and put the plan beside the oracle's result."""
    try:
        plan = plan_pipeline(
            one.profile, one.cluster, microbatches=one.microbatches, max_replicas=max_replicas
        )
    except ValueError:
        return Row(seed, max_replicas, shortest, None, "", True)
    return Row(seed, max_replicas, shortest, plan.step_s, text_of(plan.stages), is_covered(plan))


def is_covered(plan: Plan) -> bool:
    """Whether each device has one stage at most and replicas take micro-batches in turn."""
    devices = [device for stage in plan.stages for device in stage.devices]
    return len({*devices}) == len(devices) and not any(stage.pattern for stage in plan.stages)


def summary(rows: Sequence[Row]) -> dict[str, float]:
    """Return the median, the 95th percentile and the worst of the ratios."""
    ratios = sorted(row.ratio for row in rows if row.step_s and row.shortest.step_s)
    percentile = ratios[math.ceil(0.95 * len(ratios)) - 1]
    return {"median": statistics.median(ratios), "95 %": percentile, "worst": ratios[-1]}


class Cache:
    """The oracle's results in a JSON file, by the contents of the instance.

    Args:
        path: the file. Without one, results are not kept.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known: dict[str, Any] = {}
        if path is not None and path.exists():
            self._known = json.loads(path.read_text())

    def shortest(self, seed: int, one: Instance, max_replicas: int) -> Shortest:
        """Return the result for an instance. Run the oracle only if the file does not have it."""
        digest = hashlib.sha256(repr((one, max_replicas, PROOF_LIMIT)).encode()).hexdigest()[:16]
        key = f"{seed} {max_replicas} {digest}"
        if key not in self._known:
            self._known[key] = shortest_of(one, max_replicas)._asdict()
            if self._path is not None:
                self._path.write_text(json.dumps(self._known, indent=1))
        return Shortest(**self._known[key])


# The oracle against naive enumeration.


class Moment(NamedTuple):
    """The state of a step at some time. All times are from now on; None means not yet begun."""

    # The time that each action still computes.
    left_s: tuple[int | None, ...]
    # The time until the input of each action arrives.
    arrival_s: tuple[int | None, ...]
    # The time for which each port is busy.
    busy_s: tuple[int, ...]
    # The time until the exchange of each stage ends.
    exchange_s: tuple[int | None, ...]
    # The actions that have ended just now and send their results.
    requests: tuple[int, ...]


class Clock:
    """The shortest step of given stages, by enumeration of all choices at all integer times.

    Each device may begin any action whose input has arrived, or wait. Requests at the same time
    have any order. But an exchange follows directly on the last backward that ends it, unless it
    comes before that. All times must be integers. Nothing is pruned, but equal states are solved
    once.
    """

    def __init__(self, one: Instance, stages: Sequence[Stage]) -> None:
        self.cluster, self.microbatches = one.cluster, one.microbatches
        self.stages = stages
        self.layers = [one.profile.layers[stage.start : stage.stop] for stage in stages]
        self.count = len(stages)
        self.actions = [(m, k) for m in range(one.microbatches) for k in range(2 * self.count)]
        self.ports: dict[str, int] = {}
        self.seconds = [self._seconds(place) for place in range(len(self.actions))]
        self.transfers = [self._transfer(place) for place in range(len(self.actions))]
        self.exchanges: list[tuple[int, int, list[int], int] | None] = []
        for exchange in StagedChain(one.profile, one.cluster, stages, one.microbatches).exchanges:
            self.exchanges.append(None)
            if exchange is not None:
                hop, lead_s = exchange
                wire_s, latency_s, lead = map(whole, (hop.wire_s, hop.latency_s, lead_s))
                self.exchanges[-1] = wire_s, latency_s, self._numbers(hop.ports), lead
        self.known: dict[Moment, float] = {}

    def step_s(self) -> float:
        """Return the shortest step, or infinity if the stages do not fit in memory."""
        if not all(self._has_room(stage, 1) for stage in range(self.count)):
            return math.inf
        left_s = (None,) * len(self.actions)
        arrival_s = tuple(None if k else 0 for _, k in self.actions)
        exchange_s = tuple(0 if exchange is None else None for exchange in self.exchanges)
        return self.least_s(Moment(left_s, arrival_s, (0,) * len(self.ports), exchange_s, ()))

    def least_s(self, now: Moment) -> float:
        """Return the least time from now to the end of the step."""
        if now not in self.known:
            # A choice that leads back to the same state is an endless wait.
            self.known[now] = math.inf
            self.known[now] = min(self._outcomes(now))
        return self.known[now]

    def _outcomes(self, now: Moment) -> Iterator[float]:
        due = [-1 - stage for stage in range(self.count) if self._is_due(now, stage)]
        if now.requests or due:
            for order in itertools.permutations([*now.requests, *due]):
                if self._is_direct(order):
                    yield self.least_s(self._sent(now, order))
        elif not any(left_s != 0 for left_s in now.left_s):
            yield max(exchange_s or 0 for exchange_s in now.exchange_s)
        else:
            for place in range(len(self.actions)):
                if self._can_begin(now, place):
                    yield self.least_s(
                        now._replace(left_s=put(now.left_s, place, self.seconds[place]))
                    )
            yield 1 + self.least_s(self._next(now))

    def _stage(self, place: int) -> int:
        k = self.actions[place][1]
        return min(k, 2 * self.count - 1 - k)

    def _is_forward(self, place: int) -> bool:
        return self.actions[place][1] < self.count

    def _device(self, place: int) -> int:
        return self.stages[self._stage(place)].device(self.actions[place][0])

    def _seconds(self, place: int) -> int:
        layers = self.layers[self._stage(place)]
        costs = [each.forward_s if self._is_forward(place) else each.backward_s for each in layers]
        return whole(sum(costs) / self.cluster.speed[self._device(place)])

    def _numbers(self, ports: Sequence[str]) -> list[int]:
        return [self.ports.setdefault(port, len(self.ports)) for port in ports]

    def _transfer(self, place: int) -> tuple[int, int, list[int]] | None:
        if self.actions[place][1] in (self.count - 1, 2 * self.count - 1):
            return None
        link = self._device(place), self._device(place + 1)
        sender = min(self._stage(place), self._stage(place + 1))
        size_bytes = self.layers[sender][-1].activation_bytes
        wire_s = whole(size_bytes / self.cluster.rate(*link))
        ports = self._numbers(self.cluster.ports(*link))
        return wire_s, whole(self.cluster.latency(*link)), ports

    def _has_room(self, stage: int, micros: int, device: int | None = None) -> bool:
        layers = self.layers[stage]
        need_bytes = sum(
            4 * layer.parameter_bytes + layer.frozen_bytes + micros * layer.stored_bytes
            for layer in layers
        )
        devices = self.stages[stage].devices if device is None else (device,)
        return need_bytes <= min(self.cluster.memory_bytes[each] for each in devices)

    def _can_begin(self, now: Moment, place: int) -> bool:
        device, stage = self._device(place), self._stage(place)
        mine = [each for each in range(len(self.actions)) if self._device(each) == device]
        if now.left_s[place] is not None or now.arrival_s[place] != 0:
            return False
        if any(now.left_s[each] for each in mine):
            return False
        begun = sum(self._is_forward(each) and now.left_s[each] is not None for each in mine)
        ended = sum(not self._is_forward(each) and now.left_s[each] == 0 for each in mine)
        return not self._is_forward(place) or self._has_room(stage, begun - ended + 1, device)

    def _next(self, now: Moment) -> Moment:
        """Return the state after one unit of time."""
        ended = [place for place, left_s in enumerate(now.left_s) if left_s == 1]
        arrival_s = [*passed(now.arrival_s)]
        for place in ended:
            if self.transfers[place] is None and place + 1 < len(self.actions):
                arrival_s[place + 1] = arrival_s[place + 1] or 0
        requests = [place for place in ended if self.transfers[place] is not None]
        busy_s = tuple(max(0, each - 1) for each in now.busy_s)
        left_s, exchange_s = passed(now.left_s), passed(now.exchange_s)
        return Moment(left_s, tuple(arrival_s), busy_s, exchange_s, tuple(requests))

    def _lasts(self, stage: int) -> list[int]:
        return [
            place
            for place in range(len(self.actions))
            if self._stage(place) == stage and not self._is_forward(place)
        ]

    def _is_due(self, now: Moment, stage: int) -> bool:
        """Whether the backwards of a stage end so soon that its exchange is requested now."""
        exchange = self.exchanges[stage]
        if exchange is None or now.exchange_s[stage] is not None:
            return False
        left_s = [now.left_s[place] for place in self._lasts(stage)]
        return all(each is not None and each <= exchange[3] for each in left_s)

    def _is_direct(self, order: Sequence[int]) -> bool:
        for number, request in enumerate(order):
            stage = -1 - request
            exchange = self.exchanges[stage] if request < 0 else None
            if exchange is None or exchange[3] or not stage:
                continue
            lasts = self._lasts(stage)
            follows = number and order[number - 1] in lasts
            if not follows and not any(each in lasts for each in order[number:]):
                return False
        return True

    def _sent(self, now: Moment, order: Sequence[int]) -> Moment:
        """Return the state after requests in this order. Exchanges have negative numbers."""
        for request in order:
            found = self.exchanges[-1 - request] if request < 0 else self.transfers[request]
            assert found is not None
            wire_s, latency_s, ports = found[:3]
            begin_s = max(now.busy_s[port] for port in ports)
            busy_s = [
                begin_s + wire_s if port in ports else each for port, each in enumerate(now.busy_s)
            ]
            now = now._replace(busy_s=tuple(busy_s), requests=())
            end_s = begin_s + wire_s + latency_s
            if request < 0:
                now = now._replace(exchange_s=put(now.exchange_s, -1 - request, end_s))
            else:
                now = now._replace(arrival_s=put(now.arrival_s, request + 1, end_s))
        return now


def whole(value: float) -> int:
    """Return a whole number as an integer."""
    assert abs(value - round(value)) < 1e-9
    return round(value)


def put(values: tuple[int | None, ...], place: int, value: int) -> tuple[int | None, ...]:
    return (*values[:place], value, *values[place + 1 :])


def passed(values: tuple[int | None, ...]) -> tuple[int | None, ...]:
    """Return times after one unit of time."""
    return tuple([max(0, each - 1) if each else each for each in values])


def whole_instance(seed: int, layers: int, devices: int, microbatches: int) -> Instance:
    """Return a random instance in which all times are whole numbers."""
    dice = random.Random(seed)
    made = [
        LayerProfile(
            f"l{k}", dice.randint(1, 2), dice.randint(1, 3), dice.randint(0, 3),
            dice.choice((0, 3, 3, 6)), dice.randint(0, 3), frozen_bytes=dice.randint(0, 1),
        )
        for k in range(layers)
    ]  # fmt: skip
    rates = [[dice.choice((1.0, 0.5)) for _ in range(devices)] for _ in range(devices)]
    rooms = [dice.randint(16, 46) for _ in range(devices)] if dice.random() < 0.5 else []
    cluster = Cluster(
        tuple(map(tuple, rates)),
        latency_s=dice.choice((0, 0, 1)),
        nodes=tuple([str(dice.randrange(max(2, devices - 1))) for _ in range(devices)]),
        speed=tuple([dice.choice((0.5, 1.0, 1.0)) for _ in range(devices)]),
        memory_bytes=tuple(rooms),
    )
    return Instance(Profile(tuple(made)), cluster, microbatches)


def naive_stages(layers: int, devices: int, most: int) -> Iterator[list[Stage]]:
    """Yield all cuts on all orders of devices, with up to ``most`` replicas."""
    for count in range(1, layers + 1):
        for cuts in itertools.combinations(range(1, layers), count - 1):
            edges = [*itertools.pairwise([0, *cuts, layers])]
            for sizes in itertools.product(range(1, most + 1), repeat=count):
                places = [*itertools.pairwise(itertools.accumulate(sizes, initial=0))]
                for order in itertools.permutations(range(devices), sum(sizes)):
                    runs = [order[slice(*place)] for place in places]
                    yield [Stage(*each, run) for each, run in zip(edges, runs, strict=True)]


def naive_step_s(one: Instance, max_replicas: int) -> float | None:
    """Return the shortest step by enumeration, or None if no plan fits in memory."""
    most = min(max_replicas, one.microbatches)
    steps = [
        Clock(one, stages).step_s()
        for stages in naive_stages(len(one.profile), len(one.cluster), most)
    ]
    return None if min(steps) == math.inf else min(steps)


# The tests.

# Layers, devices and micro-batches. The enumeration of the last ones takes seconds.
SHAPES = ((2, 2, 2), (2, 3, 2), (2, 2, 3), (3, 2, 2), (3, 3, 2))


@pytest.mark.parametrize("seed", range(300 if IN_CAMPAIGN else 6))
def test_the_oracle_equals_naive_enumeration(seed: int) -> None:
    one = whole_instance(seed, *SHAPES[seed % (5 if IN_CAMPAIGN else 2)])
    for max_replicas in (1, len(one.cluster)):
        expected = naive_step_s(one, max_replicas)
        found = best_step_s(*one, max_replicas=max_replicas, proof_limit=PROOF_LIMIT)
        assert found == (expected and pytest.approx(expected, abs=1e-9))


@pytest.mark.parametrize("seed", range(600 if IN_CAMPAIGN else 60))
def test_the_step_of_given_stages_equals_naive_enumeration(seed: int) -> None:
    one = whole_instance(seed, *SHAPES[seed % 5])
    every = [*naive_stages(len(one.profile), len(one.cluster), one.microbatches)]
    for stages in random.Random(seed).sample(every, 3):
        layout = Layout(one.profile, one.cluster, stages, one.microbatches)
        found = math.inf
        if layout.fits:
            found = layout.best_step_s(math.inf, [PROOF_LIMIT])
        assert found == pytest.approx(Clock(one, stages).step_s(), abs=1e-9), stages


def test_instances_without_a_plan_have_no_step() -> None:
    profile = Profile((LayerProfile("a", 1, 1, 1, 5.0), LayerProfile("b", 1, 1, 0, 5.0)))
    for room_bytes, expected in ((19.0, None), (20.0, 6.0), (40.0, 4.0)):
        cluster = Cluster(((1.0,) * 2,) * 2, memory_bytes=(room_bytes,) * 2)
        step_s = best_step_s(profile, cluster, 1, max_replicas=2, proof_limit=PROOF_LIMIT)
        assert step_s == expected


def test_a_short_limit_stops_the_proof() -> None:
    with pytest.raises(ProofLimitError):
        best_step_s(*instance(9), max_replicas=4, proof_limit=10)


def test_plans_are_near_the_shortest_step() -> None:
    rows = []
    for seed in range(200 if IN_CAMPAIGN else 8):
        one = instance(seed, is_tiny=not IN_CAMPAIGN)
        for max_replicas in (1, len(one.cluster)):
            shortest = shortest_of(one, max_replicas)
            if shortest.is_proved:
                rows.append(row_of(seed, one, max_replicas, shortest))
    assert len(rows) > 10
    for row in rows:
        if row.step_s is not None and row.is_covered:
            assert row.shortest.step_s is not None
            assert row.step_s >= row.shortest.step_s - 1e-9, row
    assert [row for row in rows if row.is_refused_wrongly] == []
    found = summary(rows)
    assert {name for name, limit in ALLOWED.items() if found[name] > limit} == set(), found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=200, help="seeds, from 0; default 200")
    parser.add_argument("--cache", type=Path, help="the file of the oracle's results")
    arguments = parser.parse_args()
    cache = Cache(arguments.cache)
    rows = []
    print("seed replicas    oracle      plan   ratio  refused  oracle's stages | plan's stages")
    for seed in range(arguments.instances):
        one = instance(seed)
        for max_replicas in (1, len(one.cluster)):
            row = row_of(seed, one, max_replicas, cache.shortest(seed, one, max_replicas))
            rows.append(row)
            print(line_of(row), flush=True)
    print_summary("max_replicas=1", [row for row in rows if row.max_replicas == 1])
    print_summary("any replicas", [row for row in rows if row.max_replicas > 1])
    print_summary("all", rows)


def line_of(row: Row) -> str:
    shortest = row.shortest
    oracle = "no plan" if shortest.step_s is None else f"{shortest.step_s:.4f}"
    if not shortest.is_proved:
        oracle = "no proof"
    plan = "none" if row.step_s is None else f"{row.step_s:.4f}"
    ratio = f"{row.ratio:.4f}" if row.step_s and shortest.step_s else ""
    refused = "wrongly" if row.is_refused_wrongly else ""
    start = f"{row.seed:4} {row.max_replicas:8} {oracle:>9} {plan:>9} {ratio:>7} {refused:>8}"
    mark = "" if row.is_covered else " (several stages per device or a pattern)"
    return f"{start}  {shortest.stages} | {row.stages}{mark}"


def print_summary(title: str, rows: Sequence[Row]) -> None:
    proved = [row for row in rows if row.shortest.is_proved]
    both = [row for row in proved if row.step_s and row.shortest.step_s]
    wrong = sum(row.is_refused_wrongly for row in proved)
    without = sum(row.shortest.step_s is None for row in proved)
    below = [row for row in both if row.ratio < 1 - 1e-9]
    print(f"{title}: {len(rows)} plans, {len(rows) - len(proved)} without proof, ", end="")
    print(f"{without} have no plan, {wrong} refused wrongly")
    figures = ", ".join(
        f"{name} {value:.4f} (at most {ALLOWED[name]})" for name, value in summary(both).items()
    )
    print(f"  ratio: {figures}")
    above = {limit: sum(row.ratio > limit for row in both) for limit in ALLOWED.values()}
    print(f"  above: {above}; shorter than the oracle: {len(below)}, ", end="")
    print(f"of which covered: {sum(row.is_covered for row in below)}")
    search_s = sorted(row.shortest.search_s for row in rows)
    print(f"  oracle: median {statistics.median(search_s):.1f} s, worst {search_s[-1]:.1f} s")


if __name__ == "__main__":
    main()

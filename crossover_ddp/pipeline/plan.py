"""Finds the stages, devices and orders for a chain on a cluster, and saves them as a plan.

[Note: split backward]
A split backward computes the gradient of the input first, and the gradient of the weights later
(zero bubble, arXiv 2401.10241). So it sends gradients earlier. DDP supports only whole backwards,
and so does `Runner`. Torch's own runtime supports both, but no replicas. So with ``split=True``,
the search also tries a split backward for stages on one device each.
"""

import itertools
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, NamedTuple

from .cluster import DeviceCluster
from .documents import Document
from .model import Action, Stage, StagedChain
from .partition import CAPS, Partitioner, balanced, device_orders
from .profile import Profile
from .schedule import bands, best_order, depths, gpipe, interleaved, one_forward_one_backward
from .simulate import SimulatedStep, StepSpan, list_schedule, simulate

_SIMULATED: Final = 12
"""How many candidates to simulate for one device order: those with the least lower bounds."""
_FINALISTS: Final = 2
"""How many candidates get a longer search for the order of their actions.

They are chosen before devices are exchanged and cuts are moved, and again afterwards, since the
candidates with the shortest steps at first need not have the best order.
"""
_SPLIT: Final = 6
"""How many cuts into stages to try with a split backward."""
_TRIES: Final = 40
"""How many random changes of the order of actions to try for each finalist."""
_ACTIONS: Final = 60_000
"""Limits the time of the search.

About this many actions are simulated while devices are exchanged and cuts are moved, and about as
many again while orders are searched.
"""
_SEED: Final = 0


@dataclass(frozen=True)
class Plan(Document):
    """A plan: the layers of each rank, and the order of its actions.

    Args:
        stages: the stages, first to last. They refer to devices by their number in the cluster,
            which is also the rank for `Runner`.
        orders: the actions of each device, in order.
        microbatches: the number of micro-batches in a step.
        step_s: the simulated time of a step, in seconds.
        method: how the plan was found: ``search``, or the name of a baseline that was not beaten.
        baselines: the simulated time of a step for each known design, in seconds. None if the
            design does not fit in memory, or is not defined here.
        devices: the names of the cluster's devices.
        layers: the names of the chain's layers.
        outputs: the shape and dtype of each stage's output.
        spans: the spans of the simulated step.
        split: whether backward has two actions. Such a plan is for torch's own runtime.
    """

    stages: tuple[Stage, ...]
    orders: Mapping[int, Sequence[Action]]
    microbatches: int
    step_s: float
    method: str
    baselines: Mapping[str, float | None]
    devices: tuple[str, ...]
    layers: tuple[str, ...]
    outputs: tuple[tuple[tuple[int, ...], str], ...]
    spans: tuple[StepSpan, ...]
    split: bool = False

    def bands(self) -> dict[int, list[list[Action]]]:
        """Return the actions of each device, grouped in bands; see `schedule.bands`."""
        return bands(self.spans)

    def module_names(self) -> list[list[str]]:
        """Return the layer names of each stage, for torchtitan's ``module_fqns_per_model_part``."""
        return [list(self.layers[stage.start : stage.stop]) for stage in self.stages]

    def csv(self) -> str:
        """Return the compute-only schedule in the format of torch's schedules, one rank per line.

        On failure: ``ValueError`` for a plan with replicas, since torch keeps a stage on one rank.
        """
        replicated = [number for number, stage in enumerate(self.stages) if len(stage.devices) > 1]
        if replicated:
            raise ValueError(
                f"expected one device per stage, got replicas of stages {replicated}; torch's "
                "schedules support none: run the plan with crossover_ddp.pipeline.Runner, or plan "
                "with max_replicas=1"
            )
        used = dict.fromkeys(stage.devices[0] for stage in self.stages)
        return "".join(",".join(map(str, self.orders[device])) + "\n" for device in used)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as a JSON document."""
        document = asdict(self)
        document["orders"] = {
            str(device): [str(action) for action in actions]
            for device, actions in self.orders.items()
        }
        document["stages"] = [stage._asdict() for stage in self.stages]
        document["spans"] = [[*span[:-1], str(span.action)] for span in self.spans]
        return document

    @classmethod
    def from_json(cls, document: Any) -> "Plan":
        """Create a plan from the output of `to_json`."""
        try:
            stages = [
                Stage(each["start"], each["stop"], tuple(each["devices"]), tuple(each["pattern"]))
                for each in document["stages"]
            ]
            orders = {
                int(device): [Action.parse(text) for text in texts]
                for device, texts in document["orders"].items()
            }
            outputs = tuple([(tuple(shape), dtype) for shape, dtype in document["outputs"]])
            spans = tuple(
                [StepSpan._make([*rest, Action.parse(text)]) for *rest, text in document["spans"]]
            )
            names: dict[str, Any] = {name: tuple(document[name]) for name in ("devices", "layers")}
            others = {
                n: document[n] for n in ("microbatches", "step_s", "method", "baselines", "split")
            }
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"expected a plan, got another document ({error!r}); save it with Plan.save"
            ) from error
        return cls(tuple(stages), orders, outputs=outputs, spans=spans, **names, **others)

    def __str__(self) -> str:
        count = f"{len(self.stages)} stage{'s' * (len(self.stages) > 1)}"
        first = f"{count}, {self.microbatches} micro-batches, {self.step_s:.6g} s a step"
        lines = [f"{first} ({self.method}{', split backward' if self.split else ''})"]
        for number, (names, stage) in enumerate(zip(self.module_names(), self.stages, strict=True)):
            layers = " … ".join(dict.fromkeys((names[0], names[-1])))
            lines.append(
                f"  stage {number}: {layers} on {', '.join(self.devices[d] for d in stage.devices)}"
            )
        for name, step_s in self.baselines.items():
            if step_s:
                lines.append(f"  {name}: {step_s:.6g} s, {step_s / self.step_s:.2f}×")
            else:
                lines.append(f"  {name}: does not fit, or is not defined")
        return "\n".join(lines)


def plan_pipeline(
    profile: Profile,
    cluster: DeviceCluster,
    *,
    microbatches: int,
    max_stages: int | None = None,
    max_replicas: int | None = None,
    split: bool = False,
) -> Plan:
    """Find the plan with the shortest simulated step.

    Its step is never longer than the step of a known design that can run.

    Args:
        profile: the costs of the layers, for one micro-batch.
        cluster: the devices. A trained parameter takes four times its size in memory, and a frozen
            one takes its size.
        microbatches: the number of micro-batches in a step, M.
        max_stages: the greatest number of stages. Default: the number of layers, the number of
            devices, or 2 M, whichever is least.
        max_replicas: the greatest number of devices per stage. Default: the number of devices or M,
            whichever is less.
        split: whether to try plans with a split backward too; see [Note: split backward]. `Runner`
            cannot run such plans. Default False.

    On failure: ``ValueError`` if a layer fits in no device's memory, or if no cut of the chain
    fits.
    """
    limits = {"microbatches": microbatches, "max_stages": max_stages, "max_replicas": max_replicas}
    for name, value in limits.items():
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"expected {name} >= 1, got {name}={value!r}; give a whole number")
    _check_layers(profile, cluster, max_stages or 1)
    most = min(max_replicas or microbatches, microbatches, len(cluster))
    search = _Search(profile, cluster, microbatches, max_stages or len(profile), most)
    search.partition()
    finalists = search.finalists()
    search.move()
    search.order([*finalists, *search.finalists()])
    if split:
        search.split_backwards()
    baselines = search.compare(split)
    if not search.found:
        raise ValueError(
            f"expected stages that fit in memory, got none for {len(profile)} layers on "
            f"{len(cluster)} devices with max_stages={max_stages}, max_replicas={max_replicas}; "
            "allow more, use more or larger devices, or smaller micro-batches"
        )
    method, chain, step = search.best()
    last_layers = [profile.layers[stage.stop - 1] for stage in chain.stages]
    return Plan(
        chain.stages,
        {device: list(actions) for device, actions in step.orders.items()},
        microbatches,
        step.step_s,
        method,
        baselines,
        cluster.names,
        tuple([layer.name for layer in profile.layers]),
        tuple([(layer.shape, layer.dtype) for layer in last_layers]),
        # Sorted by begin. The sort is stable, so the spans of a device keep their order.
        tuple(sorted(step.spans, key=lambda span: (span.begin_s, span.device))),
        chain.split,
    )


def _check_layers(profile: Profile, cluster: DeviceCluster, stages: int) -> None:
    if stages > len(profile):
        raise ValueError(
            f"expected at least as many layers as stages, got max_stages={stages} for "
            f"{len(profile)} layers; ask for fewer stages, or cut the model into more layers"
        )
    most = max(cluster.memory_bytes)
    for layer in profile.layers:
        needed = layer.state_bytes + layer.stored_bytes
        if needed > most:
            raise ValueError(
                f"expected layers that fit on a device, got layer {layer.name!r} with "
                f"{needed:.3g} bytes and at most {most:.3g} bytes of memory; cut the layer, or use "
                "smaller micro-batches"
            )


class _Candidate(NamedTuple):
    """Stages, an order of their actions, and the method that found them."""

    method: str
    chain: StagedChain
    step: SimulatedStep


@dataclass
class _Search:
    """The search for a plan. It collects candidates. The one with the shortest step wins."""

    profile: Profile
    cluster: DeviceCluster
    microbatches: int
    max_stages: int
    max_replicas: int
    found: list[_Candidate] = field(default_factory=list)
    _seen: set[tuple[Stage, ...]] = field(default_factory=set)

    def best(self) -> _Candidate:
        """Return the candidate with the shortest step, or the earliest of several equal ones."""
        return min(self.found, key=lambda each: each.step.step_s)

    def _chain(self, stages: Sequence[Stage], split: bool = False) -> StagedChain:
        return StagedChain(self.profile, self.cluster, stages, self.microbatches, split=split)

    def _try(self, chain: StagedChain, tries: int = 0) -> float:
        """Search for an order of the actions, add the candidate, and return its step time.

        Return infinity if the stages do not fit in memory.
        """
        self._seen.add(chain.stages)
        step = best_order(chain, tries=tries)
        if step is not None:
            self.found.append(_Candidate("search", chain, step))
        return math.inf if step is None else step.step_s

    def partition(self) -> None:
        """Solve for the least bottleneck for each order of the devices.

        Then minimize the fill under caps, for the orders that gave the shortest steps.
        """
        solved: list[tuple[float, int, float, Partitioner]] = []
        limits = {
            "max_stages": min(self.max_stages, 2 * self.microbatches),
            "max_replicas": self.max_replicas,
        }
        for order in device_orders(self.cluster):
            programme = Partitioner(self.profile, self.cluster, order, self.microbatches, **limits)
            if found := programme.solve():
                shortest_s = self._simulated([stages for _, stages in found.values()])
                bottleneck_s = min(value for value, _ in found.values())
                solved.append((shortest_s, len(solved), bottleneck_s, programme))
        for _, _, bottleneck_s, programme in sorted(solved)[: max(1, 32 // len(self.cluster))]:
            capped = [programme.solve(cap * bottleneck_s) for cap in CAPS]
            self._simulated([stages for each in capped for _, stages in each.values()])

    def _simulated(self, candidates: Sequence[Sequence[Stage]]) -> float:
        """Simulate the candidates that may beat the best one, and return the shortest step time.

        A candidate that cannot beat the best one counts with its lower bound.
        """
        fresh = [
            self._chain(each)
            for each in dict.fromkeys(map(tuple, candidates))
            if each not in self._seen
        ]
        bounds = sorted([(chain.lower_bound_s(), place) for place, chain in enumerate(fresh)])
        shortest_s = math.inf
        for bound_s, place in bounds[:_SIMULATED]:
            hopeless = bool(self.found) and bound_s >= self.best().step.step_s
            shortest_s = min(shortest_s, bound_s if hopeless else self._try(fresh[place]))
        return shortest_s

    def move(self) -> None:
        """Improve the best cut for each number of stages, by one or two random moves at a time."""
        if not self.found:
            return
        dice = random.Random(_SEED)
        best: dict[int, tuple[float, StagedChain]] = {}
        for _, chain, step in sorted(self.found, key=lambda each: each.step.step_s):
            best.setdefault(len(chain.stages), (step.step_s, chain))
        lengths = itertools.cycle([*best])
        for length in itertools.islice(lengths, self._affordable(self.best().chain, 200)):
            shortest_s, chain = best[length]
            stages = chain.stages
            for _ in range(dice.choice((1, 2))):
                stages = tuple(_moved(list(stages), len(self.cluster), self.max_replicas, dice))
            other = self._chain(stages)
            if stages not in self._seen and other.lower_bound_s() < shortest_s:
                step_s = self._try(other)
                if step_s < shortest_s:
                    best[length] = step_s, other

    def _affordable(self, chain: StagedChain, most: int) -> int:
        """Return how many orders to search: at most ``most``, and fewer if steps are large."""
        return min(most, max(10, _ACTIONS // (4 * len(chain.stages) * self.microbatches)))

    def finalists(self) -> list[StagedChain]:
        """Return the chains of the candidates with the shortest steps."""
        ranked = sorted(self.found, key=lambda each: each.step.step_s)
        return [each.chain for each in ranked[:_FINALISTS]]

    def order(self, chains: Iterable[StagedChain]) -> None:
        """Search longer for a good order of the actions of each chain."""
        for chain in {chain.stages: chain for chain in chains}.values():
            self._try(chain, self._affordable(chain, _TRIES))

    def split_backwards(self) -> None:
        """Try a split backward with the best cuts that have only one device per stage."""
        ranked = sorted(self.found, key=lambda each: each.step.step_s)
        stages = dict.fromkeys(each.chain.stages for each in ranked)
        single = [each for each in stages if all(len(stage.devices) == 1 for stage in each)]
        self.order(self._chain(each, split=True) for each in single[:_SPLIT])

    def compare(self, split: bool) -> dict[str, float | None]:
        """Simulate the known designs, and return the step time of each one.

        They take the devices in the given order, cut the chain where compute is balanced, and obey
        the limits on stages and replicas. Designs that `Runner` can run become candidates. With
        ``split``, so do those that only torch can run.
        """
        times: dict[str, float | None] = {}
        for name, chain, step in self._known_designs():
            shortest_s = times.setdefault(name, None)
            if step is None or not step.fits(self.cluster.memory_bytes) or math.isinf(step.step_s):
                continue
            times[name] = step.step_s if shortest_s is None else min(shortest_s, step.step_s)
            if split or not chain.split:
                self.found.append(_Candidate(name, chain, step))
        return times

    def _known_designs(self) -> Iterator[tuple[str, StagedChain, SimulatedStep | None]]:
        devices, most_stages = len(self.cluster), min(len(self.profile), self.max_stages)
        for replicas in range(1, self.max_replicas + 1):
            count = devices // replicas
            if devices % replicas or count > most_stages:
                continue
            places = [tuple(range(k * replicas, (k + 1) * replicas)) for k in range(count)]
            cuts = balanced(self.profile, count)
            stages = [Stage(*cut, place) for cut, place in zip(cuts, places, strict=True)]
            chain = self._chain(stages)
            if count == 1:
                yield "data parallel", chain, simulate(chain, gpipe(chain))
                continue
            yield "GPipe", chain, simulate(chain, gpipe(chain))
            yield "1F1B", chain, simulate(chain, one_forward_one_backward(chain))
            if replicas == 1:
                halves = self._chain(stages, split=True)
                yield "zero bubble", halves, list_schedule(halves, depths(halves))
        if 1 < devices <= most_stages // 2:
            cuts = balanced(self.profile, 2 * devices)
            chain = self._chain([Stage(*cut, (k % devices,)) for k, cut in enumerate(cuts)])
            order = interleaved(chain, devices)
            yield "interleaved", chain, simulate(chain, order) if order else None


def _moved(stages: list[Stage], devices: int, most: int, dice: random.Random) -> list[Stage]:
    """Exchange two devices, move a cut by one layer, or give a stage another device, at random."""
    kind = dice.randrange(3)
    place = dice.randrange(len(stages))
    one, two = stages[place], stages[(place + 1) % len(stages)]
    if kind == 0 and devices > 1:
        first, second = dice.sample(range(devices), 2)
        exchange = {first: second, second: first}
        return [s._replace(devices=tuple([exchange.get(d, d) for d in s.devices])) for s in stages]
    if kind == 1 and place + 1 < len(stages):
        cut = one.stop + dice.choice((-1, 1))
        if one.start < cut < two.stop:
            stages[place : place + 2] = one._replace(stop=cut), two._replace(start=cut)
    if kind == 2:
        free = sorted(set(range(devices)) - {d for stage in stages for d in stage.devices})
        other = dice.randrange(len(stages))
        if free and len(one.devices) < most:
            stages[place] = one._replace(devices=(*one.devices, dice.choice(free)))
        elif other != place and len(stages[other].devices) > 1 and len(one.devices) < most:
            stages[place] = one._replace(devices=(*one.devices, stages[other].devices[-1]))
            stages[other] = stages[other]._replace(devices=stages[other].devices[:-1])
    return stages

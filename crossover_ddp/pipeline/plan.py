"""Find stages, devices and orders for a chain on a cluster, and keep them as a plan."""

import json
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from .cluster import DeviceCluster
from .model import PARAMETER_COPIES, Action, Stage, StagedChain
from .partition import CAPS, Partitioner, balanced, device_orders
from .profile import Profile
from .schedule import bands, best_order, depths, gpipe, interleaved, one_forward_one_backward
from .simulate import SimulatedStep, StepSpan, list_schedule, simulate

_SIMULATED: Final = 12
"""Candidates that are simulated, of those with the least lower bound."""
_FINALISTS: Final = 3
_EVENTS: Final = 60_000
"""Actions to simulate while devices are exchanged and cuts are moved: it bounds the time of planning."""
_SEED: Final = 0


@dataclass(frozen=True)
class Plan:
    """Which rank computes which layers, and in which order.

    Args:
        stages: first to last; devices are numbers of the cluster, and ranks for `Runner`.
        orders: for each device its actions, in order.
        microbatches: of a step.
        step_s: the simulated time of a step.
        method: where the plan comes from: ``search``, or the baseline that nothing beat.
        baselines: the simulated time of each known design, None where it does not fit in memory or is not defined.
        devices: names of the cluster's devices.
        layers: names of the chain's layers.
        outputs: shape and dtype of each stage's output.
        spans: the simulated step.
        split: whether backward is in two actions.
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
        """Return for each device its actions in each band; see `schedule.bands`."""
        return bands(SimulatedStep(self.step_s, self.orders, self.spans, {}))

    def module_names(self) -> list[list[str]]:
        """Return the layers of each stage, for torchtitan's ``module_fqns_per_model_part``."""
        return [list(self.layers[stage.start : stage.stop]) for stage in self.stages]

    def csv(self) -> str:
        """Return the compute-only schedule, one rank per line, as torch's pipeline schedules read it.

        On failure: ``ValueError`` for a plan with replicas: in torch a stage is on one rank.
        """
        replicated = [number for number, stage in enumerate(self.stages) if len(stage.devices) > 1]
        if replicated:
            raise ValueError(
                f"expected one device per stage, got replicas of stages {replicated}; torch's schedules know none: run "
                "the plan with crossover_ddp.pipeline.Runner, or plan with max_replicas=1"
            )
        used = dict.fromkeys(stage.devices[0] for stage in self.stages)
        return "".join(",".join(map(str, self.orders[device])) + "\n" for device in used)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as a JSON document."""
        document = asdict(self)
        document["orders"] = {str(d): [str(action) for action in each] for d, each in self.orders.items()}
        document["stages"] = [stage._asdict() for stage in self.stages]
        document["spans"] = [list(span) for span in self.spans]
        return document

    @classmethod
    def from_json(cls, document: Any) -> "Plan":
        """Read what `to_json` returns."""
        try:
            stages = [
                Stage(each["start"], each["stop"], tuple(each["devices"])) for each in document["stages"]
            ]
            orders = {int(d): [Action.parse(text) for text in each] for d, each in document["orders"].items()}
            outputs = tuple([(tuple(shape), dtype) for shape, dtype in document["outputs"]])
            spans = tuple([StepSpan(*span) for span in document["spans"]])
            names: dict[str, Any] = {name: tuple(document[name]) for name in ("devices", "layers")}
            rest = {n: document[n] for n in ("microbatches", "step_s", "method", "baselines", "split")}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"expected a plan, got a document that is none ({error!r}); save it with Plan.save"
            ) from error
        return cls(tuple(stages), orders, outputs=outputs, spans=spans, **names, **rest)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON."""
        Path(path).write_text(json.dumps(self.to_json()) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Plan":
        """Read what `save` wrote."""
        return cls.from_json(json.loads(Path(path).read_text()))

    def __str__(self) -> str:
        lines = [
            f"{len(self.stages)} stages, {self.microbatches} micro-batches, {self.step_s:.6g} s a step ({self.method})"
        ]
        for number, stage in enumerate(self.stages):
            span = self.layers[stage.start] + (
                f" … {self.layers[stage.stop - 1]}" if stage.stop - stage.start > 1 else ""
            )
            lines.append(f"  stage {number}: {span} on {', '.join(self.devices[d] for d in stage.devices)}")
        for name, step_s in self.baselines.items():
            ratio = (
                f"{step_s:.6g} s, {step_s / self.step_s:.2f}×"
                if step_s
                else "does not fit, or is not defined"
            )
            lines.append(f"  {name}: {ratio}")
        return "\n".join(lines)


def plan_pipeline(
    profile: Profile,
    cluster: DeviceCluster,
    *,
    microbatches: int,
    max_stages: int | None = None,
    max_replicas: int | None = None,
    split: bool = False,
    parameter_copies: float = PARAMETER_COPIES,
    orders: Sequence[Sequence[int]] | None = None,
    tries: int = 40,
    moves: int | None = None,
) -> Plan:
    """Find the plan with the shortest simulated step; never longer than a baseline's.

    Args:
        profile: of the layers, for one micro-batch.
        cluster: the devices.
        microbatches: of a step, M.
        max_stages: default the least of layers, devices and 2 M.
        max_replicas: of a stage; default the least of devices and M.
        split: compute the weights' gradients apart from the input's. Such a plan is for torch's own runtime.
        parameter_copies: how often a parameter's size counts in memory; default 4, for Adam.
        orders: device orders to try; default `device_orders`.
        tries: random changes of the order of actions, for each finalist.
        moves: random changes of devices and cuts; default what takes some seconds.

    On failure: ``ValueError`` if nothing fits: a layer is larger than any memory, or no cut of the chain fits.
    """
    _check(profile, cluster, microbatches, max_stages, max_replicas, parameter_copies)
    search = _Search(profile, cluster, microbatches, split, parameter_copies)
    search.asked_stages = max_stages or len(profile)
    search.max_stages = min(max_stages or 2 * microbatches, len(profile), len(cluster))
    search.max_replicas = min(max_replicas or microbatches, microbatches, len(cluster))
    search.partitions(device_orders(cluster) if orders is None else orders)
    search.improve(moves)
    search.order(tries)
    baselines = search.baselines()
    if not search.found:
        raise ValueError(
            f"expected stages that fit in memory, got none for {len(profile)} layers on {len(cluster)} devices with "
            f"max_stages={search.max_stages}; use more or larger devices, or smaller micro-batches"
        )
    step_s, _, method, chain, step = search.best()
    return Plan(
        chain.stages,
        {device: list(actions) for device, actions in step.orders.items()},
        microbatches,
        step_s,
        method,
        baselines,
        cluster.names,
        tuple([layer.name for layer in profile.layers]),
        tuple([(profile.layers[s.stop - 1].shape, profile.layers[s.stop - 1].dtype) for s in chain.stages]),
        step.spans,
        split,
    )


def _check(
    profile: Profile,
    cluster: DeviceCluster,
    microbatches: int,
    max_stages: int | None,
    max_replicas: int | None,
    parameter_copies: float,
) -> None:
    for name, value in (
        ("microbatches", microbatches),
        ("max_stages", max_stages),
        ("max_replicas", max_replicas),
    ):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"expected {name} >= 1, got {name}={value!r}; give a whole number")
    if max_stages is not None and max_stages > len(profile):
        raise ValueError(
            f"expected at least as many layers as stages, got max_stages={max_stages} for {len(profile)} layers; "
            "ask for fewer stages, or cut the model finer"
        )
    most = max(cluster.memory_bytes)
    for layer in profile.layers:
        needed = parameter_copies * layer.parameter_bytes + layer.stored_bytes
        if needed > most:
            raise ValueError(
                f"expected layers that fit on a device, got layer {layer.name!r} with {needed:.3g} bytes and at most "
                f"{most:.3g} bytes of memory; cut the layer, or use smaller micro-batches"
            )


class _Search:
    """Candidates of a plan, and the shortest step found for each."""

    max_stages = max_replicas = asked_stages = 1

    def __init__(
        self, profile: Profile, cluster: DeviceCluster, microbatches: int, split: bool, copies: float
    ) -> None:
        self._profile, self._cluster, self._microbatches = profile, cluster, microbatches
        self._split, self._copies = split, copies
        self._seen: set[tuple[Stage, ...]] = set()
        self.found: list[tuple[float, int, str, StagedChain, SimulatedStep]] = []

    def best(self) -> tuple[float, int, str, StagedChain, SimulatedStep]:
        """Return the shortest step, and of equal ones the first."""
        return min(self.found, key=lambda each: each[:2])

    def _chain(self, stages: Sequence[Stage], *, split: bool | None = None) -> StagedChain:
        split = self._split if split is None else split
        return StagedChain(
            self._profile,
            self._cluster,
            stages,
            self._microbatches,
            split=split,
            parameter_copies=self._copies,
        )

    def _keep(self, method: str, chain: StagedChain, step: SimulatedStep | None) -> None:
        if step is not None:
            self.found.append((step.step_s, len(self.found), method, chain, step))

    # --- partitions ----------------------------------------------------------------------------------------

    def partitions(self, orders: Sequence[Sequence[int]]) -> None:
        """Solve for the least bottleneck on all orders, then below caps for those that gave the shortest steps."""
        programmes = [self._partitioner(order) for order in orders]
        solved = [programme.solve() for programme in programmes]
        before = [self._simulated([stages for _, stages in each.values()]) for each in solved]
        least = sorted(range(len(orders)), key=lambda place: before[place])
        for place in least[: max(1, 32 // len(self._cluster))]:
            bottleneck_s = min((value for value, _ in solved[place].values()), default=None)
            if bottleneck_s is not None:
                capped = [programmes[place].solve(cap * bottleneck_s * (1 + 1e-9)) for cap in CAPS]
                self._simulated([stages for each in capped for _, stages in each.values()])

    def _partitioner(self, order: Sequence[int]) -> Partitioner:
        return Partitioner(
            self._profile,
            self._cluster,
            order,
            self._microbatches,
            max_stages=self.max_stages,
            max_replicas=self.max_replicas,
            parameter_copies=self._copies,
        )

    def _simulated(self, candidates: Sequence[Sequence[Stage]]) -> float:
        """Simulate the most promising candidates and return the shortest step."""
        fresh = [tuple(stages) for stages in candidates if tuple(stages) not in self._seen]
        chains = sorted(map(self._chain, dict.fromkeys(fresh)), key=StagedChain.lower_bound_s)
        best_s = float("inf")
        for chain in chains[:_SIMULATED]:
            step = self._evaluated(chain)
            best_s = min(best_s, step.step_s if step else best_s)
        return best_s

    def _evaluated(self, chain: StagedChain) -> SimulatedStep | None:
        self._seen.add(chain.stages)
        step = best_order(chain, tries=4 if len(chain.stages) * self._microbatches <= 128 else 1)
        self._keep("search", chain, step)
        return step

    # --- moves ---------------------------------------------------------------------------------------------

    def improve(self, moves: int | None) -> None:
        """Exchange devices and move cuts of the best stages at random, as long as steps become shorter."""
        if not self.found:
            return
        dice = random.Random(_SEED)
        _, _, _, chain, step = self.best()
        events = 2 * len(chain.stages) * self._microbatches
        for _ in range(min(200, max(10, _EVENTS // (6 * events))) if moves is None else moves):
            stages = tuple(_moved(list(chain.stages), len(self._cluster), self.max_replicas, dice))
            if stages in self._seen:
                continue
            other = self._chain(stages)
            if other.lower_bound_s() < step.step_s:
                changed = self._evaluated(other)
                if changed is not None and changed.step_s < step.step_s:
                    chain, step = other, changed

    def order(self, tries: int) -> None:
        """Search longer for the order of the best candidates' actions."""
        finalists = sorted(self.found, key=lambda each: each[:2])[:_FINALISTS]
        for _, _, method, chain, _ in finalists:
            # Large steps take long to simulate.
            limit = max(4, _EVENTS // (6 * len(chain.stages) * self._microbatches))
            self._keep(method, chain, best_order(chain, tries=min(tries, limit)))

    # --- baselines -----------------------------------------------------------------------------------------

    def baselines(self) -> dict[str, float | None]:
        """Simulate the known designs, which take the devices as they come and cut where compute is balanced.

        Only those with as many stages and replicas as are allowed.
        """
        times: dict[str, float | None] = {}
        for name, chain, step in self._known_designs():
            fits = step is not None and step.fits(self._cluster.memory_bytes)
            old = times.setdefault(name, None)
            if step is None or not fits or step.step_s == float("inf"):
                continue
            times[name] = step.step_s if old is None else min(old, step.step_s)
            if chain.split == self._split:
                self._keep(name, chain, step)
        return times

    def _known_designs(self) -> Iterator[tuple[str, StagedChain, SimulatedStep | None]]:
        devices, layers = len(self._cluster), len(self._profile)
        for replicas in range(1, min(devices, self._microbatches) + 1):
            count = devices // replicas
            if devices % replicas or count > min(layers, self.asked_stages) or replicas > self.max_replicas:
                continue
            cuts = balanced(self._profile, count)
            stages = [
                Stage(*cut, tuple(range(k * replicas, (k + 1) * replicas))) for k, cut in enumerate(cuts)
            ]
            chain = self._chain(stages, split=False)
            if count == 1:
                yield "data parallel", chain, simulate(chain, gpipe(chain))
                continue
            yield "GPipe", chain, simulate(chain, gpipe(chain))
            yield "1F1B", chain, simulate(chain, one_forward_one_backward(chain))
            halves = self._chain(stages, split=True)
            yield "zero bubble", halves, list_schedule(halves, depths(halves))
        if 1 < devices <= min(layers, self.asked_stages) // 2:
            cuts = balanced(self._profile, 2 * devices)
            chain = self._chain([Stage(*cut, (k % devices,)) for k, cut in enumerate(cuts)], split=False)
            order = interleaved(chain, devices)
            yield "interleaved", chain, simulate(chain, order) if order else None


def _moved(stages: list[Stage], devices: int, most: int, dice: random.Random) -> list[Stage]:
    """Exchange two devices, move a cut by one layer, or move a device to another stage."""
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

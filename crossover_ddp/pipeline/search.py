"""The search for the plan with the shortest simulated step. Our design.

[Note: numbering] The search sees the devices in an order that depends only on their properties, so
another numbering of the same devices gives the same plan. Only the known designs use the devices
in the given order.
"""

import itertools
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from .bounds import compute_bound_s, stage_bound_s
from .cluster import DeviceCluster
from .exact import MOST_DEVICES, BranchAndBound, stage_pattern
from .model import Stage, StagedChain
from .partition import CAPS, Partitioner, balanced, device_orders
from .plan import runs_on_torch
from .profile import Profile
from .schedule import best_order, depths, gpipe, interleaved, one_forward_one_backward
from .simulate import SimulatedStep, list_schedule, simulate

_SIMULATED: Final = 12
"""How many candidates to simulate for one device order: those with the least lower bounds."""
_FINALISTS: Final = 2
"""How many candidates get a longer search for the order of their actions.

They are chosen before devices are exchanged and cuts are moved, and again afterwards, since the
candidates with the shortest steps at first need not have the best order.
"""
_PARTIAL_PLANS: Final = 4_000
"""How many partial plans of a small cluster to extend at most."""
_LOOPED: Final = 3
"""How many orders of devices to try with two stages on each device."""
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
_PROVEN: Final = 1 + 1e-9
_SHORT_DEPTHS: Final = (2.0, 1.0)
"""How many micro-batches in flight to make room for if memory is short."""


class Candidate(NamedTuple):
    """Stages, an order of their actions, and the method that found them."""

    method: str
    chain: StagedChain
    step: SimulatedStep


class Limits(NamedTuple):
    """The plans that are allowed.

    Args:
        microbatches: the number of micro-batches in a step.
        counts: the numbers of stages that are allowed, from least to greatest.
        max_replicas: the greatest number of devices of a stage.
        runtime: ``torch`` for plans that torch's runtime can run, or ``any``.
        split: whether a split backward is allowed.
    """

    microbatches: int
    counts: range
    max_replicas: int
    runtime: str
    split: bool

    def allow(self, chain: StagedChain) -> bool:
        """Return whether a plan with these stages is allowed."""
        if len(chain.stages) not in self.counts:
            return False
        if any(len(stage.devices) > self.max_replicas for stage in chain.stages):
            return False
        if chain.split and not self.split:
            return False
        if self._is_tied_across(chain) and not runs_on_torch(
            chain.stages, self.microbatches, chain.split
        ):
            return False
        is_torch = self.runtime == "torch"
        return not is_torch or runs_on_torch(chain.stages, self.microbatches, chain.split)

    @staticmethod
    def _is_tied_across(chain: StagedChain) -> bool:
        """Return whether stages share parameters, which `Runner` refuses."""
        for one, two, _ in chain.profile.tied:
            for stage in chain.stages:
                if (stage.start <= one < stage.stop) != (stage.start <= two < stage.stop):
                    return True
        return False


@dataclass
class Search:
    """The search for a plan. It collects candidates. The one with the shortest step wins."""

    profile: Profile
    cluster: DeviceCluster
    limits: Limits
    # Whether stages with recomputed layers will be added, which may use less memory.
    recompute: bool = False
    found: list[Candidate] = field(default_factory=list)
    # The lower bounds of simulated stages for which no order meets the bound.
    _open: dict[tuple[Stage, ...], float] = field(default_factory=dict)
    _seen: set[tuple[Stage, ...]] = field(default_factory=set)
    # No plan that was left out is shorter than this.
    _frontier_s: float = math.inf

    def run(self) -> None:
        """Collect candidates."""
        if len(self.cluster) <= MOST_DEVICES:
            self._branch_and_bound()
        else:
            self._partition()
        self._order(self._finalists())
        if not self._is_proven():
            self._move()
            self._order(self._finalists())
        self._loop()
        if self.limits.split:
            self._split_backwards()

    def add(self, chain: StagedChain) -> None:
        """Search for an order of the actions of these stages, and add them if they are allowed."""
        self._try(chain, self._affordable(chain, _TRIES))

    def best(self) -> Candidate:
        """Return the candidate with the shortest step, or the earliest of several equal ones."""
        return min(self.found, key=lambda each: each.step.step_s)

    def best_s(self) -> float:
        """Return the shortest step time, or infinity if nothing was found."""
        return min([each.step.step_s for each in self.found], default=math.inf)

    def bound_s(self) -> float:
        """Return a lower bound.

        For a plan with several stages on a device or a split backward, and if layers may be
        recomputed to save memory, it holds for all plans. For others, it holds for plans with at
        most one stage on a device and whole backwards.
        """
        best = self.best()
        step_s = best.step.step_s
        used = [device for stage in best.chain.stages for device in stage.devices]
        every_s = compute_bound_s(self.profile, self.cluster, self.limits.microbatches)
        is_beyond = best.chain.split or len(set(used)) < len(used)
        if is_beyond or (self.recompute and min(self.cluster.memory_bytes) < math.inf):
            return min(step_s, every_s)
        if len(self.cluster) <= MOST_DEVICES:
            open_s = min(self._open.values(), default=math.inf)
            return max(every_s, min(step_s, self._frontier_s, open_s))
        return stage_bound_s(
            self.profile,
            self.cluster,
            self.limits.microbatches,
            self.limits.max_replicas,
            step_s,
        )

    def _is_proven(self) -> bool:
        open_s = min(self._open.values(), default=math.inf)
        return min(open_s, self._frontier_s) * _PROVEN >= self.best_s()

    # --- candidates -------------------------------------------------------------------------------

    def _chain(self, stages: Sequence[Stage], split: bool = False) -> StagedChain:
        return StagedChain(
            self.profile,
            self.cluster,
            stages,
            self.limits.microbatches,
            split=split,
        )

    def _try(self, chain: StagedChain, tries: int = 0) -> float:
        """Search for an order of the actions, add the candidate, and return its step time.

        Return infinity if the plan is not allowed or does not fit in memory.
        """
        self._seen.add(chain.stages)
        if not self.limits.allow(chain):
            return math.inf
        step = best_order(chain, tries=tries)
        if step is None:
            return math.inf
        self.found.append(Candidate("search", chain, step))
        return step.step_s

    def _finalists(self) -> list[StagedChain]:
        """Return the chains of the candidates with the shortest steps."""
        ranked = sorted(self.found, key=lambda each: each.step.step_s)
        chains = {each.chain.stages: each.chain for each in ranked}
        return [*chains.values()][:_FINALISTS]

    def _order(self, chains: Iterable[StagedChain]) -> None:
        """Search longer for a good order of the actions of each chain."""
        for chain in {chain.stages: chain for chain in chains}.values():
            self._try(chain, self._affordable(chain, _TRIES))

    def _affordable(self, chain: StagedChain, most: int) -> int:
        """Return how many orders to search: at most ``most``, and fewer if steps are large."""
        actions = 4 * len(chain.stages) * self.limits.microbatches
        return min(most, max(10, _ACTIONS // actions))

    # --- small clusters ---------------------------------------------------------------------------

    def _branch_and_bound(self) -> None:
        """Search all plans with at most one stage on each device."""
        sizes = self._replica_counts()
        for least, most in sizes:
            search = BranchAndBound(
                self.profile,
                self.cluster,
                self.limits.microbatches,
                self.limits.counts,
                (least, most),
            )
            rest_s = search.search(self._consider, self.best_s, _PARTIAL_PLANS // len(sizes))
            self._frontier_s = min(self._frontier_s, rest_s)
        self._close()

    def _close(self) -> None:
        """Search longer for orders of the stages whose bound is below the best step.

        Those with the least bounds come first. The number of orders is limited.
        """
        left = _ACTIONS * 2
        for bound_s, stages in sorted(
            [(bound_s, stages) for stages, bound_s in self._open.items()]
        ):
            if bound_s * _PROVEN < self.best_s() and left > 0:
                chain = self._chain(stages)
                left -= _TRIES * len(chain.tasks)
                if self._try(chain, _TRIES) <= bound_s * _PROVEN:
                    del self._open[stages]
        best_s = self.best_s()
        self._open = {stages: s for stages, s in self._open.items() if s < best_s}

    def _replica_counts(self) -> list[tuple[int, int]]:
        """Return the least and greatest number of replicas of a stage, for each search."""
        most = min(self.limits.max_replicas, len(self.cluster))
        if self.limits.runtime == "any":
            return [(1, most)]
        return [(r, r) for r in range(1, most + 1) if not self.limits.microbatches % r]

    def _consider(self, stages: Sequence[Stage]) -> None:
        """Simulate stages that may beat the best plan."""
        chain = self._chain(stages)
        if chain.stages in self._seen or not chain.fits() or not self.limits.allow(chain):
            return
        bound_s = chain.lower_bound_s()
        if bound_s >= self.best_s():
            return
        step_s = self._try(chain)
        if bound_s * _PROVEN < step_s:
            self._open[chain.stages] = bound_s

    # --- large clusters ---------------------------------------------------------------------------

    def _partition(self) -> None:
        """Solve for the least bottleneck for each order of the devices.

        For the orders that gave the shortest steps, minimize the fill under caps as well, and make
        room for fewer micro-batches if memory is short. If nothing fits otherwise, make room for
        one micro-batch with all orders.
        """
        solved: list[tuple[float, int, float, Partitioner]] = []
        orders = device_orders(self.cluster)
        for order in orders:
            self._simulated(self._regular(order))
        programmes = [self._programme(order) for order in orders]
        for place, programme in enumerate(programmes):
            if found := programme.solve():
                shortest_s = self._simulated([stages for _, stages in found.values()])
                bottleneck_s = min(value for value, _ in found.values())
                solved.append((shortest_s, place, bottleneck_s, programme))
        for _, _, bottleneck_s, programme in sorted(solved)[: max(1, 32 // len(self.cluster))]:
            for cap in CAPS:
                self._simulate_all(programme.solve(cap * bottleneck_s))
            if programme.lacks_memory:
                for depth in _SHORT_DEPTHS:
                    self._simulate_all(programme.solve(depth=depth))
        if not self.found:
            for programme in programmes:
                self._simulate_all(programme.solve(depth=1.0))

    def _regular(self, order: Sequence[int]) -> list[list[Stage]]:
        """Return stages with balanced compute and as many replicas each, for all such numbers."""
        found = []
        for replicas in range(1, self.limits.max_replicas + 1):
            count = len(order) // replicas
            if not len(order) % replicas and count in self.limits.counts:
                runs = [order[k * replicas : (k + 1) * replicas] for k in range(count)]
                cuts = balanced(self.profile, [1.0] * count)
                found.append(
                    [
                        self._shared(Stage(*cut, tuple(run)))
                        for cut, run in zip(cuts, runs, strict=True)
                    ]
                )
        return found

    def _programme(self, order: Sequence[int]) -> Partitioner:
        return Partitioner(
            self.profile,
            self.cluster,
            order,
            self.limits.microbatches,
            max_stages=min(self.limits.counts[-1], 2 * self.limits.microbatches),
            max_replicas=self.limits.max_replicas,
        )

    def _simulate_all(self, solved: Mapping[int, tuple[float, list[Stage]]]) -> None:
        self._simulated([stages for _, stages in solved.values()])

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
            hopeless = bound_s >= self.best_s()
            shortest_s = min(shortest_s, bound_s if hopeless else self._try(fresh[place]))
        return shortest_s

    # --- local search -----------------------------------------------------------------------------

    def _move(self) -> None:
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
                moved = _moved(list(stages), len(self.cluster), self.limits.max_replicas, dice)
                stages = tuple([self._shared(stage) for stage in moved])
            other = self._chain(stages)
            if stages not in self._seen and other.lower_bound_s() < shortest_s:
                step_s = self._try(other)
                if step_s < shortest_s:
                    best[length] = step_s, other

    def _shared(self, stage: Stage) -> Stage:
        """Return the stage with the pattern that suits its replicas."""
        pattern = stage_pattern(
            self.profile,
            self.cluster,
            stage.start,
            stage.stop,
            stage.devices,
            self.limits.microbatches,
        )
        return stage._replace(pattern=pattern)

    # --- several stages on a device, split backwards ----------------------------------------------

    def _loop(self) -> None:
        """Try two stages on each device: in the same order again (looped), or back (V)."""
        if not self.found and len(self.limits.counts) == 1:
            for first in device_orders(self.cluster):
                self._place(list(itertools.islice(itertools.cycle(first), self.limits.counts[0])))
        if len(self.cluster) == 1 or self.limits.counts[-1] < 4:
            return
        ranked = sorted(self.found, key=lambda each: each.step.step_s)
        found = [
            tuple([stage.devices[0] for stage in each.chain.stages])
            for each in ranked
            if all(len(stage.devices) == 1 for stage in each.chain.stages)
        ]
        orders = [order for order in dict.fromkeys(found) if 1 < len(order) == len(set(order))]
        start: list[tuple[int, ...]] = []
        if 2 * len(self.cluster) <= len(self.profile):
            start = [tuple(order) for order in device_orders(self.cluster)[:_LOOPED]]
        for order in dict.fromkeys([*orders[:_LOOPED], *start]):
            for places in ((*order, *order), (*order, *order[::-1])):
                if len(places) <= len(self.profile) and len(places) in self.limits.counts:
                    self._place(places)

    def _place(self, places: Sequence[int]) -> None:
        """Try stages on these devices, and move their cuts."""
        dice = random.Random(_SEED)
        cuts = balanced(self.profile, [self.cluster.speed[device] for device in places])
        stages = [Stage(*cut, (device,)) for cut, device in zip(cuts, places, strict=True)]
        for split in (False, True) if self.limits.split else (False,):
            best = self._chain(stages, split)
            shortest_s = self._try(best, tries=4)
            for _ in range(self._affordable(best, _TRIES) if len(places) > 1 else 0):
                kept = [*best.stages]
                place = dice.randrange(len(kept) - 1)
                cut = kept[place].stop + dice.choice((-1, 1))
                if not kept[place].start < cut < kept[place + 1].stop:
                    continue
                kept[place] = kept[place]._replace(stop=cut)
                kept[place + 1] = kept[place + 1]._replace(start=cut)
                other = self._chain(kept, split)
                if other.lower_bound_s() < shortest_s:
                    step_s = self._try(other)
                    if step_s < shortest_s:
                        shortest_s, best = step_s, other
            if shortest_s < self.best_s() * 1.1:
                self._try(best, self._affordable(best, _TRIES))

    def _split_backwards(self) -> None:
        """Try a split backward with the best cuts that have only one device per stage."""
        ranked = sorted(self.found, key=lambda each: each.step.step_s)
        stages = dict.fromkeys(each.chain.stages for each in ranked)
        single = [each for each in stages if all(len(stage.devices) == 1 for stage in each)]
        self._order(self._chain(each, split=True) for each in single[:_SPLIT])

    # --- known designs ----------------------------------------------------------------------------

    def compare(self, devices: Sequence[int]) -> dict[str, float | None]:
        """Simulate the known designs, and return the step time of each one.

        They take the devices in this order, and obey the limits on stages and replicas. Each is
        tried with as many layers in all stages, and with balanced compute. Those that are allowed
        become candidates.
        """
        times: dict[str, float | None] = {}
        for name, chain, step in self._known_designs(devices):
            shortest_s = times.setdefault(name, None)
            if step is None or not step.fits(self.cluster.memory_bytes) or math.isinf(step.step_s):
                continue
            times[name] = step.step_s if shortest_s is None else min(shortest_s, step.step_s)
            if self.limits.allow(chain):
                self.found.append(Candidate(name, chain, step))
        return times

    def _known_designs(
        self, devices: Sequence[int]
    ) -> Iterator[tuple[str, StagedChain, SimulatedStep | None]]:
        most_stages = min(len(self.profile), self.limits.counts[-1])
        for replicas in range(1, self.limits.max_replicas + 1):
            count = len(devices) // replicas
            if len(devices) % replicas or count > most_stages:
                continue
            places = [tuple(devices[k * replicas : (k + 1) * replicas]) for k in range(count)]
            for cuts in self._cuts(count):
                stages = [Stage(*cut, place) for cut, place in zip(cuts, places, strict=True)]
                yield from self._known_orders(self._chain(stages))
        if 1 < len(devices) <= most_stages // 2:
            for cuts in self._cuts(2 * len(devices)):
                places = [(devices[k % len(devices)],) for k in range(len(cuts))]
                stages = [Stage(*cut, place) for cut, place in zip(cuts, places, strict=True)]
                chain = self._chain(stages)
                order = interleaved(chain, len(devices))
                yield "interleaved", chain, simulate(chain, order) if order else None

    def _cuts(self, count: int) -> list[list[tuple[int, int]]]:
        """Return the cut with balanced compute, and the one with as many layers in all stages."""
        layers = len(self.profile)
        edges = [layers * place // count for place in range(count + 1)]
        return [balanced(self.profile, [1.0] * count), [*itertools.pairwise(edges)]]

    def _known_orders(
        self, chain: StagedChain
    ) -> Iterator[tuple[str, StagedChain, SimulatedStep | None]]:
        if len(chain.stages) == 1:
            yield "data parallel", chain, simulate(chain, gpipe(chain))
            return
        yield "GPipe", chain, simulate(chain, gpipe(chain))
        yield "1F1B", chain, simulate(chain, one_forward_one_backward(chain))
        if all(len(stage.devices) == 1 for stage in chain.stages):
            halves = self._chain(chain.stages, split=True)
            yield "zero bubble", halves, list_schedule(halves, depths(halves))


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

"""Searches all plans of a small cluster by branch and bound, and proves a lower bound. Our design.

The search is over all plans with at most one stage on each device. Stages are chosen from the first
to the last. For the devices that are left, tables hold lower bounds for the stages that are
missing. They are computed beforehand, from the last stage to the first, for all sets of devices.
So a partial plan gets a bound that no way to complete it can beat. Partial plans are extended in
the order of their bounds, until no bound is below the best step that was simulated.

[Note: two bounds] A stage bounds the step in two ways:

* Its devices compute all micro-batches (``work``). Before, the first micro-batch must arrive from
  the stages before. Afterwards, the last gradient must travel back. Both are added up along the
  chain (``passage``): the bound of a chain is max(work, passage + bound of the next stages).
* Its gradients are exchanged after the work, and the busiest port is occupied by the transfers of
  all micro-batches. Both need no passage: the bound is max(work + exposed exchange, channel, bound
  of the next stages).

Replicas are treated as a set: their order and their shares of the micro-batches are chosen later.
The bounds assume the best of both.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import torch

from .cluster import DeviceCluster
from .model import ROUNDED, Stage, layer_times, ring_cost
from .profile import Profile
from .shares import fastest_shares, pattern_of

MOST_DEVICES: Final = 6
"""The greatest number of devices of a small cluster. The tables grow as four to this power."""
_INF: Final = math.inf


class StageTables:
    """The costs of all stages on all sets of devices.

    A table has the dimensions first layer, layer after the last, and set of devices. A set is a
    number whose bit d stands for device d. Costs of stages that do not fit are infinite.
    """

    def __init__(
        self, profile: Profile, cluster: DeviceCluster, microbatches: int, replicas: tuple[int, int]
    ) -> None:
        self.layers = len(profile)
        self.devices = len(cluster)
        shape = (self.layers, self.layers + 1, 1 << self.devices)
        # The time for all micro-batches on the device that takes longest.
        self.work = torch.full(shape, _INF, dtype=torch.float64)
        # The time for one micro-batch on the fastest device.
        self.once = torch.full(shape, _INF, dtype=torch.float64)
        # The work, and the part of the gradient exchange that backward does not hide.
        self.closing = torch.full(shape, _INF, dtype=torch.float64)
        self._profile = profile
        self._cluster = cluster
        self._microbatches = microbatches
        times = [
            [layer_times(profile, cluster, layer, device) for layer in range(self.layers)]
            for device in range(self.devices)
        ]
        self._forward_s = [_ranges([f for f, _ in row]) for row in times]
        self._backward_s = [_ranges([b for _, b in row]) for row in times]
        self._parameter_bytes = _ranges([each.parameter_bytes for each in profile.layers])
        self._needed_bytes = self._memory()
        for devices in _subsets((1 << self.devices) - 1):
            if replicas[0] <= devices.bit_count() <= replicas[1]:
                self._fill(devices)

    def _memory(self) -> torch.Tensor:
        """Return the memory of each stage with one micro-batch in flight."""
        layers = self._profile.layers
        needed = _ranges([layer.state_bytes + layer.stored_bytes for layer in layers])
        shared = _ranges([layer.shared_bytes for layer in layers])
        first = torch.tensor([layer.shared_bytes for layer in layers], dtype=torch.float64)
        needed -= shared - first[:, None]
        starts = torch.arange(self.layers)[:, None]
        stops = torch.arange(self.layers + 1)[None, :]
        for one, two, size_bytes in self._profile.tied:
            both = (starts <= min(one, two)) & (stops > max(one, two))
            needed -= both * (4.0 * size_bytes)
        return needed

    def _fill(self, devices: int) -> None:
        members = _members(devices)
        compute_s = torch.stack([self._forward_s[d] + self._backward_s[d] for d in members])
        # Forward and backward of the first and last micro-batch may be on different replicas.
        once_s = torch.stack([self._forward_s[d] for d in members]).amin(0)
        once_s = once_s + torch.stack([self._backward_s[d] for d in members]).amin(0)
        work_s = self._work(members, compute_s)
        room_bytes = min(self._cluster.memory_bytes[d] for d in members) * ROUNDED
        fits = self._needed_bytes <= room_bytes
        exposed_s = torch.zeros_like(work_s)
        if len(members) > 1:
            per_byte_s, latency_s = self._ring(members)
            hidden_s = torch.stack([self._backward_s[d] for d in members]).amin(0)
            exchange_s = (self._parameter_bytes * per_byte_s).nan_to_num(nan=0.0, posinf=_INF)
            exposed_s = (exchange_s + latency_s - hidden_s).clamp(min=0)
            exposed_s = torch.where(self._parameter_bytes > 0, exposed_s, 0.0)
        self.once[..., devices] = torch.where(fits, once_s, _INF)
        self.work[..., devices] = torch.where(fits, work_s, _INF)
        self.closing[..., devices] = torch.where(fits, work_s + exposed_s, _INF)

    def _work(self, members: Sequence[int], compute_s: torch.Tensor) -> torch.Tensor:
        if len(members) == 1:
            return self._microbatches * compute_s[0]
        if self._profile.times_s:
            # Shares are not rounded, since the best ones differ between stages.
            return self._microbatches / (1 / compute_s).sum(0)
        speeds = [self._cluster.speed[device] for device in members]
        shares = fastest_shares([1 / speed for speed in speeds], self._microbatches)
        longest = max(share / speed for share, speed in zip(shares, speeds, strict=True))
        return longest * compute_s[0] * speeds[0]

    def _ring(self, members: Sequence[int]) -> tuple[float, float]:
        """Return the seconds per byte and the latency of the best ring. Each may be another's."""
        first, *others = members
        costs = [
            ring_cost(self._cluster, [first, *order])[:2]
            for order in itertools.permutations(others)
        ]
        return min(cost for cost, _ in costs), min(latency for _, latency in costs)


def _ranges(values: Sequence[float]) -> torch.Tensor:
    """Return the sums over all ranges of values: row l and column l' hold that from l to l' - 1."""
    sums = torch.tensor([0.0, *values], dtype=torch.float64).cumsum(0)
    found = sums[None, :] - sums[:-1, None]
    empty = torch.arange(len(sums))[None, :] <= torch.arange(len(values))[:, None]
    return found.masked_fill(empty, _INF)


def _members(devices: int) -> list[int]:
    return [device for device in range(devices.bit_length()) if devices >> device & 1]


def _subsets(devices: int) -> Iterator[int]:
    """Yield all subsets of a set except the empty one."""
    subset = devices
    while subset:
        yield subset
        subset = (subset - 1) & devices


class LinkTables:
    """The costs of links between two sets of devices, which are the dimensions of each table."""

    def __init__(self, cluster: DeviceCluster) -> None:
        count = 1 << len(cluster)
        # Seconds per byte on the busiest port, if all micro-batches travel there and back.
        self.channel = torch.full((count, count), _INF, dtype=torch.float64)
        # Seconds per byte and latency of one micro-batch, there and back.
        self.hop = torch.full((count, count), _INF, dtype=torch.float64)
        self.hop_s = torch.zeros((count, count), dtype=torch.float64)
        everything = count - 1
        for one in _subsets(everything):
            for two in _subsets(everything & ~one):
                pairs = [*itertools.product(_members(one), _members(two))]
                back = [(target, source) for source, target in pairs]
                self.channel[one, two] = max(
                    _busiest_port(cluster, pairs), _busiest_port(cluster, back)
                )
                self.hop[one, two] = min(
                    _inverse_rate(cluster, *pair) + _inverse_rate(cluster, *pair[::-1])
                    for pair in pairs
                )
                self.hop_s[one, two] = min(
                    cluster.latency(*pair) + cluster.latency(*pair[::-1]) for pair in pairs
                )


def _inverse_rate(cluster: DeviceCluster, source: int, target: int) -> float:
    rate = cluster.rate(source, target)
    return 1 / rate if rate else _INF


def _busiest_port(cluster: DeviceCluster, pairs: Sequence[tuple[int, int]]) -> float:
    """Return the least seconds per byte on the busiest port, for any use of these links.

    A port of the senders is used at the best rate of its links, and so are the receivers' ports.
    """
    worst_s = 0.0
    for side in (0, 1):
        rates: dict[str, float] = {}
        for pair in pairs:
            port = cluster.ports(*pair)[side]
            rates[port] = max(rates.get(port, 0.0), cluster.rate(*pair))
        total = sum(rates.values())
        worst_s = max(worst_s, 1 / total if total else _INF)
    return worst_s


class SuffixBounds:
    """Lower bounds for the stages from a layer on, see [Note: two bounds].

    A situation is a pair of disjoint sets: the devices of a stage, and the devices that are free
    for the stages after it. The tables have the dimensions number of stages, layer and situation.
    """

    def __init__(self, stages: StageTables, links: LinkTables, profile: Profile, most: int) -> None:
        everything = (1 << stages.devices) - 1
        # The number of each situation.
        self.situation = torch.full((everything + 1, everything + 1), -1, dtype=torch.long)
        self._sets: list[int] = []
        for one in _subsets(everything):
            for free in [0, *_subsets(everything & ~one)]:
                self.situation[one, free] = len(self._sets)
                self._sets.append(one)
        self._first = torch.tensor(self._sets)
        self._tabulate_steps(everything)
        self._links = links
        self._sent_bytes = [layer.activation_bytes for layer in profile.layers]
        shape = (most + 1, stages.layers + 1, len(self._sets))
        # Bounds after a stage that ends before the layer, including the link from it.
        self.busiest = torch.full(shape, _INF, dtype=torch.float64)
        self.passing = torch.full(shape, _INF, dtype=torch.float64)
        self.busiest[0, stages.layers] = 0.0
        self.passing[0, stages.layers] = 0.0
        for count in range(1, most + 1):
            self._extend(count, stages)

    def _tabulate_steps(self, everything: int) -> None:
        """List all steps from a situation to the next one: the next stage takes free devices."""
        before = []
        after = []
        pairs = []
        for one in _subsets(everything):
            for free in _subsets(everything & ~one):
                for two in _subsets(free):
                    before.append(int(self.situation[one, free]))
                    after.append(int(self.situation[two, free & ~two]))
                    pairs.append((one, two))
        self._before = torch.tensor(before, dtype=torch.long)
        self._after = torch.tensor(after, dtype=torch.long)
        self._pairs = torch.tensor(pairs, dtype=torch.long).reshape(-1, 2).T

    def _extend(self, count: int, stages: StageTables) -> None:
        """Fill the tables for ``count`` stages from those for one stage less."""
        links, pairs = self._links, tuple(self._pairs)
        for first in range(stages.layers):
            stops = slice(first + 1, stages.layers + 1)
            closing = stages.closing[first, stops][:, self._first]
            work = stages.work[first, stops][:, self._first]
            once = stages.once[first, stops][:, self._first]
            busiest = torch.maximum(closing, self.busiest[count - 1, stops]).amin(0)
            passing = torch.maximum(work, once + self.passing[count - 1, stops]).amin(0)
            if not first or not len(self._before):
                continue
            size_bytes = self._sent_bytes[first - 1]
            channel = _times(size_bytes, links.channel[pairs])
            hop = _times(size_bytes, links.hop[pairs]) + links.hop_s[pairs]
            for table, values in (
                (self.busiest, torch.maximum(channel, busiest[self._after])),
                (self.passing, hop + passing[self._after]),
            ):
                table[count, first].scatter_reduce_(0, self._before, values, "amin")


def _times(size_bytes: float, per_byte_s: torch.Tensor) -> torch.Tensor:
    # Without a link not even 0 bytes can be sent, so inf * 0 is inf here.
    return (size_bytes * per_byte_s).nan_to_num_(nan=_INF, posinf=_INF)


class _Partial(NamedTuple):
    """The first stages of a plan. Partial plans are compared by their bounds."""

    bound_s: float
    # Numbers partial plans, so that those with equal bounds are not compared further.
    serial: int
    # The stages so far: the first layer, the layer after the last, and the set of devices.
    stages: tuple[tuple[int, int, int], ...]
    free: int
    # Passage of the first micro-batch to the end of these stages and back.
    passage_s: float
    busiest_s: float


@dataclass
class BranchAndBound:
    """The search for the best plan with at most one stage on each device.

    Args:
        profile: the costs of the layers.
        cluster: the devices, at most `MOST_DEVICES`.
        microbatches: the number of micro-batches in a step.
        counts: the numbers of stages that are allowed.
        replicas: the least and the greatest number of devices of a stage.
    """

    profile: Profile
    cluster: DeviceCluster
    microbatches: int
    counts: Sequence[int]
    replicas: tuple[int, int]
    _heap: list[_Partial] = field(default_factory=list)
    _serial: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self._everything = (1 << len(self.cluster)) - 1
        self._stages = StageTables(self.profile, self.cluster, self.microbatches, self.replicas)
        self._links = LinkTables(self.cluster)
        most = max(self.counts)
        suffix = SuffixBounds(self._stages, self._links, self.profile, most)
        self._situation = suffix.situation
        # By the number of stages so far: the bounds of the best allowed number of further stages.
        self._busiest = []
        self._passing = []
        for done in range(most + 1):
            left = [count - done for count in self.counts if count >= done]
            self._busiest.append(suffix.busiest[left].amin(0))
            self._passing.append(suffix.passing[left].amin(0))
        self._expand(_Partial(0.0, 0, (), self._everything, 0.0, 0.0), _INF)

    def search(
        self, simulate: Callable[[Sequence[Stage]], None], best_s: Callable[[], float], most: int
    ) -> float:
        """Simulate plans in the order of their bounds. Return a bound of all other plans.

        Args:
            simulate: simulates a plan, and remembers it if it is better.
            best_s: returns the best step time that is known.
            most: how many partial plans to extend at most.
        """
        for _ in range(most):
            if not self._heap or self._heap[0].bound_s >= best_s():
                break
            partial = heapq.heappop(self._heap)
            if partial.stages[-1][1] < self._stages.layers:
                self._expand(partial, best_s())
            else:
                for stages in self._plans(partial.stages):
                    simulate(stages)
        return self._heap[0].bound_s if self._heap else _INF

    def _expand(self, partial: _Partial, limit_s: float) -> None:
        """Add all ways to append a stage whose bound is below the limit."""
        done = len(partial.stages) + 1
        if done >= len(self._busiest) or not partial.free:
            return
        first = partial.stages[-1][1] if partial.stages else 0
        stops = slice(first + 1, self._stages.layers + 1)
        sets = torch.tensor([*_subsets(partial.free)])
        passage = torch.full((len(sets),), partial.passage_s, dtype=torch.float64)
        busiest = torch.full((len(sets),), partial.busiest_s, dtype=torch.float64)
        if partial.stages:
            size_bytes = self.profile.layers[first - 1].activation_bytes
            before = partial.stages[-1][2]
            busiest = torch.maximum(busiest, _times(size_bytes, self._links.channel[before, sets]))
            passage = passage + _times(size_bytes, self._links.hop[before, sets])
            passage = passage + self._links.hop_s[before, sets]
        situations = self._situation[sets, partial.free & ~sets]
        busiest = torch.maximum(busiest, self._stages.closing[first, stops][:, sets])
        busiest = torch.maximum(busiest, passage + self._stages.work[first, stops][:, sets])
        passage = passage + self._stages.once[first, stops][:, sets]
        bounds = torch.maximum(busiest, self._busiest[done][stops][:, situations])
        bounds = torch.maximum(bounds, passage + self._passing[done][stops][:, situations])
        # A plan is complete after the last layer, if its number of stages is allowed.
        for row, column in (bounds < limit_s).nonzero().tolist():
            devices = int(sets[column])
            stage = (first, first + 1 + row, devices)
            heapq.heappush(
                self._heap,
                _Partial(
                    float(bounds[row, column]),
                    next(self._serial),
                    (*partial.stages, stage),
                    partial.free & ~devices,
                    float(passage[row, column]),
                    float(busiest[row, column]),
                ),
            )

    def _plans(self, stages: Sequence[tuple[int, int, int]]) -> Iterator[tuple[Stage, ...]]:
        """Yield all orders and shares of the replicas."""
        choices = [[*self._replicas(*stage)] for stage in stages]
        yield from itertools.product(*choices)

    def _replicas(self, start: int, stop: int, devices: int) -> Iterator[Stage]:
        members = _members(devices)
        for order in itertools.permutations(members):
            yield Stage(start, stop, order)
            if pattern := stage_pattern(
                self.profile, self.cluster, start, stop, order, self.microbatches
            ):
                yield Stage(start, stop, order, pattern)


def stage_pattern(
    profile: Profile,
    cluster: DeviceCluster,
    start: int,
    stop: int,
    devices: Sequence[int],
    microbatches: int,
) -> tuple[int, ...]:
    """Return the pattern by which replicas of different speed compute as briefly as possible.

    Return an empty pattern if the replicas are equally fast.
    """
    times_s = [
        sum(sum(layer_times(profile, cluster, layer, device)) for layer in range(start, stop))
        for device in devices
    ]
    if len(set(times_s)) == 1:
        return ()
    return pattern_of(fastest_shares(times_s, microbatches))

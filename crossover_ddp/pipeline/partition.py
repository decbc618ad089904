"""Chooses the cuts of the chain and the devices of each stage by dynamic programming.

Our design, for the problem that SPP states (arXiv 2204.10562). Given an order of the devices, a
stage is a run of layers on a run of devices. The programme works from the last layer to the first.
If s stages are left from layer l on, and the first of them is on r devices from position i on, then
the bottleneck is

    T(s, l, i, r) = min over l' of max{ stage(l, l', i, r),
                                        min over r' of max{ channel(l', i, r, r'),
                                                            T(s - 1, l', i + r, r') } }

stage is the compute time of the replica that takes longest for its share of the micro-batches, plus
the part of the gradient exchange that the backward of a micro-batch does not hide. channel is the
time for which the transfers of a step occupy the busiest port. The number of stages left is the
number of micro-batches in flight that keeps all of them busy. If memory is short, the programme is
solved again for fewer.

The bottleneck T ignores the time to fill the pipeline. So the programme is solved again to minimize
the fill, under caps on the bottleneck.

The arrays are torch tensors, since torch works without numpy. networkx is a dependency of torch.
"""

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from typing import Final

import networkx
import torch

from .cluster import DeviceCluster
from .model import ROUNDED, Stage, layer_times, ring_cost
from .profile import Profile
from .shares import fastest_shares, pattern_of

CAPS: Final = (1.1, 1.25)
"""Caps on the bottleneck when the fill is minimized, as multiples of the least bottleneck."""
_INF: Final = math.inf
_DEVICES_IN_ORDERS: Final = 128
"""Limits the number of orders times devices, since an order of many devices takes long to solve."""
_SEED: Final = 0
_ANY_BANDWIDTH: Final = 1e30
_CACHED: Final = 1 << 16
"""How many elements fit in the processor's cache."""
_ALL: Final = slice(None)


class Partitioner:
    """The dynamic programme for one order of all devices."""

    def __init__(
        self,
        profile: Profile,
        cluster: DeviceCluster,
        order: Sequence[int],
        microbatches: int,
        *,
        max_stages: int,
        max_replicas: int,
    ) -> None:
        self._cluster = cluster
        self._order = list(order)
        self._microbatches = microbatches
        self._layers = len(profile)
        count = len(order)
        self._max_stages = min(max_stages, count, self._layers)
        self._replicas = min(count, microbatches, max_replicas)
        # All runs of devices. A run (i, r) has r devices from position i on.
        self._runs = [
            (i, r) for i in range(count) for r in range(1, min(self._replicas, count - i) + 1)
        ]
        # For each layer: sums over the layers before it.
        self._prefix = {
            name: _cumulated([getattr(layer, name) for layer in profile.layers])
            for name in ("parameter_bytes", "state_bytes", "stored_bytes", "shared_bytes")
        }
        self._sent_bytes = [layer.activation_bytes for layer in profile.layers]
        self._depth = _INF
        # Whether some stages had no memory in the last solution.
        self.lacks_memory = False
        self._tabulate_runs()
        self._tabulate_times(profile)
        self._tabulate_channels()

    def _tabulate_runs(self) -> None:
        """Fill the tables that have one value per run of devices."""
        cluster = self._cluster
        rows = []
        for i, r in self._runs:
            devices = self._order[i : i + r]
            per_byte_s, latency_s = ring_cost(cluster, devices)[:2] if r > 1 else (0.0, 0.0)
            memory_bytes = min(cluster.memory_bytes[device] for device in devices)
            rows.append((memory_bytes * ROUNDED, per_byte_s, latency_s))
        columns = torch.tensor(rows, dtype=torch.float64).T
        self._memory, self._ring, self._ring_s = columns
        # The position after the run.
        self._next = torch.tensor([i + r for i, r in self._runs])
        # The index of (i, r) in the last two dimensions of `best`, flattened.
        self._place = torch.tensor([i * (self._replicas + 1) + r for i, r in self._runs])

    def _tabulate_times(self, profile: Profile) -> None:
        """Fill the tables of compute time, and choose how replicas share micro-batches.

        The tables of time hold sums over the layers before a layer, for each run of devices.
        """
        device_times = torch.tensor(
            [
                [
                    layer_times(profile, self._cluster, layer, device)
                    for layer in range(len(profile))
                ]
                for device in self._order
            ],
            dtype=torch.float64,
        )  # by position, layer, and forward or backward
        once_s = device_times.sum(2)
        chain_s = once_s.sum(1).tolist()
        # By run and micro-batch: the place in the run of the device that computes it.
        self._replica = torch.zeros(len(self._runs), self._microbatches, dtype=torch.long)
        self._patterns: list[tuple[int, ...]] = []
        works = []
        onces = []
        hidden = []
        most = []
        for number, (i, r) in enumerate(self._runs):
            shares = fastest_shares(chain_s[i : i + r], self._microbatches)
            pattern = () if len(set(chain_s[i : i + r])) == 1 else pattern_of(shares)
            stage = Stage(0, 0, tuple(range(r)), pattern)
            places = [stage.device(micro) for micro in range(self._microbatches)]
            self._replica[number] = torch.tensor(places)
            self._patterns.append(pattern)
            counts = torch.tensor([places.count(place) for place in range(r)])
            # The greatest times of single layers add up to at least the greatest time of a stage.
            works.append((once_s[i : i + r] * counts[:, None]).amax(0))
            onces.append(once_s[i : i + r].amax(0))
            hidden.append(device_times[i : i + r, :, 1].amin(0))
            most.append(float(counts.max()))
        # The micro-batches of the replica that has the most.
        self._share = torch.tensor(most, dtype=torch.float64)
        zero = torch.zeros(1, len(self._runs), dtype=torch.float64)
        self._work = torch.cat([zero, torch.stack(works, 1).cumsum(0)])
        self._once = torch.cat([zero, torch.stack(onces, 1).cumsum(0)])
        self._hidden = torch.cat([zero, torch.stack(hidden, 1).cumsum(0)])

    def _tabulate_channels(self) -> None:
        """Fill the tables that have one value per run (i, r) and number r' of devices after it.

        One table has the seconds per byte on the busiest port. The other two have the seconds per
        byte and the latency of the first micro-batch, there and back.
        """
        order, cluster, count = self._order, self._cluster, len(self._order)
        numbers: dict[str, int] = {}
        out, into = torch.zeros(2, count, count, dtype=torch.long)
        inverse, latency = torch.zeros(2, count, count, dtype=torch.float64)
        for a, b in itertools.permutations(range(count), 2):
            source_port, target_port = cluster.ports(order[a], order[b])
            out[a, b] = numbers.setdefault(source_port, len(numbers))
            into[a, b] = numbers.setdefault(target_port, len(numbers))
            rate = cluster.rate(order[a], order[b])
            inverse[a, b] = 1 / rate if rate else _INF
            latency[a, b] = cluster.latency(order[a], order[b])
        shape = (len(self._runs), self._replicas + 1)
        self._channel = torch.full(shape, _INF, dtype=torch.float64)
        self._hop = torch.full(shape, _INF, dtype=torch.float64)
        self._hop_s = torch.zeros(shape, dtype=torch.float64)
        index = {run: place for place, run in enumerate(self._runs)}
        for r, r2 in itertools.product(range(1, self._replicas + 1), repeat=2):
            if r + r2 > count:
                continue
            starts = torch.arange(count - r - r2 + 1)[:, None]
            places = torch.tensor([index[i, r] for i in range(len(starts))])
            behind = torch.tensor([index[i + r, r2] for i in range(len(starts))])
            sources = starts + self._replica[places]
            targets = starts + r + self._replica[behind]
            load = torch.zeros(len(starts), len(numbers), dtype=torch.float64)
            for pairs in ((sources, targets), (targets, sources)):
                for port in (out, into):
                    load.scatter_add_(1, port[pairs], inverse[pairs])
            self._channel[places, r2] = load.amax(1)
            first = (sources[:, 0], targets[:, 0])
            self._hop[places, r2] = inverse[first] + inverse[first[::-1]]
            self._hop_s[places, r2] = latency[first] + latency[first[::-1]]

    def solve(
        self, cap_s: float = _INF, depth: float = _INF
    ) -> dict[int, tuple[float, list[Stage]]]:
        """Return the least bottleneck for each number of stages, and the stages that have it.

        With ``cap_s``, return the least fill instead, among stages whose bottleneck is at most
        ``cap_s``. Stages have memory for as many micro-batches as there are stages from them on, or
        for ``depth`` if that is less. Numbers of stages for which nothing fits are left out.
        """
        self._depth = depth
        self.lacks_memory = False
        layers, most = self._layers, self._max_stages
        # behind[s, l, run]: value of the best s stages from layer l on, after a stage on that run.
        behind = torch.full((most + 1, layers + 1, len(self._runs)), _INF, dtype=torch.float64)
        behind[0, layers] = 0.0
        # best[s, l, i, r]: value of the best s stages from layer l on, if the first is on (i, r).
        shape = (most + 1, layers, len(self._order) + 1, self._replicas + 1)
        best = torch.full(shape, _INF, dtype=torch.float64)
        at_once = max(1, _CACHED // self._channel.numel())
        for first in reversed(range(layers)):
            counts = range(1, min(most, layers - first) + 1)
            values = self._values(first, counts, behind, cap_s).amin(1)
            best[counts.start : counts.stop, first].flatten(1)[:, self._place] = values
            # Take a few numbers of stages at a time, so that the operands stay in the cache.
            for some in torch.tensor(counts).split(at_once) if first else ():
                behind[some, first] = self._followed(first, best[some, first], cap_s).amin(2)
        found = {}
        for s in range(1, most + 1):
            value, place = best[s, 0].flatten().min(0)
            if value < _INF:
                found[s] = float(value), list(self._walk(s, int(place), behind, best, cap_s))
        return found

    def _stage(self, first: int, runs: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the costs of a stage from layer ``first`` on, by its end and its run of devices.

        The costs are the time of a step, the time of a micro-batch, and how many micro-batches fit
        in memory.
        """
        sums = {
            name: (prefix[first + 1 :] - prefix[first])[:, None]
            for name, prefix in self._prefix.items()
        }
        work, once, hidden = [
            table[first + 1 :, runs] - table[first, runs]
            for table in (self._work, self._once, self._hidden)
        ]
        # A stage without parameters exchanges nothing and needs no link, so inf * 0 is 0 here.
        exchange = (sums["parameter_bytes"] * self._ring[runs]).nan_to_num(nan=0.0, posinf=_INF)
        exposed = (exchange + self._ring_s[runs] - hidden).clamp(min=0)
        room = self._memory[runs] - sums["state_bytes"]
        # The first layer of a stage shares nothing with the layer before.
        shared = sums["shared_bytes"] - self._prefix["shared_bytes"][first : first + 2].diff()
        stored = sums["stored_bytes"] - shared
        # A stage that stores no activations still needs room for its parameters.
        fits = torch.where(room < 0, 0.0, room / stored.clamp(min=1e-9)).floor()
        return work + exposed, once, fits

    def _values(
        self, first: int, counts: range, behind: torch.Tensor, cap_s: float, runs: slice = _ALL
    ) -> torch.Tensor:
        """Return the values of all ways to continue with a stage that begins at layer ``first``.

        A value is the bottleneck, or with a cap the fill, in seconds. It is infinite if the stage
        does not fit. The dimensions are the number of stages left, from ``counts``, the end of the
        first of these stages, and its run of devices.
        """
        step, once, fits = self._stage(first, runs)
        behind = behind[counts.start - 1 : counts.stop - 1, first + 1 :, runs]
        values = torch.maximum(step, behind) if cap_s == _INF else once + behind
        if cap_s < _INF:
            values.masked_fill_(step > cap_s, _INF)
        wanted = torch.tensor(counts, dtype=torch.float64).clamp(max=self._depth)
        in_flight = torch.minimum(self._share[runs], wanted[:, None])[:, None]
        if bool((fits.amin(0) < in_flight).any()):
            self.lacks_memory = True
            values.masked_fill_(fits < in_flight, _INF)
        return values

    def _followed(
        self, layer: int, best: torch.Tensor, cap_s: float, runs: slice = _ALL
    ) -> torch.Tensor:
        """Return the values of the stages from ``layer`` on, including the channel to them.

        The dimensions are the number of stages left, the run of the previous stage, and the number
        of devices of the next stage.
        """
        size_bytes = self._sent_bytes[layer - 1]
        following = best[:, self._next[runs]]
        # Without a link not even 0 bytes can be sent, so inf * 0 is inf here.
        channel = (size_bytes * self._channel[runs]).nan_to_num_(nan=_INF, posinf=_INF)
        if cap_s == _INF:
            return torch.maximum(channel, following)
        fill: torch.Tensor = size_bytes * self._hop[runs] + self._hop_s[runs] + following
        return fill.masked_fill_(channel > cap_s, _INF)

    def _walk(
        self, s: int, place: int, behind: torch.Tensor, best: torch.Tensor, cap_s: float
    ) -> Iterator[Stage]:
        """Yield the stages that gave a value, by retracing the choices from the first layer on."""
        first = 0
        while s:
            i, r = divmod(place, self._replicas + 1)
            number = self._runs.index((i, r))
            run = slice(number, number + 1)
            values = self._values(first, range(s, s + 1), behind, cap_s, run)
            stop = first + 1 + int(values.argmin())
            yield Stage(first, stop, tuple(self._order[i : i + r]), self._patterns[number])
            s -= 1
            if s:
                following = int(self._followed(stop, best[s : s + 1, stop], cap_s, run).argmin())
                first = stop
                place = (i + r) * (self._replicas + 1) + following


def _cumulated(values: Sequence[float]) -> torch.Tensor:
    return torch.tensor([0.0, *values], dtype=torch.float64).cumsum(0)


def balanced(profile: Profile, speeds: Sequence[float]) -> list[tuple[int, int]]:
    """Cut the chain into a run of layers for each speed, so that the longest time is minimal.

    Bandwidth and memory are ignored.
    """
    count = len(speeds)
    alike = DeviceCluster(((_ANY_BANDWIDTH,) * count,) * count, speed=tuple(speeds))
    programme = Partitioner(
        Profile(profile.layers), alike, range(count), 1, max_stages=count, max_replicas=1
    )
    return [(stage.start, stage.stop) for stage in programme.solve()[count][1]]


# --- device orders --------------------------------------------------------------------------------


def device_orders(cluster: DeviceCluster) -> list[list[int]]:
    """Return the orders of devices to solve for.

    These are the given order, the order by node, a path along fast links, an order by minimum cuts,
    the reverse of each of these, and random orders.
    """
    natural = list(range(len(cluster)))
    by_node = sorted(
        natural, key=lambda device: (cluster.nodes.index(cluster.nodes[device]), device)
    )
    orders = [natural, by_node, greedy_path(cluster), minimum_cut_order(cluster)]
    found = dict.fromkeys(map(tuple, orders + [order[::-1] for order in orders]))
    dice = random.Random(_SEED)
    while len(found) < min(_DEVICES_IN_ORDERS // len(cluster), math.factorial(len(cluster))):
        found[tuple(dice.sample(natural, len(natural)))] = None
    return [list(order) for order in found]


def _slower_direction(cluster: DeviceCluster, one: int, two: int) -> float:
    return min(cluster.rate(one, two), cluster.rate(two, one))


def greedy_path(cluster: DeviceCluster) -> list[int]:
    """Return the best of the greedy paths that start from each device.

    A greedy path always continues to the free device with the fastest link. The best path is the
    one whose slowest link is fastest.
    """
    best_rate = -1.0
    best_path: list[int] = []
    for start in range(len(cluster)):
        path = [start]
        free = set(range(len(cluster))) - {start}
        slowest = _INF
        while free:
            # Negated, so that the lowest device is taken among equal rates.
            rate, negative = max(
                (_slower_direction(cluster, path[-1], device), -device) for device in free
            )
            slowest = min(slowest, rate)
            path.append(-negative)
            free.remove(-negative)
        if slowest > best_rate:
            best_rate = slowest
            best_path = path
    return best_path


def minimum_cut_order(cluster: DeviceCluster) -> list[int]:
    """Return an order of the devices by minimum cuts.

    Cut the devices in two where the least bandwidth is lost, then cut each part in the same way.
    """
    graph = networkx.Graph()
    for one, two in itertools.combinations(range(len(cluster)), 2):
        graph.add_edge(one, two, weight=_slower_direction(cluster, one, two))

    def ordered(devices: list[int]) -> list[int]:
        if len(devices) < 3:
            return devices
        _, parts = networkx.stoer_wagner(graph.subgraph(devices))  # JACM 1997
        return [device for part in sorted(map(sorted, parts)) for device in ordered(part)]

    return ordered(list(range(len(cluster))))

"""Where to cut the chain, and which devices compute each stage: device orders, and a dynamic programme over them.

Our design, after the problem of SPP (arXiv 2204.10562). Given an order of the devices, a stage is a run of layers on a
run of devices. From the back, for s stages left from layer l on, the first of them on r devices from place i:

    T(s, l, i, r) = min over l' of max{ stage(l, l', i, r), min over r' of max{ channel(l', i, r, r'),
                                                                              T(s - 1, l', i + r, r') } }

stage is ceil(M/r) times the compute of a micro-batch, plus what the backward of a micro-batch does not hide of the
gradient exchange; channel the time for which the transfers of a step occupy the busiest port. The number of stages
left bounds the micro-batches in flight, hence memory. The bottleneck T ignores the time to fill the pipeline, so the
programme is solved again for the least fill below caps on the bottleneck.

Arrays are torch's, since torch needs no numpy; networkx comes with torch.
"""

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from typing import Final

import networkx
import torch

from .cluster import DeviceCluster
from .model import Stage, ring_cost
from .profile import Profile

CAPS: Final = (1.1, 1.25)
_INF: Final = math.inf
_IN_ORDERS: Final = 128
"""Devices in all orders together, since those of many devices take long."""
_SEED: Final = 0
_ANY_BANDWIDTH: Final = 1e30
_CACHED: Final = 1 << 16
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
        self._cluster, self._order, self._microbatches = cluster, list(order), microbatches
        count, self._layers = len(order), len(profile)
        self._max_stages = min(max_stages, count, self._layers)
        self._replicas = min(count, microbatches, max_replicas)
        # All runs of devices: r of them from place i.
        self._runs = [
            (i, r) for i in range(count) for r in range(1, min(self._replicas, count - i) + 1)
        ]
        self._prefix = {
            name: torch.tensor(
                [0.0, *[getattr(layer, name) for layer in profile.layers]], dtype=torch.float64
            ).cumsum(0)
            for name in (
                "forward_s",
                "backward_s",
                "parameter_bytes",
                "state_bytes",
                "stored_bytes",
            )
        }
        self._sent = [layer.activation_bytes for layer in profile.layers]
        self._tabulate_runs()
        self._tabulate_channels()

    def _tabulate_runs(self) -> None:
        cluster, rows = self._cluster, []
        for i, r in self._runs:
            devices = self._order[i : i + r]
            ring = ring_cost(cluster, devices)[:2] if r > 1 else (0.0, 0.0)
            rows.append(
                (
                    min(cluster.speed[d] for d in devices),
                    min(cluster.memory_bytes[d] for d in devices),
                    *ring,
                )
            )
        self._speed, self._memory, self._ring, self._ring_s = torch.tensor(
            rows, dtype=torch.float64
        ).T
        self._share = torch.tensor(
            [-(-self._microbatches // r) for _, r in self._runs], dtype=torch.float64
        )
        self._next = torch.tensor([i + r for i, r in self._runs])
        self._place = torch.tensor([i * (self._replicas + 1) + r for i, r in self._runs])

    def _tabulate_channels(self) -> None:
        """For runs (i, r) followed by r' devices: seconds per byte on the busiest port, and of the first hop's way."""
        order, cluster, count = self._order, self._cluster, len(self._order)
        numbers: dict[str, int] = {}
        out, into = torch.zeros(2, count, count, dtype=torch.long)
        inverse, latency = torch.zeros(2, count, count, dtype=torch.float64)
        for a, b in itertools.permutations(range(count), 2):
            out[a, b], into[a, b] = (
                numbers.setdefault(port, len(numbers)) for port in cluster.ports(order[a], order[b])
            )
            rate = cluster.rate(order[a], order[b])
            inverse[a, b] = 1 / rate if rate else _INF
            latency[a, b] = cluster.latency(order[a], order[b])
        shape = (len(self._runs), self._replicas + 1)
        self._channel, self._hop = torch.full((2, *shape), _INF, dtype=torch.float64)
        self._hop_s = torch.zeros(shape, dtype=torch.float64)
        index = {run: place for place, run in enumerate(self._runs)}
        micros = torch.arange(self._microbatches)
        for r, r2 in itertools.product(range(1, self._replicas + 1), repeat=2):
            if r + r2 > count:
                continue
            starts = torch.arange(count - r - r2 + 1)[:, None]
            sources, targets = starts + micros % r, starts + r + micros % r2
            places = torch.tensor([index[i, r] for i in range(len(starts))])
            load = torch.zeros(len(starts), len(numbers), dtype=torch.float64)
            for way in ((sources, targets), (targets, sources)):
                for port in (out, into):
                    load.scatter_add_(1, port[way], inverse[way])
            self._channel[places, r2] = load.amax(1)
            first = (sources[:, 0], targets[:, 0])
            self._hop[places, r2] = inverse[first] + inverse[first[::-1]]
            self._hop_s[places, r2] = latency[first] + latency[first[::-1]]

    def solve(self, cap_s: float = _INF) -> dict[int, tuple[float, list[Stage]]]:
        """Return for each number of stages the least bottleneck, or the least fill below ``cap_s``, and its stages.

        Numbers of stages for which nothing fits are left out.
        """
        layers, most = self._layers, self._max_stages
        # behind[s, l]: for each run of devices the best that follows a stage on it which ends before layer l.
        behind = torch.full((most + 1, layers + 1, len(self._runs)), _INF, dtype=torch.float64)
        behind[0, layers] = 0.0
        # best[s, l]: for each place and number of devices of the next stage the best from layer l on.
        shape = (most + 1, layers, len(self._order) + 1, self._replicas + 1)
        best = torch.full(shape, _INF, dtype=torch.float64)
        at_once = max(1, _CACHED // self._channel.numel())
        for first in reversed(range(layers)):
            counts = range(1, min(most, layers - first) + 1)
            values = self._values(first, counts, behind, cap_s).amin(1)
            best[counts.start : counts.stop, first].flatten(1)[:, self._place] = values
            # Few numbers of stages at a time, so that what is compared stays in the processor's cache.
            for some in torch.tensor(counts).split(at_once) if first else ():
                behind[some, first] = self._followed(first, best[some, first], cap_s).amin(2)
        found = {}
        for s in range(1, most + 1):
            value, place = best[s, 0].flatten().min(0)
            if value < _INF:
                found[s] = float(value), list(self._walk(s, int(place), behind, best, cap_s))
        return found

    def _stage(self, first: int, runs: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return a step's time, a micro-batch's time, and how many fit, of stages from ``first`` to any layer."""
        speed = self._speed[runs]
        sums = {
            name: (prefix[first + 1 :] - prefix[first])[:, None]
            for name, prefix in self._prefix.items()
        }
        once = (sums["forward_s"] + sums["backward_s"]) / speed
        # Without parameters nothing is exchanged, even where there is no link.
        exchange = (sums["parameter_bytes"] * self._ring[runs]).nan_to_num(nan=0.0, posinf=_INF)
        exposed = (exchange + self._ring_s[runs] - sums["backward_s"] / speed).clamp(min=0)
        room = self._memory[runs] - sums["state_bytes"]
        # A stage that stores nothing still must have room for its parameters.
        fits = torch.where(room < 0, 0.0, room / sums["stored_bytes"].clamp(min=1e-9)).floor()
        return self._share[runs] * once + exposed, once, fits

    def _values(
        self, first: int, counts: range, behind: torch.Tensor, cap_s: float, runs: slice = _ALL
    ) -> torch.Tensor:
        """Return the value with each of ``counts`` stages left, for each end of the stage and each run of devices."""
        step, once, fits = self._stage(first, runs)
        behind = behind[counts.start - 1 : counts.stop - 1, first + 1 :, runs]
        values = torch.maximum(step, behind) if cap_s == _INF else once + behind
        if cap_s < _INF:
            values.masked_fill_(step > cap_s, _INF)
        in_flight = torch.minimum(self._share[runs], torch.tensor(counts)[:, None])[:, None]
        if bool((fits.amin(0) < in_flight).any()):
            values.masked_fill_(fits < in_flight, _INF)
        return values

    def _followed(
        self, layer: int, best: torch.Tensor, cap_s: float, runs: slice = _ALL
    ) -> torch.Tensor:
        """Return for each number of stages left the value of what follows each run of devices from ``layer`` on.

        Its last dimension is the number of devices there.
        """
        size, following = self._sent[layer - 1], best[:, self._next[runs]]
        # Where there is no link not even 0 bytes go.
        channel = (size * self._channel[runs]).nan_to_num_(nan=_INF, posinf=_INF)
        if cap_s == _INF:
            return torch.maximum(channel, following)
        fill: torch.Tensor = size * self._hop[runs] + self._hop_s[runs] + following
        return fill.masked_fill_(channel > cap_s, _INF)

    def _walk(
        self, s: int, place: int, behind: torch.Tensor, best: torch.Tensor, cap_s: float
    ) -> Iterator[Stage]:
        """Find the stages behind a value by choosing again."""
        first = 0
        while s:
            i, r = divmod(place, self._replicas + 1)
            number = self._runs.index((i, r))
            run = slice(number, number + 1)
            stop = (
                first + 1 + int(self._values(first, range(s, s + 1), behind, cap_s, run).argmin())
            )
            yield Stage(first, stop, tuple(self._order[i : i + r]))
            s -= 1
            if s:
                following = int(self._followed(stop, best[s : s + 1, stop], cap_s, run).argmin())
                first, place = stop, (i + r) * (self._replicas + 1) + following


def balanced(profile: Profile, count: int) -> list[tuple[int, int]]:
    """Cut the chain in ``count`` runs of layers whose largest compute time is least; bandwidth does not count."""
    alike = DeviceCluster(((_ANY_BANDWIDTH,) * count,) * count)
    solved = Partitioner(profile, alike, range(count), 1, max_stages=count, max_replicas=1).solve()
    return [(stage.start, stage.stop) for stage in solved[count][1]]


# --- device orders ---------------------------------------------------------------------------------------------------


def device_orders(cluster: DeviceCluster) -> list[list[int]]:
    """Return orders: as given, by nodes, by fastest neighbours, by minimum cuts, all of these reversed, and random."""
    natural = list(range(len(cluster)))
    by_node = sorted(
        natural, key=lambda device: (cluster.nodes.index(cluster.nodes[device]), device)
    )
    orders = [natural, by_node, greedy_path(cluster), minimum_cut_order(cluster)]
    found = dict.fromkeys(map(tuple, orders + [order[::-1] for order in orders]))
    dice = random.Random(_SEED)
    while len(found) < min(_IN_ORDERS // len(cluster), math.factorial(len(cluster))):
        found[tuple(dice.sample(natural, len(natural)))] = None
    return [list(order) for order in found]


def _slower_way(cluster: DeviceCluster, one: int, two: int) -> float:
    return min(cluster.rate(one, two), cluster.rate(two, one))


def greedy_path(cluster: DeviceCluster) -> list[int]:
    """Return the path, among those that go on to the fastest free neighbour, whose slowest link is fastest."""
    best: tuple[float, list[int]] = (-1.0, [])
    for start in range(len(cluster)):
        path, free, weakest = [start], set(range(len(cluster))) - {start}, _INF
        while free:
            rate, device = max((_slower_way(cluster, path[-1], device), -device) for device in free)
            weakest = min(weakest, rate)
            path.append(-device)
            free.remove(-device)
        best = max(best, (weakest, path), key=lambda each: each[0])
    return best[1]


def minimum_cut_order(cluster: DeviceCluster) -> list[int]:
    """Cut the devices in two where the least bandwidth is lost, and each part again, down to single devices."""
    graph = networkx.Graph()
    for one, two in itertools.combinations(range(len(cluster)), 2):
        graph.add_edge(one, two, weight=_slower_way(cluster, one, two))

    def ordered(devices: list[int]) -> list[int]:
        if len(devices) < 3:
            return devices
        _, parts = networkx.stoer_wagner(graph.subgraph(devices))  # JACM 1997
        return [device for part in sorted(map(sorted, parts)) for device in ordered(part)]

    return ordered(list(range(len(cluster))))

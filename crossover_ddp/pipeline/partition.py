"""Where to cut the chain, and which devices compute each stage: device orders, and a dynamic programme over them.

Our design, after the problem of SPP (arXiv 2204.10562). Given an order of the devices, a stage is a run of layers on a
run of devices. From the back, for s stages left from layer l on, the first of them on r devices from place i:

    T(s, l, i, r) = min over l' of max{ stage(l, l', i, r), min over r' of max{ channel(l', i, r, r'),
                                                                              T(s - 1, l', i + r, r') } }

stage is ceil(M/r) times the compute of a micro-batch, plus what the backward of a micro-batch does not hide of the
gradient exchange; channel the time for which the transfers of a step occupy the busiest port. The number of stages
left bounds the micro-batches in flight, hence memory. The bottleneck T ignores the time to fill the pipeline, so the
programme is solved again for the least fill below caps on the bottleneck.

Arrays are torch's, since torch needs no numpy.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Final

import torch

from .cluster import DeviceCluster
from .model import PARAMETER_COPIES, Stage, ring_cost
from .profile import Profile

CAPS: Final = (1.0, 1.1, 1.25, 1.5, 2.0)
_INF: Final = math.inf


class Partitioner:
    """The dynamic programme for one order of the devices.

    Args:
        profile: of the layers.
        cluster: of the devices.
        order: of all or some devices.
        microbatches: of a step.
        max_stages: the largest number of stages.
        max_replicas: of a stage; default the least of devices and micro-batches.
        parameter_copies: how often a parameter's size counts in memory.
    """

    def __init__(
        self,
        profile: Profile,
        cluster: DeviceCluster,
        order: Sequence[int],
        microbatches: int,
        *,
        max_stages: int,
        max_replicas: int | None = None,
        parameter_copies: float = PARAMETER_COPIES,
    ) -> None:
        self._cluster, self._order, self._microbatches = cluster, list(order), microbatches
        self._copies, self._layers = parameter_copies, len(profile)
        self.max_stages = min(max_stages, len(order), self._layers)
        count = len(order)
        self._replicas = min(count, microbatches, max_replicas or count)
        # All runs of devices: r of them from place i.
        self._runs = [(i, r) for i in range(count) for r in range(1, min(self._replicas, count - i) + 1)]
        self._prefix = {
            name: torch.tensor(
                [0.0, *[getattr(layer, name) for layer in profile.layers]], dtype=torch.float64
            ).cumsum(0)
            for name in ("forward_s", "backward_s", "parameter_bytes", "stored_bytes")
        }
        self._sent = torch.tensor([layer.activation_bytes for layer in profile.layers], dtype=torch.float64)
        self._tabulate_runs()
        self._tabulate_channels()

    def _tabulate_runs(self) -> None:
        cluster, order, rows = self._cluster, self._order, []
        for i, r in self._runs:
            devices = order[i : i + r]
            ring = ring_cost(cluster, devices)[:2] if r > 1 else (0.0, 0.0)
            rows.append(
                (min(cluster.speed[d] for d in devices), min(cluster.memory_bytes[d] for d in devices), *ring)
            )
        self._speed, self._memory, self._ring, self._ring_s = torch.tensor(rows, dtype=torch.float64).T
        self._share = torch.tensor([-(-self._microbatches // r) for _, r in self._runs], dtype=torch.float64)
        self._next = torch.tensor([i + r for i, r in self._runs])
        self._place = torch.tensor([i * (self._replicas + 1) + r for i, r in self._runs])

    def _tabulate_channels(self) -> None:
        """For runs (i, r) followed by r' devices: seconds per byte on the busiest port, and of the first hop's way."""
        order, cluster, count = self._order, self._cluster, len(self._order)
        numbers: dict[str, int] = {}
        out, into, inverse = (
            torch.zeros(count, count, dtype=kind) for kind in (torch.long, torch.long, torch.float64)
        )
        latency = torch.zeros(count, count, dtype=torch.float64)
        for a, b in itertools.permutations(range(count), 2):
            one, two = (numbers.setdefault(p, len(numbers)) for p in cluster.ports(order[a], order[b]))
            rate = cluster.rate(order[a], order[b])
            out[a, b], into[a, b], inverse[a, b] = one, two, 1 / rate if rate else _INF
            latency[a, b] = cluster.latency(order[a], order[b])
        shape = (len(self._runs), self._replicas + 1)
        self._channel = torch.full(shape, _INF, dtype=torch.float64)
        self._hop = torch.full(shape, _INF, dtype=torch.float64)
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
            for each in ((sources, targets), (targets, sources)):
                for table in (out, into):
                    load.scatter_add_(1, table[each], inverse[each])
            self._channel[places, r2] = load.amax(1)
            first = (sources[:, 0], targets[:, 0])
            self._hop[places, r2] = inverse[first] + inverse[first[::-1]]
            self._hop_s[places, r2] = latency[first] + latency[first[::-1]]

    # --- costs ---------------------------------------------------------------------------------------------

    def _stage(self, first: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return a step's time, a micro-batch's time, and how many fit, of stages from ``first`` to any layer."""
        sums = {name: (prefix[first + 1 :] - prefix[first])[:, None] for name, prefix in self._prefix.items()}
        once = (sums["forward_s"] + sums["backward_s"]) / self._speed
        # Without parameters nothing is exchanged, even where there is no link.
        exchange = (sums["parameter_bytes"] * self._ring).nan_to_num(nan=0.0, posinf=_INF) + self._ring_s
        exposed = (exchange - sums["backward_s"] / self._speed).clamp(min=0)
        room = self._memory - self._copies * sums["parameter_bytes"]
        # A stage that stores nothing still must have room for its parameters.
        fits = torch.where(room < 0, 0.0, room / sums["stored_bytes"].clamp(min=1e-9)).floor()
        return self._share * once + exposed, once, fits

    # --- the programme -------------------------------------------------------------------------------------

    def solve(self, cap_s: float = _INF) -> dict[int, tuple[float, list[Stage]]]:
        """Return for each number of stages the least bottleneck, or the least fill below ``cap_s``, and its stages.

        Numbers of stages for which nothing fits are left out.
        """
        fill = cap_s < _INF
        layers, most = self._layers, self.max_stages
        dense = (layers + 1, len(self._order) + 1, self._replicas + 1)
        # behind[s][l]: the best that follows if a stage ends before layer l and s stages are left.
        behind = torch.full((most + 1, layers + 1, len(self._runs)), _INF, dtype=torch.float64)
        best = torch.full((most + 1, *dense), _INF, dtype=torch.float64)
        for first in reversed(range(layers)):
            costs = self._stage(first)
            for s in range(1, min(most, layers - first) + 1):
                value = self._values(s, costs, behind[s - 1, first + 1 :], cap_s, fill).amin(0)
                best[s, first].view(-1)[self._place] = value
                if first:
                    behind[s, first] = self._channels(first, best[s, first], cap_s, fill)[0]
        found = {}
        for s in range(1, most + 1):
            value, place = best[s, 0].view(-1).min(0)
            if value < _INF:
                found[s] = float(value), list(self._walk(s, int(place), behind, best, cap_s, fill))
        return found

    def _values(
        self, s: int, costs: tuple[torch.Tensor, ...], behind: torch.Tensor, cap_s: float, fill: bool
    ) -> torch.Tensor:
        """Return the value for each end of the stage and each run of devices, with s stages left."""
        step, once, fits = costs
        in_flight = self._share.clamp(max=s)
        if s == 1:
            step, once, fits = step[-1:], once[-1:], fits[-1:]
            value = once if fill else step
        else:
            value = once + behind if fill else torch.maximum(step, behind)
        bad = fits < in_flight
        if fill:
            bad |= step > cap_s
        return value.masked_fill(bad, _INF) if bool(bad.any()) else value

    def _channels(
        self, layer: int, best: torch.Tensor, cap_s: float, fill: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return for each run of devices the best that follows it from ``layer`` on, and on how many devices."""
        following = best[self._next]
        channel = self._sent[layer - 1] * self._channel
        channel = channel.masked_fill(channel.isnan(), _INF)  # 0 bytes where there is no link
        if not fill:
            value = torch.maximum(channel, following)
        else:
            hop = self._sent[layer - 1] * self._hop + self._hop_s
            value = (hop + following).masked_fill(~(channel <= cap_s), _INF)
        least, replicas = value.min(1)
        return least, replicas

    def _walk(
        self, s: int, place: int, behind: torch.Tensor, best: torch.Tensor, cap_s: float, fill: bool
    ) -> Iterator[Stage]:
        """Find the stages behind a value by choosing again."""
        first = 0
        while s:
            i, r = divmod(place, self._replicas + 1)
            run = self._runs.index((i, r))
            values = self._values(s, self._stage(first), behind[s - 1, first + 1 :], cap_s, fill)[:, run]
            stop = self._layers if s == 1 else first + 1 + int(values.argmin())
            yield Stage(first, stop, tuple(self._order[i : i + r]))
            s -= 1
            if s:
                replicas = int(self._channels(stop, best[s, stop], cap_s, fill)[1][run])
                first, place = stop, (i + r) * (self._replicas + 1) + replicas


def balanced(profile: Profile, count: int) -> list[tuple[int, int]]:
    """Cut the chain in ``count`` runs of layers whose largest compute time is least; bandwidth does not count."""
    times = [layer.forward_s + layer.backward_s for layer in profile.layers]
    sums = [0.0, *itertools.accumulate(times)]
    best = [sums[-1] - sums[first] for first in range(len(times))] + [0.0]
    cuts: list[list[int]] = []
    for _ in range(count - 1):
        stops = [
            min(range(first + 1, len(times) + 1), key=lambda stop: max(sums[stop] - sums[first], best[stop]))
            for first in range(len(times))
        ]
        cuts.append(stops)
        best = [
            max(sums[stop] - sums[first], best[stop] if stop < len(times) else _INF)
            for first, stop in enumerate(stops)
        ] + [_INF]
    edges = [0]
    for stops in reversed(cuts):
        edges.append(stops[edges[-1]])
    return list(itertools.pairwise([*edges, len(times)]))


# --- device orders ---------------------------------------------------------------------------------------------------


def device_orders(cluster: DeviceCluster) -> list[list[int]]:
    """Return orders worth trying: as given, by nodes, along the fastest neighbours, by minimum cuts, and reversed."""
    count = len(cluster)
    natural = list(range(count))
    by_node = sorted(natural, key=lambda device: (cluster.nodes.index(cluster.nodes[device]), device))
    orders = [natural, by_node, greedy_path(cluster), minimum_cut_order(cluster)]
    orders += [order[::-1] for order in orders]
    return [list(order) for order in dict.fromkeys(map(tuple, orders))]


def _both_ways(cluster: DeviceCluster) -> list[list[float]]:
    """Return the slower direction's rate of each pair."""
    every = range(len(cluster))
    return [[0.0 if a == b else min(cluster.rate(a, b), cluster.rate(b, a)) for b in every] for a in every]


def greedy_path(cluster: DeviceCluster) -> list[int]:
    """Return the path, among those that go on to the fastest free neighbour, whose slowest link is fastest."""
    rates = _both_ways(cluster)
    best: tuple[float, list[int]] = (-1.0, [])
    for start in range(len(rates)):
        path, free, weakest = [start], set(range(len(rates))) - {start}, _INF
        while free:
            rate, device = max((rates[path[-1]][device], -device) for device in free)
            weakest = min(weakest, rate)
            path.append(-device)
            free.remove(-device)
        best = max(best, (weakest, path), key=lambda each: each[0])
    return best[1]


def minimum_cut_order(cluster: DeviceCluster) -> list[int]:
    """Cut the devices in two where the least bandwidth is lost, and each part again, down to single devices."""
    rates = torch.tensor(_both_ways(cluster), dtype=torch.float64)

    def ordered(devices: list[int]) -> list[int]:
        if len(devices) < 3:
            return devices
        side = _minimum_cut(rates[devices][:, devices])
        parts = [
            [d for place, d in enumerate(devices) if (place in side) == inside] for inside in (True, False)
        ]
        return [device for part in parts for device in ordered(part)]

    return ordered(list(range(len(cluster))))


def _minimum_cut(weights: torch.Tensor) -> set[int]:
    """Return one side of the cut with the least weight (Stoer and Wagner, JACM 1997)."""
    weights = weights.clone()
    groups = [{place} for place in range(len(weights))]
    alive = torch.ones(len(weights), dtype=torch.bool)
    best_weight, best_side = _INF, set[int]()
    for phase in range(len(groups) - 1, 0, -1):
        tight = torch.where(alive, 0.0, -_INF)
        last = before = -1
        for _ in range(phase + 1):
            before, last = last, int(tight.argmax())
            weight = float(tight[last])
            tight = tight + weights[last]
            tight[last] = -_INF
        if weight < best_weight:
            best_weight, best_side = weight, set(groups[last])
        weights[before] += weights[last]
        weights[:, before] += weights[:, last]
        weights[before, before] = 0
        groups[before] |= groups[last]
        alive[last] = False
        weights[last] = weights[:, last] = 0
    return best_side

"""Lower bounds of a step for all plans on a cluster of any size. Our design.

The bound is over all plans with at most one stage on each device and whole backwards. It is found
by relaxing the cluster. Each stage is on the fastest devices, uses the fastest links, and only the
number of devices is limited. For a step time T, a dynamic programme finds whether stages exist that
need at most T each. Bisection finds the least such T.

[Note: mixed bounds] [Note: two bounds] in `exact.py` has two bounds of a step for each stage. The
greater one holds, but the stages that are best for one are not best for the other. Any weighted
mean of the two also holds, and the programme finds the stages with the least mean.
"""

import itertools
import math
from typing import Final

import torch

from .cluster import DeviceCluster
from .model import ROUNDED, layer_times
from .profile import Profile
from .shares import fastest_shares

_INF: Final = math.inf
_BISECTIONS: Final = 10
_WEIGHTS: Final = (0.5, 0.0, 1.0, 0.75, 0.25)


def compute_bound_s(profile: Profile, cluster: DeviceCluster, microbatches: int) -> float:
    """Return a bound that holds for all plans, also with several stages on a device.

    All devices together cannot compute faster than the sum of their speeds. One micro-batch cannot
    pass faster than on the fastest device.
    """
    alone_s = 0.0
    for layer in range(len(profile)):
        alone_s += min(
            sum(layer_times(profile, cluster, layer, device)) for device in range(len(cluster))
        )
    if profile.times_s:
        together_s = microbatches * alone_s / len(cluster)
    else:
        together_s = microbatches * alone_s * max(cluster.speed) / sum(cluster.speed)
    return max(alone_s, together_s)


class _RelaxedCluster:
    """The costs of stages on the best r devices, for each r. Index r - 1 stands for r devices."""

    def __init__(
        self, profile: Profile, cluster: DeviceCluster, microbatches: int, max_replicas: int
    ) -> None:
        layers, count = len(profile), len(cluster)
        most = min(max_replicas, count, microbatches)
        times = torch.tensor(
            [
                [layer_times(profile, cluster, layer, device) for layer in range(layers)]
                for device in range(count)
            ],
            dtype=torch.float64,
        )
        # Forward and backward of a micro-batch may be on different replicas.
        self.once = _ranges(times.amin(0).sum(1))
        compute = _ranges(times.sum(2).amin(0))
        self.ahead = _ranges(times[..., 0].amin(0))
        # The slowest device hides most of an exchange behind its last backward.
        hidden = _ranges(times[..., 1].amax(0))
        parameter_bytes = _ranges(
            torch.tensor([layer.parameter_bytes for layer in profile.layers], dtype=torch.float64)
        )
        speeds = [1.0] * count if profile.times_s else sorted(cluster.speed, reverse=True)
        rates = _best_rates(cluster)
        between = _best_rate_between_nodes(cluster)
        together = max(cluster.nodes.count(node) for node in cluster.nodes)
        self._there, self._there_and_back = _best_links(cluster)
        work = []
        exposed = []
        channel = []
        needed = _ranges(
            torch.tensor(
                [
                    layer.state_bytes + layer.stored_bytes - layer.shared_bytes
                    for layer in profile.layers
                ],
                dtype=torch.float64,
            )
        )
        for tie in profile.tied:
            needed -= 4.0 * tie[2]
        rooms = sorted(cluster.memory_bytes, reverse=True)
        for replicas in range(1, most + 1):
            slowness = [speeds[0] / speed for speed in speeds[:replicas]]
            shares = fastest_shares(slowness, microbatches)
            longest = max(n * t for n, t in zip(shares, slowness, strict=True))
            fits = needed <= rooms[replicas - 1] * ROUNDED
            stage = torch.where(fits, longest * compute, _INF)
            wait = torch.zeros_like(stage)
            if replicas > 1:
                # A ring over several nodes uses links between them.
                rate = rates[replicas - 1]
                rate = min(rate, between) if replicas > together else rate
                per_byte_s = 2 * (replicas - 1) / replicas / rate if rate else _INF
                exchange = (parameter_bytes * per_byte_s).nan_to_num(nan=0.0, posinf=_INF)
                wait = (exchange - hidden).clamp(min=0)
            work.append(stage)
            exposed.append(wait)
            total = sum(rates[:replicas])
            channel.append(microbatches / total if total else _INF)
        # By replicas, first layer and layer after the last.
        self.work = torch.stack(work)
        self.exposed = torch.stack(exposed)
        self.channel = torch.tensor(channel, dtype=torch.float64)
        self.sent_bytes = torch.tensor(
            [layer.activation_bytes for layer in profile.layers], dtype=torch.float64
        )

    def hop_s(self, layer: int, weight: float) -> float:
        """Return the least time for one micro-batch from a layer to the next.

        It counts the way there and back with ``weight``, and the way there alone with the rest.
        """
        size_bytes = float(self.sent_bytes[layer])
        both_s, one_s = [
            size_bytes * inverse + latency_s
            for inverse, latency_s in (self._there_and_back, self._there)
        ]
        return weight * both_s + (1 - weight) * one_s


def _ranges(values: torch.Tensor) -> torch.Tensor:
    sums = torch.cat([torch.zeros(1, dtype=torch.float64), values.cumsum(0)])
    return sums[None, :] - sums[:-1, None]


def _best_rates(cluster: DeviceCluster) -> list[float]:
    """Return the best rate of each device to or from any other, best first."""
    best = [0.0] * len(cluster)
    for one, two in itertools.permutations(range(len(cluster)), 2):
        rate = cluster.rate(one, two)
        best[one] = max(best[one], rate)
        best[two] = max(best[two], rate)
    return sorted(best, reverse=True)


def _best_rate_between_nodes(cluster: DeviceCluster) -> float:
    pairs = itertools.permutations(range(len(cluster)), 2)
    apart = [pair for pair in pairs if cluster.nodes[pair[0]] != cluster.nodes[pair[1]]]
    return max([cluster.rate(*pair) for pair in apart], default=0.0)


def _best_links(cluster: DeviceCluster) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the best link there, and the best one there and back.

    A link is given as seconds per byte and as latency, each of which may be another link's.
    """
    there = [_INF, _INF]
    both = [_INF, _INF]
    for one, two in itertools.permutations(range(len(cluster)), 2):
        rate, back = cluster.rate(one, two), cluster.rate(two, one)
        if not rate or not back:
            continue
        latency_s, back_s = cluster.latency(one, two), cluster.latency(two, one)
        there = [min(there[0], 1 / rate), min(there[1], latency_s)]
        both = [min(both[0], 1 / rate + 1 / back), min(both[1], latency_s + back_s)]
    return (there[0], there[1]), (both[0], both[1])


def stage_bound_s(
    profile: Profile,
    cluster: DeviceCluster,
    microbatches: int,
    max_replicas: int,
    known_s: float,
) -> float:
    """Return a bound for all plans with at most one stage on each device and whole backwards.

    Args:
        profile: the costs of the layers.
        cluster: the devices.
        microbatches: the number of micro-batches in a step.
        max_replicas: the greatest number of devices of a stage.
        known_s: the step time of a plan.
    """
    low_s = compute_bound_s(profile, cluster, microbatches)
    relaxed = _RelaxedCluster(profile, cluster, microbatches, max_replicas)
    for weight in _WEIGHTS:
        high_s = known_s
        if _exists(relaxed, len(cluster), low_s, weight):
            continue
        if not _exists(relaxed, len(cluster), known_s * (1 - 1e-9), weight):
            return known_s
        for _ in range(_BISECTIONS):
            middle_s = (low_s + high_s) / 2
            if _exists(relaxed, len(cluster), middle_s, weight):
                high_s = middle_s
            else:
                low_s = middle_s
    return low_s


def _exists(relaxed: _RelaxedCluster, devices: int, step_s: float, weight: float) -> bool:
    """Return whether stages exist that need at most ``step_s`` each.

    Args:
        relaxed: the costs of stages.
        devices: the number of devices.
        step_s: the step time in seconds.
        weight: the weight of the bound with the way back; see [Note: mixed bounds].
    """
    most, layers, _ = relaxed.work.shape
    stage_s = relaxed.work + (1 - weight) * relaxed.exposed
    stage_s = stage_s.masked_fill(relaxed.work + relaxed.exposed > step_s, _INF)
    passage_s = weight * relaxed.once + (1 - weight) * relaxed.ahead
    # By layer and number of free devices: the least bound of the stages from the layer on, with the
    # link to them.
    linked = torch.full((layers + 1, devices + 1), _INF, dtype=torch.float64)
    linked[layers] = 0.0
    best = linked[layers]
    # free[n, r - 1]: how many devices are left of n when the stage takes r.
    free = torch.arange(devices + 1)[:, None] - torch.arange(1, most + 1)
    for first in reversed(range(layers)):
        stops = slice(first + 1, layers + 1)
        behind_s = passage_s[first, stops][:, None, None] + linked[stops][:, free.clamp(min=0)]
        values = torch.maximum(stage_s[:, first, stops].T[:, None, :], behind_s).amin(0)
        values = values.masked_fill(free < 0, _INF)
        if first:
            size_bytes = float(relaxed.sent_bytes[first - 1])
            channel_s = (size_bytes * relaxed.channel).nan_to_num(nan=_INF, posinf=_INF)
            values = values.masked_fill(channel_s > step_s, _INF)
            linked[first] = values.amin(1) + relaxed.hop_s(first - 1, weight)
        best = values.amin(1)
    return float(best[devices]) <= step_s

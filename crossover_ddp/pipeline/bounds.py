"""Lower bounds of a step for all plans on a cluster of any size. Our design.

The bound is over all plans with at most one stage on each device and whole backwards. It is found
by relaxing the cluster. Each stage is on the fastest devices, uses the fastest links, and only the
number of devices is limited. For a step time T, a dynamic programme finds whether stages exist that
need at most T each, see [Note: two bounds] in `exact.py`. Bisection finds the least such T.
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
_BISECTIONS: Final = 12


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
        self.once = _ranges(times.sum(2).amin(0))
        # The slowest device hides most of an exchange behind its last backward.
        hidden = _ranges(times[..., 1].amax(0))
        parameter_bytes = _ranges(
            torch.tensor([layer.parameter_bytes for layer in profile.layers], dtype=torch.float64)
        )
        speeds = [1.0] * count if profile.times_s else sorted(cluster.speed, reverse=True)
        rates, self._best_inverse, self.latency_s = _best_links(cluster)
        work = []
        closing = []
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
            stage = torch.where(fits, longest * self.once, _INF)
            exposed = torch.zeros_like(stage)
            if replicas > 1:
                rate = rates[replicas - 1]
                per_byte_s = 2 * (replicas - 1) / replicas / rate if rate else _INF
                exchange = (parameter_bytes * per_byte_s).nan_to_num(nan=0.0, posinf=_INF)
                exposed = (exchange - hidden).clamp(min=0)
            work.append(stage)
            closing.append(stage + exposed)
            total = sum(rates[:replicas])
            channel.append(microbatches / total if total else _INF)
        # By replicas, first layer and layer after the last.
        self.work = torch.stack(work)
        self.closing = torch.stack(closing)
        self.channel = torch.tensor(channel, dtype=torch.float64)
        self.sent_bytes = torch.tensor(
            [layer.activation_bytes for layer in profile.layers], dtype=torch.float64
        )

    def hop_s(self, layer: int) -> float:
        """Return the least time for one micro-batch from a layer to the next, there and back."""
        size_bytes = float(self.sent_bytes[layer])
        return size_bytes * self._best_inverse + self.latency_s


def _ranges(values: torch.Tensor) -> torch.Tensor:
    sums = torch.cat([torch.zeros(1, dtype=torch.float64), values.cumsum(0)])
    return sums[None, :] - sums[:-1, None]


def _best_links(cluster: DeviceCluster) -> tuple[list[float], float, float]:
    """Return the best rate of each device, best first, and the best link there and back.

    The link is given as seconds per byte and as latency, each of which may be another link's.
    """
    count = len(cluster)
    best = [0.0] * count
    inverse = latency_s = _INF
    for one, two in itertools.combinations(range(count), 2):
        there, back = cluster.rate(one, two), cluster.rate(two, one)
        best[one] = max(best[one], there, back)
        best[two] = max(best[two], there, back)
        if there and back:
            inverse = min(inverse, 1 / there + 1 / back)
            latency_s = min(latency_s, cluster.latency(one, two) + cluster.latency(two, one))
    return sorted(best, reverse=True), inverse, latency_s


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
    if not _exists(relaxed, len(cluster), known_s * (1 - 1e-9)):
        return known_s
    high_s = known_s
    for _ in range(_BISECTIONS):
        middle_s = (low_s + high_s) / 2
        if _exists(relaxed, len(cluster), middle_s):
            high_s = middle_s
        else:
            low_s = middle_s
    return low_s


def _exists(relaxed: _RelaxedCluster, devices: int, step_s: float) -> bool:
    """Return whether stages exist that need at most ``step_s`` each."""
    most, layers, _ = relaxed.work.shape
    # Work of stages whose exchange or links do not need longer; infinite for others.
    allowed = torch.where(relaxed.closing <= step_s, relaxed.work, _INF)
    # By layer and number of free devices: the least bound of the stages from the layer on, and the
    # same with the link to them.
    linked = torch.full((layers + 1, devices + 1), _INF, dtype=torch.float64)
    linked[layers] = 0.0
    best = linked[layers]
    replicas = torch.arange(1, most + 1)
    # free[n, r]: how many devices are left of n when the stage takes r.
    free = torch.arange(devices + 1)[:, None] - replicas
    for first in reversed(range(layers)):
        stops = slice(first + 1, layers + 1)
        rest = linked[stops][:, free.clamp(min=0)]
        behind = relaxed.once[first, stops][:, None, None] + rest
        work = allowed[:, first, stops].T[:, None, :]
        values = torch.maximum(work, behind).amin(0)
        values = values.masked_fill(free < 0, _INF)
        if first:
            size_bytes = float(relaxed.sent_bytes[first - 1])
            channel = (size_bytes * relaxed.channel).nan_to_num(nan=_INF, posinf=_INF)
            values = values.masked_fill(channel > step_s, _INF)
            linked[first] = values.amin(1) + relaxed.hop_s(first - 1)
        best = values.amin(1)
    return float(best[devices]) <= step_s

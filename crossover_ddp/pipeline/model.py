"""A chain cut in stages on devices: what each action of a step takes, and what it occupies. Pure."""

import functools
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from .cluster import DeviceCluster
from .profile import Profile

FORWARD: Final = "F"
BACKWARD: Final = "B"
INPUT_GRADIENT: Final = "I"
WEIGHT_GRADIENT: Final = "W"
EXCHANGE: Final = "G"


class Stage(NamedTuple):
    """Layers ``start`` to ``stop - 1``, replicated on ``devices``; micro-batch m is on ``devices[m % replicas]``."""

    start: int
    stop: int
    devices: tuple[int, ...]


class Action(NamedTuple):
    """Compute ``kind`` of a micro-batch on a stage: forward F, backward B, or its halves I and W.

    In the spans of a simulated step the kind G stands for the exchange of a stage's gradients.
    """

    stage: int
    kind: str
    micro: int

    def __str__(self) -> str:
        """Write it as torch's pipeline schedules do: ``2F0``."""
        return f"{self.stage}{self.kind}{self.micro}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        """Read what ``str`` writes."""
        stage, kind, micro = re.fullmatch(r"(\d+)([FBIWG])(\d+)", text).groups()  # type: ignore[union-attr]
        return cls(int(stage), kind, int(micro))


Orders = Mapping[int, Sequence[Action]]
"""For each device the actions that it computes, first to last."""


class Hop(NamedTuple):
    """A transfer: it occupies the ports for ``wire_s``, and arrives ``latency_s`` later."""

    wire_s: float
    latency_s: float
    ports: tuple[str, ...]


class Task(NamedTuple):
    """What an action takes, and what its end sets off; other tasks by their places in `StagedChain.tasks`.

    ``needs`` counts the results that it waits for, ``slot`` numbers its stage on its device. ``then`` needs its result
    on the same device, ``target`` on the next stage or the one before, after ``hop`` (None on one device).
    """

    action: Action
    device: int
    slot: int
    seconds: float
    needs: int
    then: int | None
    target: int | None
    hop: Hop | None


class StagedChain:
    """What each action of a step costs for given stages, which cover all layers in order.

    ``split``: backward in two actions, the input's gradient and the weights'; each takes half of its time.
    """

    def __init__(
        self,
        profile: Profile,
        cluster: DeviceCluster,
        stages: Sequence[Stage],
        microbatches: int,
        *,
        split: bool = False,
    ) -> None:
        self.profile, self.cluster, self.stages = profile, cluster, tuple(stages)
        self.microbatches, self.split = microbatches, split
        self.kinds = (FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT) if split else (FORWARD, BACKWARD)
        layers = [profile.layers[stage.start : stage.stop] for stage in self.stages]
        self._forward_s = [sum(layer.forward_s for layer in each) for each in layers]
        self._backward_s = [sum(layer.backward_s for layer in each) for each in layers]
        self.stored_bytes = [sum(layer.stored_bytes for layer in each) for each in layers]
        self.state_bytes = [sum(layer.state_bytes for layer in each) for each in layers]
        self._sent_bytes = [each[-1].activation_bytes for each in layers]
        self.exchanges = [self._exchange(stage) for stage in range(len(layers))]
        self._hops: dict[tuple[int, int, int], Hop | None] = {}

    def device(self, stage: int, micro: int) -> int:
        """Return the device that has this micro-batch on this stage."""
        devices = self.stages[stage].devices
        return devices[micro % len(devices)]

    def seconds(self, stage: int, kind: str, micro: int) -> float:
        """Return the compute time of an action."""
        speed = self.cluster.speed[self.device(stage, micro)]
        if kind == FORWARD:
            return self._forward_s[stage] / speed
        return self._backward_s[stage] / speed / (1 if kind == BACKWARD else 2)

    def hop(self, stage: int, micro: int, *, back: bool) -> Hop | None:
        """Return the transfer between a stage and the next (``back``: of the gradient); None on one device."""
        one, two = self.device(stage, micro), self.device(stage + 1, micro)
        source, target = (two, one) if back else (one, two)
        key = (stage, source, target)
        if key not in self._hops:
            self._hops[key] = None if source == target else self._transfer(stage, source, target)
        return self._hops[key]

    def _transfer(self, stage: int, source: int, target: int) -> Hop:
        rate = self.cluster.rate(source, target)
        wire_s = self._sent_bytes[stage] / rate if rate else math.inf
        return Hop(wire_s, self.cluster.latency(source, target), self.cluster.ports(source, target))

    def _exchange(self, stage: int) -> tuple[Hop, float] | None:
        """Return a stage's gradient exchange, and how long before the end of the last backward it begins.

        Gradients of the last layers are ready first, and travel while the others are computed.
        """
        start, stop, devices = self.stages[stage]
        layers = self.profile.layers[start:stop]
        if len(devices) == 1 or not any(layer.parameter_bytes for layer in layers):
            return None
        per_byte_s, latency_s, ports = ring_cost(self.cluster, devices)
        speed = min(self.cluster.speed[device] for device in devices)
        compute_s = wire_end_s = 0.0
        for layer in reversed(layers):
            compute_s += layer.backward_s / speed
            wire_end_s = max(wire_end_s, compute_s) + layer.parameter_bytes * per_byte_s
        wire_s = sum(layer.parameter_bytes for layer in layers) * per_byte_s
        # With a split backward only the last weight gradient is left to overlap with.
        longest_s = compute_s / max(self.cluster.speed) * speed / (2 if self.split else 1)
        lead_s = (
            0.0
            if math.isinf(wire_s)
            else min(max(0.0, wire_s - (wire_end_s - compute_s)), longest_s)
        )
        return Hop(wire_s, latency_s, ports), lead_s

    def limit(self, stage: int) -> int:
        """Return how many micro-batches' activations fit on each of the stage's devices, at most M; 0 if none."""
        room = min(self.cluster.memory_bytes[device] for device in self.stages[stage].devices)
        room -= self.state_bytes[stage]
        if room < self.stored_bytes[stage]:
            return 0
        stored = self.stored_bytes[stage]
        return int(min(self.microbatches, room // stored)) if stored else self.microbatches

    def actions(self) -> list[Action]:
        """Return all compute actions of a step."""
        return [
            Action(stage, kind, micro)
            for stage in range(len(self.stages))
            for kind in self.kinds
            for micro in range(self.microbatches)
        ]

    @functools.cached_property
    def tasks(self) -> list[Task]:
        """All actions of a step, in the order of `actions`."""
        last, count = len(self.stages) - 1, self.microbatches
        found = []
        for place, action in enumerate(self.actions()):
            stage, kind, micro = action
            device, needs, then, target, hop = self.device(stage, micro), 1, None, None, None
            if kind != self.kinds[-1]:
                then = place + count
            if kind == FORWARD and stage < last:
                target, hop = place + len(self.kinds) * count, self.hop(stage, micro, back=False)
            elif kind == self.kinds[1]:
                # It needs the stage's own forward and, but for the last stage, the gradient of its output.
                needs += stage < last
                if stage:
                    target, hop = (
                        place - len(self.kinds) * count,
                        self.hop(stage - 1, micro, back=True),
                    )
            slot = stage * len(self.cluster) + device
            found.append(
                Task(
                    action, device, slot, self.seconds(stage, kind, micro), needs, then, target, hop
                )
            )
        return found

    def lower_bound_s(self) -> float:
        """Return a time that no order beats: a device's work and the way to it and back, or the load of a port."""
        load_s: dict[int | str, float] = defaultdict(float)
        for task in self.tasks:
            load_s[task.device] += task.seconds
        exchanges = [exchange[0] for exchange in self.exchanges if exchange]
        for hop in filter(None, [*(task.hop for task in self.tasks), *exchanges]):
            for port in hop.ports:
                load_s[port] += hop.wire_s
        idle_s: dict[int | str, float] = {}
        way_s = 0.0
        for stage, (_, _, devices) in enumerate(self.stages):
            way_s += self._way_s(stage - 1) if stage else 0.0
            for device in devices:
                idle_s[device] = min(idle_s.get(device, math.inf), way_s)
        return max(load + idle_s.get(place, 0.0) for place, load in load_s.items())

    def _way_s(self, stage: int) -> float:
        """Return the least time in which a micro-batch passes a stage and the link behind it, forward and back."""
        micros, total_s = range(self.microbatches), 0.0
        # Of a split backward the weights' half may come last, and then nothing has to go back.
        for kind in self.kinds[:1] if self.split else self.kinds:
            hops = [self.hop(stage, micro, back=kind != FORWARD) for micro in micros]
            total_s += min(self.seconds(stage, kind, micro) for micro in micros)
            total_s += min(hop.wire_s + hop.latency_s if hop else 0.0 for hop in hops)
        return total_s


def ring_cost(
    cluster: DeviceCluster, devices: Sequence[int]
) -> tuple[float, float, tuple[str, ...]]:
    """Return seconds per byte, start-up seconds and ports of a ring all-reduce in the order of ``devices``."""
    count = len(devices)
    load: dict[str, float] = defaultdict(float)
    latency_s = 0.0
    for source, target in zip(devices, [*devices[1:], devices[0]], strict=True):
        rate = cluster.rate(source, target)
        for port in cluster.ports(source, target):
            load[port] += 2 * (count - 1) / count / rate if rate else math.inf
        latency_s = max(latency_s, 2 * (count - 1) * cluster.latency(source, target))
    return max(load.values()), latency_s, tuple(load)

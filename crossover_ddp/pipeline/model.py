"""The costs of a step for a chain cut into stages: the time and ports of each action. Pure."""

import functools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from .cluster import DeviceCluster
from .profile import Profile

FORWARD: Final = "F"
BACKWARD: Final = "B"
INPUT_GRADIENT: Final = "I"
WEIGHT_GRADIENT: Final = "W"
EXCHANGE: Final = "G"

ROUNDED: Final = 1 + 1e-9
"""Sums of sizes may exceed the memory by this factor, since floating-point sums are rounded."""


class Stage(NamedTuple):
    """Layers ``start`` to ``stop - 1``, replicated on ``devices``.

    Replicas take micro-batches in turn, by default one each. If they differ in speed, ``pattern``
    says which replica takes which: ``devices[pattern[m % len(pattern)]]`` computes micro-batch m.
    """

    start: int
    stop: int
    devices: tuple[int, ...]
    pattern: tuple[int, ...] = ()

    def device(self, micro: int) -> int:
        """Return the device that computes a micro-batch."""
        if not self.pattern:
            return self.devices[micro % len(self.devices)]
        return self.devices[self.pattern[micro % len(self.pattern)]]


class Action(NamedTuple):
    """One computation of a micro-batch on a stage.

    Its kind is F for forward, or B for backward. A split backward has two halves: I computes the
    gradient of the input, and W computes the gradient of the weights. In the spans of a simulated
    step, the kind G stands for the exchange of a stage's gradients.
    """

    stage: int
    kind: str
    micro: int

    def __str__(self) -> str:
        """Return the action in the format of torch's pipeline schedules, such as ``2F0``."""
        return f"{self.stage}{self.kind}{self.micro}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        """Return the action that ``text`` stands for, such as ``2F0``.

        Raises ``ValueError`` for any other text.
        """
        match = re.fullmatch(r"(\d+)([FBIWG])(\d+)", text)
        if match is None:
            raise ValueError(f"expected an action such as 2F0, got {text!r}")
        stage, kind, micro = match.groups()
        return cls(int(stage), kind, int(micro))


Orders = Mapping[int, Sequence[Action]]
"""The actions that each device computes, first to last."""


class Hop(NamedTuple):
    """A transfer that occupies ``ports`` for ``wire_s`` and arrives ``latency_s`` later."""

    wire_s: float
    latency_s: float
    ports: tuple[str, ...]


class TiedExchange(NamedTuple):
    """The exchange of tied parameters' gradients, after the last backwards of two stages."""

    stages: tuple[int, int]
    hop: Hop


class Task(NamedTuple):
    """The cost of an action, and the tasks that need its result.

    Other tasks are identified by their index in `StagedChain.tasks`.
    """

    action: Action
    device: int
    # A number that identifies the pair of stage and device.
    slot: int
    # Compute time.
    seconds: float
    # How many results the action waits for.
    needs: int
    # The task on the same device that needs the result.
    then: int | None
    # The task on the next or previous stage that needs the result.
    target: int | None
    # The transfer to that task. None if that task is on the same device.
    hop: Hop | None


class StagedChain:
    """The cost of each action in a step, for the given stages.

    Args:
        profile: the costs of the layers.
        cluster: the devices.
        stages: the stages. They must cover all layers, in order.
        microbatches: the number of micro-batches in a step, M.
        split: whether backward has two actions, one for the gradient of the input and one for the
            gradient of the weights.
        recomputed: the indices of the layers that keep only their input, and compute their forward
            again in backward. Default: none.
    """

    def __init__(
        self,
        profile: Profile,
        cluster: DeviceCluster,
        stages: Sequence[Stage],
        microbatches: int,
        *,
        split: bool = False,
        recomputed: Collection[int] = (),
    ) -> None:
        self.profile = profile
        self.cluster = cluster
        self.stages = tuple(stages)
        self.microbatches = microbatches
        self.split = split
        self.recomputed = frozenset(recomputed)
        self.kinds = (FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT) if split else (FORWARD, BACKWARD)
        # By stage and micro-batch: the device.
        self._devices = [
            [stage.device(micro) for micro in range(microbatches)] for stage in self.stages
        ]
        # By stage and device: the compute time of each kind of action.
        self._seconds: dict[tuple[int, int], dict[str, float]] = {}
        for number, stage in enumerate(self.stages):
            for device in stage.devices:
                self._seconds[number, device] = self._compute_times(stage, device)
        self.stored_bytes = [self._stored_bytes(stage) for stage in self.stages]
        # By device.
        self.state_bytes = self._memory_of_states()
        self._sent_bytes = [
            profile.layers[stage.stop - 1].activation_bytes for stage in self.stages
        ]
        self.exchanges = [self._exchange(stage) for stage in range(len(self.stages))]
        self.tied_exchanges = [self._tied_exchange(*tie) for tie in profile.tied]
        self._hops: dict[tuple[int, int, int], Hop | None] = {}

    def _compute_times(self, stage: Stage, device: int) -> dict[str, float]:
        forward_s = backward_s = weight_s = 0.0
        for place in range(stage.start, stage.stop):
            layer = self.profile.layers[place]
            layer_forward_s, layer_backward_s = layer_times(
                self.profile, self.cluster, place, device
            )
            forward_s += layer_forward_s
            backward_s += layer_backward_s
            weight_s += layer_backward_s * layer.weight_part
            if place in self.recomputed:
                backward_s += layer_forward_s
        return {
            FORWARD: forward_s,
            BACKWARD: backward_s,
            INPUT_GRADIENT: backward_s - weight_s,
            WEIGHT_GRADIENT: weight_s,
        }

    def _stored_bytes(self, stage: Stage) -> float:
        """Return the bytes that a stage keeps for each micro-batch in flight.

        A recomputed layer keeps its input. The largest of them also needs its other tensors
        while it is recomputed. This counts for each micro-batch, to be safe.
        """
        layers = self.profile.layers
        stored_bytes = largest_bytes = 0.0
        for place in range(stage.start, stage.stop):
            layer = layers[place]
            if place in self.recomputed:
                stored_bytes += layers[place - 1].activation_bytes if place else 0.0
                largest_bytes = max(largest_bytes, layer.stored_bytes)
                continue
            stored_bytes += layer.stored_bytes
            if place > stage.start and place - 1 not in self.recomputed:
                stored_bytes -= layer.shared_bytes
        return stored_bytes + largest_bytes

    def device(self, stage: int, micro: int) -> int:
        """Return the device that computes this micro-batch on this stage."""
        return self._devices[stage][micro]

    def seconds(self, stage: int, kind: str, micro: int) -> float:
        """Return the compute time of an action."""
        return self._seconds[stage, self.device(stage, micro)][kind]

    def hop(self, stage: int, micro: int, *, back: bool) -> Hop | None:
        """Return the transfer from a stage to the next one, or None if they share a device.

        With ``back``, return the transfer of the gradient in the opposite direction.
        """
        return self._hop(stage, self.device(stage, micro), self.device(stage + 1, micro), back=back)

    def _hop(self, stage: int, one: int, two: int, *, back: bool) -> Hop | None:
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
        """Return a stage's gradient exchange, and how long before the end of backward it begins.

        The gradients of the last layers are ready first. They are sent while the other gradients
        are still being computed. Return None for a stage that is on one device or has no trained
        parameters.
        """
        start, stop, devices = self.stages[stage][:3]
        layers = self.profile.layers[start:stop]
        if len(devices) == 1 or not any(layer.parameter_bytes for layer in layers):
            return None
        per_byte_s, latency_s, ports = ring_cost(self.cluster, devices)
        # The slowest replica's gradients are ready last.
        slowest = max(devices, key=lambda each: self._seconds[stage, each][BACKWARD])
        compute_s = wire_end_s = 0.0
        for place in reversed(range(start, stop)):
            compute_s += layer_times(self.profile, self.cluster, place, slowest)[1]
            sent_bytes = self.profile.layers[place].parameter_bytes
            wire_end_s = max(wire_end_s, compute_s) + sent_bytes * per_byte_s
        wire_s = sum(layer.parameter_bytes for layer in layers) * per_byte_s
        # With a split backward, the exchange can overlap only the last weight gradient.
        shortest_s = min(self._seconds[stage, each][self.kinds[-1]] for each in devices)
        lead_s = 0.0
        if math.isfinite(wire_s):
            lead_s = min(max(0.0, wire_s - (wire_end_s - compute_s)), shortest_s)
        return Hop(wire_s, latency_s, ports), lead_s

    def _tied_exchange(self, one: int, two: int, size_bytes: float) -> TiedExchange | None:
        """Return the exchange of the gradients of parameters that two layers share.

        Return None if the layers are on the same device, which holds such parameters once.
        """
        first, second = [
            next(k for k, stage in enumerate(self.stages) if stage.start <= layer < stage.stop)
            for layer in (one, two)
        ]
        devices = [self.stages[each].devices[0] for each in (first, second)]
        if devices[0] == devices[1]:
            return None
        per_byte_s, latency_s, ports = ring_cost(self.cluster, devices)
        return TiedExchange((first, second), Hop(size_bytes * per_byte_s, latency_s, ports))

    def _memory_of_states(self) -> dict[int, float]:
        """Return the memory that each device's parameters occupy, with tied parameters once."""
        layers_of: dict[int, set[int]] = defaultdict(set)
        for start, stop, devices, _ in self.stages:
            for device in devices:
                layers_of[device].update(range(start, stop))
        return {device: self.profile.state_bytes(layers) for device, layers in layers_of.items()}

    def room(self, stage: int, device: int) -> int:
        """Return how many micro-batches' activations of a stage fit in a device's memory.

        The result is at most M. 0 means that the stage does not fit.
        """
        memory_bytes = self.cluster.memory_bytes[device] * ROUNDED
        free_bytes = memory_bytes - self.state_bytes[device]
        stored_bytes = self.stored_bytes[stage]
        if free_bytes < stored_bytes:
            return 0
        if not stored_bytes:
            return self.microbatches
        return int(min(self.microbatches, free_bytes // stored_bytes))

    def fits(self) -> bool:
        """Return whether each device can hold its stages and a micro-batch in each of them."""
        needed_bytes = dict(self.state_bytes)
        for number, stage in enumerate(self.stages):
            for device in stage.devices:
                needed_bytes[device] += self.stored_bytes[number]
        memory_bytes = self.cluster.memory_bytes
        return all(
            needed <= memory_bytes[device] * ROUNDED for device, needed in needed_bytes.items()
        )

    def actions(self) -> list[Action]:
        """Return all compute actions in a step."""
        return [
            Action(stage, kind, micro)
            for stage in range(len(self.stages))
            for kind in self.kinds
            for micro in range(self.microbatches)
        ]

    @functools.cached_property
    def tasks(self) -> list[Task]:
        """The tasks of all actions in a step, in the order of `actions`."""
        last = len(self.stages) - 1
        of_stage = len(self.kinds) * self.microbatches
        found = []
        for place, action in enumerate(self.actions()):
            stage, kind, micro = action
            device = self.device(stage, micro)
            needs = 1
            then = target = hop = None
            if kind != self.kinds[-1]:
                then = place + self.microbatches
            if kind == FORWARD and stage < last:
                target = place + of_stage
                hop = self.hop(stage, micro, back=False)
            elif kind == self.kinds[1]:
                # It needs the forward of its own stage. On all but the last stage it also needs the
                # gradient of the stage's output.
                needs += stage < last
                if stage:
                    target = place - of_stage
                    hop = self.hop(stage - 1, micro, back=True)
            slot = stage * len(self.cluster) + device
            seconds = self.seconds(stage, kind, micro)
            found.append(Task(action, device, slot, seconds, needs, then, target, hop))
        return found

    def lower_bound_s(self) -> float:
        """Return a step time that no order can beat.

        It is the longest time that any port or device needs. A port needs the time for its whole
        load. A device needs the time for its own work, plus the time until its first input arrives
        and the time for its last result to come back.
        """
        load_s: dict[int | str, float] = defaultdict(float)
        for number, places in enumerate(self._devices):
            for device, count in Counter(places).items():
                times = self._seconds[number, device]
                load_s[device] += count * sum(times[kind] for kind in self.kinds)
        for stage in range(len(self.stages) - 1):
            for hop, count in self._hops_after(stage):
                for port in hop.ports:
                    load_s[port] += count * hop.wire_s
        for exchange in filter(None, self.exchanges):
            for port in exchange[0].ports:
                load_s[port] += exchange[0].wire_s
        idle_s: dict[int | str, float] = {}
        path_s = 0.0
        for number, (_, _, devices, _) in enumerate(self.stages):
            path_s += self._passage_s(number - 1) if number else 0.0
            for device in devices:
                idle_s[device] = min(idle_s.get(device, math.inf), path_s)
        return max(load + idle_s.get(place, 0.0) for place, load in load_s.items())

    def _passage_s(self, stage: int) -> float:
        """Return the least time a micro-batch spends on a stage and the next link, both ways."""
        devices = [*dict.fromkeys(self._devices[stage])]
        total_s = 0.0
        # The weights' half of a split backward may come last, and its result is not sent.
        for kind in self.kinds[:1] if self.split else self.kinds:
            total_s += min(self._seconds[stage, device][kind] for device in devices)
            hops = [
                self._hop(stage, *pair, back=kind != FORWARD) for pair in self._pairs_after(stage)
            ]
            total_s += min(hop.wire_s + hop.latency_s if hop else 0.0 for hop in hops)
        return total_s

    def _pairs_after(self, stage: int) -> Counter[tuple[int, int]]:
        """Return how many micro-batches pass from each device of a stage to each of the next."""
        return Counter(zip(self._devices[stage], self._devices[stage + 1], strict=True))

    def _hops_after(self, stage: int) -> Iterator[tuple[Hop, int]]:
        """Yield the transfers between a stage and the next one, and how often each occurs."""
        for pair, count in self._pairs_after(stage).items():
            for back in (False, True):
                hop = self._hop(stage, *pair, back=back)
                if hop is not None:
                    yield hop, count


def layer_times(
    profile: Profile, cluster: DeviceCluster, layer: int, device: int
) -> tuple[float, float]:
    """Return how long forward and backward of a layer take on a device, in seconds."""
    if profile.times_s:
        return profile.times_s[device][layer]
    speed = cluster.speed[device]
    return profile.layers[layer].forward_s / speed, profile.layers[layer].backward_s / speed


def ring_cost(
    cluster: DeviceCluster, devices: Sequence[int]
) -> tuple[float, float, tuple[str, ...]]:
    """Return the cost of a ring all-reduce over ``devices``, in this order, and its ports.

    The cost is the seconds per byte and the start-up time in seconds. The ports are those that the
    ring occupies.
    """
    count = len(devices)
    load: dict[str, float] = defaultdict(float)
    latency_s = 0.0
    for source, target in zip(devices, [*devices[1:], devices[0]], strict=True):
        rate = cluster.rate(source, target)
        for port in cluster.ports(source, target):
            load[port] += 2 * (count - 1) / count / rate if rate else math.inf
        latency_s = max(latency_s, 2 * (count - 1) * cluster.latency(source, target))
    return max(load.values()), latency_s, tuple(load)

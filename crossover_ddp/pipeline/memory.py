"""Finds out whether a chain fits in the memory of a cluster, and which layers to recompute. Pure.

[Note: proof of a refusal] Every plan assigns each layer to at least one device, and each device
holds the states of its layers and the tensors of one micro-batch. If no assignment of layers to
devices fits, then no plan exists. The search for an assignment has a limit. If it stops there, the
answer is not known.
"""

from dataclasses import replace
from enum import Enum
from typing import Final

from .cluster import DeviceCluster
from .model import ROUNDED, Stage, StagedChain
from .profile import Profile

_MOST_ASSIGNMENTS: Final = 50_000


class Packing(Enum):
    """Whether the layers fit in memory."""

    FITS = "an assignment of layers to devices fits"
    IMPOSSIBLE = "no assignment of layers to devices fits, so no plan exists"
    UNKNOWN = "the search for an assignment of layers to devices ended without a result"


def pack(profile: Profile, cluster: DeviceCluster) -> tuple[Packing, list[Stage]]:
    """Look for an assignment of layers to devices that fits in memory, with few stages.

    Returns the result and, if the layers fit, the stages: a device may have several.
    """
    search = _Packing(profile, cluster)
    result = search.run()
    return result, search.stages() if result is Packing.FITS else []


class _Packing:
    """A depth-first search over the layers. Each layer tries the device of the layer before."""

    def __init__(self, profile: Profile, cluster: DeviceCluster) -> None:
        self._profile = profile
        self._cluster = cluster
        self._free = [size * ROUNDED for size in cluster.memory_bytes]
        # The least memory that each layer and all after it need.
        self._least = [0.0]
        for place in reversed(range(len(profile))):
            self._least.append(self._least[-1] + self._needed(place, together=True))
        self._least.reverse()
        self._assigned: list[int] = []
        self._left = _MOST_ASSIGNMENTS

    def run(self) -> Packing:
        if self._extend():
            return Packing.FITS
        return Packing.IMPOSSIBLE if self._left > 0 else Packing.UNKNOWN

    def stages(self) -> list[Stage]:
        found: list[Stage] = []
        for layer, device in enumerate(self._assigned):
            if found and found[-1].devices == (device,):
                found[-1] = found[-1]._replace(stop=layer + 1)
            else:
                found.append(Stage(layer, layer + 1, (device,)))
        return found

    def _needed(self, layer: int, *, together: bool) -> float:
        """Return the memory that a layer adds, if the layer before is on the same device."""
        one = self._profile.layers[layer]
        needed_bytes = one.state_bytes + one.stored_bytes
        return needed_bytes - one.shared_bytes if together and layer else needed_bytes

    def _extend(self) -> bool:
        layer = len(self._assigned)
        if layer == len(self._profile):
            return True
        if self._left <= 0 or self._least[layer] > sum(self._free) + self._tied_bytes():
            return False
        before = self._assigned[-1] if layer else None
        devices = sorted(
            range(len(self._cluster)), key=lambda each: (each != before, -self._free[each], each)
        )
        for device in devices:
            is_linked = before is None or self._is_linked(before, device)
            needed_bytes = self._needed(layer, together=device == before)
            needed_bytes -= self._shared_with(layer, device)
            if not is_linked or needed_bytes > self._free[device]:
                continue
            self._left -= 1
            self._free[device] -= needed_bytes
            self._assigned.append(device)
            if self._extend():
                return True
            self._assigned.pop()
            self._free[device] += needed_bytes
        return False

    def _is_linked(self, one: int, two: int) -> bool:
        if one == two:
            return True
        return bool(self._cluster.rate(one, two) and self._cluster.rate(two, one))

    def _shared_with(self, layer: int, device: int) -> float:
        """Return the size of the parameters that the device holds already."""
        shared_bytes = 0.0
        for one, two, _ in self._profile.tied:
            first, second = min(one, two), max(one, two)
            if second == layer and self._assigned[first] == device:
                shared_bytes += self._profile.tied_bytes(one, two)
        return shared_bytes

    def _tied_bytes(self) -> float:
        """Return the most memory that tied parameters may save."""
        return sum(self._profile.tied_bytes(one, two) for one, two, _ in self._profile.tied)


def recomputed_layers(chain: StagedChain, depth: int) -> frozenset[int]:
    """Choose layers to recompute, so that ``depth`` micro-batches of each stage fit in memory.

    The layers that save the most bytes for each second of forward come first. If not even all
    layers are enough, all of the stage are returned.
    """
    chosen: set[int] = set()
    for number, stage in enumerate(chain.stages):
        ranked = sorted(
            range(stage.start, stage.stop), key=lambda layer: -_saved_per_second(chain, layer)
        )
        wanted = min(depth, chain.microbatches)
        for count in range(len(ranked) + 1):
            trial = StagedChain(
                chain.profile,
                chain.cluster,
                chain.stages,
                chain.microbatches,
                recomputed=ranked[:count],
            )
            if min(trial.room(number, device) for device in stage.devices) >= wanted:
                break
        chosen.update(ranked[:count])
    return frozenset(chosen)


def _saved_per_second(chain: StagedChain, layer: int) -> float:
    before = chain.profile.layers[layer - 1].activation_bytes if layer else 0.0
    one = chain.profile.layers[layer]
    return (one.stored_bytes - before) / max(one.forward_s, 1e-12)


def recomputing_profile(profile: Profile) -> Profile:
    """Return the costs if all layers were recomputed, to search for stages with them."""
    layers = []
    for place, layer in enumerate(profile.layers):
        before = profile.layers[place - 1].activation_bytes if place else 0.0
        layers.append(
            replace(
                layer,
                backward_s=layer.backward_s + layer.forward_s,
                weight_s=layer.weight_s,
                stored_bytes=min(before, layer.stored_bytes),
                shared_bytes=0.0,
            )
        )
    times_s = tuple([tuple([(f, f + b) for f, b in row]) for row in profile.times_s])
    return Profile(tuple(layers), times_s, profile.tied)

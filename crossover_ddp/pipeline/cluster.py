"""The devices of a cluster: speed, memory, and how fast each pair of them exchanges data.

[Note: network cards]
Devices of one node share its network card. A transfer between nodes occupies the sending node's card outwards and the
receiving node's card inwards, so two transfers through one card follow each other, whatever pairs they belong to. A
transfer inside a node occupies the two devices' own ports. Cards are full duplex. Our design.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crossover_ddp._planning import Link

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Matrix = tuple[tuple[float, ...], ...]
_GIGABIT = 1e9 / 8
_GIBIBYTE = 2.0**30
_PROBE_BYTES = (1 << 10, 1 << 20)


@dataclass(frozen=True)
class DeviceCluster:
    """Devices and their links; public as ``crossover_ddp.pipeline.Cluster``.

    Args:
        bandwidth: bytes per second from the row's device to the column's; 0 where there is no link. The diagonal
            does not count.
        latency_s: seconds of one message, or a matrix of them.
        nodes: the node of each device; default each device is a node of its own.
        speed: of each device; a layer takes its profiled time divided by this. Default 1.
        memory_bytes: of each device; default unlimited.
        cards: bytes per second of a node's network card; default as fast as its links.
        names: of the devices; default ``0``, ``1``, ….

    On failure: ``ValueError`` for a bandwidth that is missing or negative, and for devices that no path connects.
    """

    bandwidth: Matrix
    latency_s: float | Matrix = 0.0
    nodes: tuple[str, ...] = ()
    speed: tuple[float, ...] = ()
    memory_bytes: tuple[float, ...] = ()
    cards: Mapping[str, float] = field(default_factory=dict)
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        count = len(self.bandwidth)
        defaults = {
            "names": tuple([str(place) for place in range(count)]),
            "nodes": tuple([str(place) for place in range(count)]),
            "speed": (1.0,) * count,
            "memory_bytes": (math.inf,) * count,
        }
        for name, default in defaults.items():
            object.__setattr__(self, name, tuple(getattr(self, name)) or default)
            if len(getattr(self, name)) != count:
                raise ValueError(
                    f"expected {name} of {count} devices, got {len(getattr(self, name))}; give one for each row of "
                    "bandwidth"
                )
        self._check_values(count)
        self._check_connected(count)

    def _check_values(self, count: int) -> None:
        if not count or len(set(self.names)) != count:
            raise ValueError(
                f"expected devices with different names, got names={self.names}; name each device once"
            )
        for what in ("bandwidth", "latency_s"):
            matrix = getattr(self, what)
            rows = matrix if isinstance(matrix, Sequence) else ((matrix,) * count,) * count
            for source, row in enumerate(rows):
                if len(row) != count or len(rows) != count:
                    raise ValueError(
                        f"expected {count} values of {what} for device {self.names[min(source, count - 1)]!r}, got "
                        f"{len(row)}; give a square matrix"
                    )
                for target, value in enumerate(row):
                    good = isinstance(value, int | float) and 0 <= value < math.inf
                    if not good and source != target:
                        raise ValueError(
                            f"expected {what} >= 0 from device {self.names[source]!r} to {self.names[target]!r}, got "
                            f"{what}={value!r}; measure it, or write 0 where there is no link"
                        )
        for what, values in (
            ("speed", self.speed),
            ("memory_bytes", self.memory_bytes),
            ("cards", tuple(self.cards.values())),
        ):
            if not all(isinstance(value, int | float) and value > 0 for value in values):
                raise ValueError(f"expected {what} > 0, got {what}={values}; leave it out for the default")

    def _check_connected(self, count: int) -> None:
        reached, fresh = {0}, [0]
        while fresh:
            one = fresh.pop()
            new = {
                two for two in range(count) if self.bandwidth[one][two] > 0 and self.bandwidth[two][one] > 0
            }
            fresh += new - reached
            reached |= new
        if len(reached) < count:
            lost = [self.names[place] for place in range(count) if place not in reached]
            raise ValueError(
                f"expected devices that are connected, got none of the links of {lost} to the others; "
                "give their bandwidth, or leave them out"
            )

    def __len__(self) -> int:
        return len(self.bandwidth)

    def rate(self, source: int, target: int) -> float:
        """Return bytes per second of a transfer between two devices, 0 where there is no link."""
        rate = self.bandwidth[source][target]
        one, two = self.nodes[source], self.nodes[target]
        return rate if one == two else min(rate, self.cards.get(one, rate), self.cards.get(two, rate))

    def latency(self, source: int, target: int) -> float:
        """Return the seconds that a message takes besides its bytes."""
        return self.latency_s if isinstance(self.latency_s, int | float) else self.latency_s[source][target]

    def ports(self, source: int, target: int) -> tuple[str, str]:
        """Return what a transfer occupies; see [Note: network cards]."""
        one, two = self.nodes[source], self.nodes[target]
        if one != two:
            return f"node {one} out", f"node {two} in"
        return f"device {self.names[source]} out", f"device {self.names[target]} in"

    @classmethod
    def from_json(cls, document: Any) -> "DeviceCluster":
        """Read ``{"devices": [{"name", "node", "speed", "memory_gib"}], "bandwidth_gbit": [[…]], …}``.

        ``latency_us`` is a number or a matrix, ``cards_gbit`` a rate for each node's name. All but ``devices`` (a list,
        or their number) and ``bandwidth_gbit`` (a matrix, or one number) may be left out.
        """
        known = {"devices", "bandwidth_gbit", "latency_us", "cards_gbit"}
        if not isinstance(document, dict) or not {"devices", "bandwidth_gbit"} <= document.keys() <= known:
            found = sorted(document) if isinstance(document, dict) else type(document).__name__
            raise ValueError(
                f"expected the keys devices, bandwidth_gbit and perhaps latency_us, cards_gbit, got {found}; "
                "see docs/pipeline.md"
            )
        devices = document["devices"]
        devices = [{} for _ in range(devices)] if isinstance(devices, int) else devices
        for place, device in enumerate(devices):
            if not isinstance(device, dict) or not device.keys() <= {"name", "node", "speed", "memory_gib"}:
                raise ValueError(
                    f"expected name, node, speed, memory_gib of a device, got {device!r}; mend device {place}"
                )
        names = tuple([str(each.get("name", place)) for place, each in enumerate(devices)])
        return cls(
            _scaled(document["bandwidth_gbit"], _GIGABIT, len(devices)),
            _scaled(document.get("latency_us", 0), 1e-6, len(devices)),
            tuple([str(each.get("node", name)) for each, name in zip(devices, names, strict=True)]),
            tuple([each.get("speed", 1.0) for each in devices]),
            tuple([each.get("memory_gib", math.inf) * _GIBIBYTE for each in devices]),
            {str(node): rate * _GIGABIT for node, rate in document.get("cards_gbit", {}).items()},
            names,
        )

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` reads."""
        devices = []
        for name, node, speed, memory in zip(
            self.names, self.nodes, self.speed, self.memory_bytes, strict=True
        ):
            memory_gib = {} if math.isinf(memory) else {"memory_gib": memory / _GIBIBYTE}
            devices.append({"name": name, "node": node, "speed": speed, **memory_gib})
        latency = self.latency_s
        return {
            "devices": devices,
            "bandwidth_gbit": [[value / _GIGABIT for value in row] for row in self.bandwidth],
            "latency_us": latency * 1e6
            if isinstance(latency, int | float)
            else [[value * 1e6 for value in row] for row in latency],
            "cards_gbit": {node: rate / _GIGABIT for node, rate in self.cards.items()},
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the cluster as JSON."""
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "DeviceCluster":
        """Read a JSON file; see `from_json`."""
        return cls.from_json(json.loads(Path(path).read_text()))

    @classmethod
    def measure(
        cls,
        process_group: "ProcessGroup | None" = None,
        *,
        size_bytes: int = _PROBE_BYTES[1],
        repeats: int = 3,
        **others: Any,
    ) -> "DeviceCluster":
        """Measure latency and bandwidth of each pair of ranks, one pair at a time; rank i is device i.

        Args:
            process_group: gloo; default the default group.
            size_bytes: of the larger of two messages; the other has 1 KiB.
            repeats: round trips of each size; the fastest counts.
            others: ``nodes``, ``speed``, ``memory_bytes``, ``cards``, ``names``, which are not measured.

        **Collective**: all ranks of the group call it, and all return the same.
        """
        import torch
        import torch.distributed as dist

        rank, size = dist.get_rank(process_group), dist.get_world_size(process_group)
        found = torch.zeros(2, size, size, dtype=torch.float64)
        for one in range(size):
            for two in range(one + 1, size):
                if rank in (one, two):
                    link = _link(two if rank == one else one, rank == one, process_group, size_bytes, repeats)
                    if rank == one:
                        found[:, one, two] = found[:, two, one] = torch.tensor(
                            [1 / max(link.beta_s, 1e-12), link.alpha_s], dtype=torch.float64
                        )
                dist.barrier(process_group)
        dist.all_reduce(found, group=process_group)
        rates, latencies = (tuple([tuple(row) for row in matrix.tolist()]) for matrix in found)
        return cls(rates, latencies, **others)


def _link(peer: int, leads: bool, group: "ProcessGroup | None", size_bytes: int, repeats: int) -> Link:
    """Time round trips with one peer and return the cost of one way."""
    import time

    import torch
    import torch.distributed as dist

    samples = []
    for size in (_PROBE_BYTES[0], max(size_bytes, 2 * _PROBE_BYTES[0])):
        message, times = torch.zeros(size, dtype=torch.uint8), []
        for _ in range(repeats + 1):  # the first one connects the pair
            begin_s = time.perf_counter()
            for sends in (leads, not leads):
                if sends:
                    dist.send(message, group=group, group_dst=peer)
                else:
                    dist.recv(message, group=group, group_src=peer)
            times.append((time.perf_counter() - begin_s) / 2)
        samples.append((size, min(times[1:])))
    return Link.fitted(samples)


def _scaled(values: Any, unit: float, count: int) -> Any:
    """Read a number or a matrix in ``unit``; a number for all pairs. What is no number stays, to be refused by name."""
    if isinstance(values, int | float):
        return ((values * unit,) * count,) * count
    if not isinstance(values, list) or not all(isinstance(row, list) for row in values):
        raise ValueError(f"expected a number or a matrix, got {values!r}; give one row for each device")
    return tuple(
        [
            tuple([value * unit if isinstance(value, int | float) else value for value in row])
            for row in values
        ]
    )

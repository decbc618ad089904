"""The devices of a cluster: their speed and memory, and the bandwidth between each pair.

[Note: network cards]
The devices of a node share its network card. A transfer between nodes occupies the outgoing side
of the sending node's card and the incoming side of the receiving node's card. So two transfers in
the same direction through one card run one after the other, even if they connect different pairs
of devices. A transfer inside a node occupies the two devices' own ports. Cards are full duplex.
Our design.
"""

import math
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, combinations, product, zip_longest
from typing import Any

import networkx
import torch
import torch.distributed as dist

from crossover_ddp._ddp.groups import compare, gather_objects
from crossover_ddp._tuning.link_probe import measure_pair
from crossover_ddp._tuning.model import LinkModel
from crossover_ddp.errors import UnsupportedConfigurationError

from .documents import Document

Matrix = tuple[tuple[float, ...], ...]
_GIGABIT = 1e9 / 8
_GIBIBYTE = 2.0**30


@dataclass(frozen=True)
class DeviceCluster(Document):
    """The devices of a cluster and their links. Public as ``crossover_ddp.pipeline.Cluster``.

    Args:
        bandwidth: a matrix in bytes per second. Row i and column j hold the bandwidth from device i
            to device j. 0 means that there is no link. The diagonal is ignored.
        latency_s: the latency of a message in seconds, as one number for all pairs or as a matrix.
            Default 0.
        nodes: the node of each device. By default each device has a node of its own.
        speed: the relative speed of each device. A layer takes its profiled time divided by the
            speed. Default 1.
        memory_bytes: the memory of each device. Default: unlimited.
        cards: maps a node to the bandwidth of its network card, in bytes per second. By default a
            card is as fast as its links.
        names: the names of the devices. Default ``0``, ``1``, ….

    On failure: ``ValueError`` if a bandwidth is missing or negative, or if some devices are not
    connected by any path.
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
        numbers = tuple(map(str, range(count)))
        defaults: dict[str, tuple[Any, ...]] = {
            "names": numbers,
            "nodes": numbers,
            "speed": (1.0,) * count,
            "memory_bytes": (math.inf,) * count,
        }
        for name, default in defaults.items():
            values = tuple(getattr(self, name)) or default
            object.__setattr__(self, name, values)
            if len(values) != count:
                raise ValueError(
                    f"expected {name} of {count} devices, got {len(values)}; "
                    "give one for each row of bandwidth"
                )
        if not count or len(set(self.names)) != count:
            raise ValueError(
                f"expected devices with different names, got names={self.names}; "
                "name each device once"
            )
        if not isinstance(self.latency_s, Sequence):
            object.__setattr__(self, "latency_s", ((self.latency_s,) * count,) * count)
        if unknown := sorted(self.cards.keys() - set(self.nodes)):
            raise ValueError(
                f"expected cards of the nodes {sorted(set(self.nodes))}, got cards of {unknown}; "
                "name nodes as in nodes"
            )
        self._check_matrix("bandwidth", self.bandwidth)
        self._check_matrix("latency_s", self.latency_s)
        positive = {
            "speed": self.speed,
            "memory_bytes": self.memory_bytes,
            "cards": (*self.cards.values(),),
        }
        for argument, values in positive.items():
            most = math.inf if argument == "memory_bytes" else sys.float_info.max
            if not all(isinstance(value, int | float) and 0 < value <= most for value in values):
                raise ValueError(
                    f"expected {argument} > 0, got {argument}={values}; "
                    "leave it out for the default"
                )
        self._check_connected()

    def _check_matrix(self, argument: str, matrix: Any) -> None:
        count = len(self.names)
        for place, row in enumerate(matrix or [()]):
            source = self.names[min(place, count - 1)]
            if len(row) != count or len(matrix) != count:
                raise ValueError(
                    f"expected {count} values of {argument} for device {source!r}, got {len(row)}; "
                    "give a square matrix"
                )
            for target, value in zip(self.names, row, strict=True):
                is_valid = isinstance(value, int | float) and 0 <= value < math.inf
                if source != target and not is_valid:
                    raise ValueError(
                        f"expected {argument} >= 0 from device {source!r} to {target!r}, "
                        f"got {argument}={value!r}; measure it, or write 0 where there is no link"
                    )

    def _check_connected(self) -> None:
        count = len(self)
        links = networkx.Graph()
        links.add_nodes_from(range(count))
        links.add_edges_from(
            pair
            for pair in combinations(range(count), 2)
            if self.rate(*pair) and self.rate(*pair[::-1])
        )
        reached = networkx.node_connected_component(links, 0)
        if lost := [name for place, name in enumerate(self.names) if place not in reached]:
            raise ValueError(
                "expected devices that are connected, got no links in both directions between "
                f"{lost} and the others; give their bandwidth, or leave them out"
            )

    def __len__(self) -> int:
        return len(self.bandwidth)

    def rate(self, source: int, target: int) -> float:
        """Return the bandwidth from ``source`` to ``target``, in bytes per second.

        It takes the nodes' network cards into account. 0 means that there is no link.
        """
        rate = self.bandwidth[source][target]
        one, two = self.nodes[source], self.nodes[target]
        if one == two:
            return rate
        return min(rate, self.cards.get(one, rate), self.cards.get(two, rate))

    def latency(self, source: int, target: int) -> float:
        """Return how many seconds an empty message takes between two devices."""
        assert isinstance(self.latency_s, Sequence)  # __post_init__ has made it a matrix
        return self.latency_s[source][target]

    def ports(self, source: int, target: int) -> tuple[str, str]:
        """Return the ports that a transfer occupies; see [Note: network cards]."""
        one, two = self.nodes[source], self.nodes[target]
        if one != two:
            return f"node {one} out", f"node {two} in"
        return f"device {self.names[source]} out", f"device {self.names[target]} in"

    def reordered(self, order: Sequence[int]) -> "DeviceCluster":
        """Return the cluster whose device i is this cluster's device ``order[i]``."""

        def taken(values: Sequence[Any]) -> tuple[Any, ...]:
            return tuple([values[place] for place in order])

        assert isinstance(self.latency_s, Sequence)  # __post_init__ has made it a matrix
        return DeviceCluster(
            taken([taken(row) for row in self.bandwidth]),
            taken([taken(row) for row in self.latency_s]),
            taken(self.nodes),
            taken(self.speed),
            taken(self.memory_bytes),
            self.cards,
            taken(self.names),
        )

    @classmethod
    def from_json(cls, document: Any) -> "DeviceCluster":
        """Create a cluster from a JSON document.

        The document has this form:
        ``{"devices": [{"name", "node", "speed", "memory_gib"}], "bandwidth_gbit": …, …}``.

        ``devices`` is a list, or the number of devices. ``bandwidth_gbit`` and ``latency_us`` are
        each a matrix, or one number for all pairs. ``cards_gbit`` maps a node's name to the rate of
        its card. Only ``devices`` and ``bandwidth_gbit`` are required.
        """
        known = {"devices", "bandwidth_gbit", "latency_us", "cards_gbit"}
        if (
            not isinstance(document, dict)
            or not {"devices", "bandwidth_gbit"} <= document.keys() <= known
        ):
            found = sorted(document) if isinstance(document, dict) else type(document).__name__
            raise ValueError(
                "expected the keys devices, bandwidth_gbit and perhaps latency_us, cards_gbit, "
                f"got {found}; see docs/pipeline.md"
            )
        cards = document.get("cards_gbit", {})
        devices = document["devices"]
        if isinstance(devices, int):
            devices = [{} for _ in range(devices)]
        if not isinstance(devices, list) or not isinstance(cards, dict):
            raise ValueError(
                "expected devices as a list or their number, and cards_gbit as an object of nodes, "
                f"got {devices!r} and {cards!r}; see docs/pipeline.md"
            )
        keys = {"name", "node", "speed", "memory_gib"}
        for place, device in enumerate(devices):
            if not isinstance(device, dict) or not device.keys() <= keys:
                raise ValueError(
                    f"expected name, node, speed, memory_gib of a device, got {device!r}; "
                    f"fix device {place}"
                )
        names = tuple([str(each.get("name", place)) for place, each in enumerate(devices)])
        return cls(
            _scaled(document["bandwidth_gbit"], _GIGABIT, len(devices)),
            _scaled(document.get("latency_us", 0), 1e-6, len(devices)),
            tuple([str(each.get("node", name)) for each, name in zip(devices, names, strict=True)]),
            tuple([each.get("speed", 1.0) for each in devices]),
            tuple([_times(each.get("memory_gib", math.inf), _GIBIBYTE) for each in devices]),
            {str(node): _times(rate, _GIGABIT) for node, rate in cards.items()},
            names,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the cluster as a JSON document that `from_json` can read."""
        memory_gib = [
            {"memory_gib": size / _GIBIBYTE} if size < math.inf else {}
            for size in self.memory_bytes
        ]
        return {
            "devices": [
                {"name": name, "node": node, "speed": speed, **memory}
                for name, node, speed, memory in zip(
                    self.names, self.nodes, self.speed, memory_gib, strict=True
                )
            ],
            "bandwidth_gbit": _scaled(self.bandwidth, 1 / _GIGABIT, len(self)),
            "latency_us": _scaled(self.latency_s, 1e6, len(self)),
            "cards_gbit": {node: rate / _GIGABIT for node, rate in self.cards.items()},
        }

    @classmethod
    def measure(
        cls,
        process_group: dist.ProcessGroup | None = None,
        *,
        size_bytes: int = 1 << 20,
        repeats: int = 3,
        nodes: Sequence[str] = (),
        **others: Any,
    ) -> "DeviceCluster":
        """Measure the latency and bandwidth between each pair of ranks, in both directions.

        Pairs that share no rank and no network card are measured at the same time.

        Args:
            process_group: the group, on gloo or NCCL. Its rank i becomes device i. Default: the
                default group. With NCCL, call ``torch.cuda.set_device`` before, since messages are
                sent from the current device.
            size_bytes: the size of the larger message in bytes. Default 1 MiB. The smaller message
                has 1 KiB.
            repeats: how many round trips to time for each pair of message sizes. The fastest one
                counts. Default 3.
            nodes: the node of each rank. Default: the host names of the ranks.
            others: values for ``speed``, ``memory_bytes``, ``cards`` and ``names``, which are not
                measured.

        Returns the same cluster on all ranks.

        On failure: `UnsupportedConfigurationError` without a process group, and if ranks give
        different nodes. ``ValueError`` for wrong arguments.

        **Collective**: all ranks of the group must call it.
        """
        group = process_group or dist.group.WORLD
        if group is None:
            raise UnsupportedConfigurationError(
                "expected a process group, got none; call torch.distributed.init_process_group "
                "first"
            )
        nodes = _nodes_of_ranks(group, nodes)
        device = _message_device(group)
        rank = group.rank()
        found = torch.zeros(2, len(nodes), len(nodes), dtype=torch.float64, device=device)
        for pairs in measuring_rounds(nodes):
            for one, two in pairs:
                if rank not in (one, two):
                    continue
                peer = one + two - rank
                links = measure_pair(peer, group, size_bytes, repeats, device)
                if links is not None:
                    found[:, rank, peer], found[:, peer, rank] = map(_rate_and_latency, links)
            _wait_for_all(group, device)
        dist.all_reduce(found, group=group)
        rates, latencies = (tuple([tuple(row) for row in matrix.tolist()]) for matrix in found)
        return cls(rates, latencies, nodes, **others)


def measuring_rounds(nodes: Sequence[str]) -> list[list[tuple[int, int]]]:
    """Return all pairs of devices in rounds. The pairs of a round can be measured at the same time.

    In a round, each device belongs to at most one pair, and each node to at most one pair of
    devices on different nodes; see [Note: network cards].

    Args:
        nodes: the node of each device.
    """
    members: dict[str, list[int]] = {}
    for device, node in enumerate(nodes):
        members.setdefault(node, []).append(device)
    devices = list(members.values())
    inside = [
        [[(each[one], each[two]) for one, two in pairs] for pairs in _tournament(len(each))]
        for each in devices
    ]
    rounds = _side_by_side(inside)
    for pairs in _tournament(len(devices)):
        between = [[[pair] for pair in product(devices[one], devices[two])] for one, two in pairs]
        rounds += _side_by_side(between)
    return [[(min(pair), max(pair)) for pair in pairs] for pairs in rounds]


def _tournament(count: int) -> list[list[tuple[int, int]]]:
    """Return each pair of ``count`` players once, in as few rounds of disjoint pairs as possible.

    This is the circle method: one player keeps its place while the others rotate.
    """
    bye = count  # with an odd number, one player rests in each round
    players = [*range(count + count % 2)]
    rounds = []
    for _ in players[1:]:
        half = len(players) // 2
        pairs = zip(players[:half], reversed(players[half:]), strict=True)
        rounds.append([pair for pair in pairs if bye not in pair])
        players.insert(1, players.pop())
    return [pairs for pairs in rounds if pairs]


def _side_by_side(
    schedules: Sequence[Sequence[Sequence[tuple[int, int]]]],
) -> list[list[tuple[int, int]]]:
    """Merge lists of rounds: the first rounds become one round, and so on."""
    return [[*chain(*rounds)] for rounds in zip_longest(*schedules, fillvalue=())]


def _nodes_of_ranks(group: dist.ProcessGroup, nodes: Sequence[str]) -> tuple[str, ...]:
    """Return ``nodes`` if they are the same on all ranks. If empty, return the host names."""
    compare(group, {"nodes": tuple(nodes)}, "give the same on all ranks, or none")
    if not nodes:
        return tuple(gather_objects(group, socket.gethostname()))
    if len(nodes) != group.size():
        raise ValueError(
            f"expected nodes of {group.size()} ranks, got nodes={tuple(nodes)}; give one for each "
            "rank"
        )
    return tuple(nodes)


def _message_device(group: dist.ProcessGroup) -> torch.device:
    """Return the device whose tensors the group's backend sends."""
    if "nccl" in dist.get_backend_config(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _rate_and_latency(link: LinkModel) -> torch.Tensor:
    return torch.tensor([1 / max(link.beta_s, 1e-12), link.alpha_s], dtype=torch.float64)


def _wait_for_all(group: dist.ProcessGroup, device: torch.device) -> None:
    """Wait for all ranks. With NCCL, ``dist.barrier`` would have to guess the device."""
    dist.all_reduce(token := torch.zeros(1, device=device), group=group)
    token.item()


def _times(value: Any, unit: float) -> Any:
    """Return ``value`` times ``unit``.

    Return a value that is not a number unchanged. Later checks reject it.
    """
    return value * unit if isinstance(value, int | float) else value


def _scaled(values: Any, unit: float, count: int) -> Matrix:
    """Return ``values`` times ``unit``, as a matrix.

    ``values`` is a matrix, or one number for all pairs.
    """
    if isinstance(values, int | float):
        return ((values * unit,) * count,) * count
    if not isinstance(values, list | tuple) or not all(
        isinstance(row, list | tuple) for row in values
    ):
        raise ValueError(
            f"expected a number or a matrix, got {values!r}; give one row for each device"
        )
    return tuple([tuple([_times(each, unit) for each in row]) for row in values])

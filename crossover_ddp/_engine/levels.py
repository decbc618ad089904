"""A network of two levels: the ranks of each node, and the nodes. A link made of two links.

[Note: two levels] The ranks of a node share its network card. If each of them exchanges data with
all ranks, k ranks send k times as many bytes over the card as one rank would. So a reduce-scatter
first adds within the node. Between nodes, a rank then exchanges the sums of one *column* only: the
parts of all ranks with its place on their nodes. An all-gather goes back the same way. With N nodes,
a card carries (N - 1)/N of the tensor in either half and each direction, however many ranks share
it. In this order a value is added as a tree over the ranks of a node, and then as a tree over nodes.
If a power of two of consecutive ranks share each node, this is the tree over all ranks, so no bit
changes. Source: hierarchical all-reduce is common practice; columns in place of leaders, so that all
ranks of a node send, as in BlueConnect (Cho et al., 2019).

[Note: coded between nodes] A codec is used between nodes only. It codes a node's share of the mean
of the rank's column: the sum of the node's gradients, divided by the number of all ranks. Within
the node, everything travels exactly.

[Note: the same node] Ranks share a node if they run on the same machine in the same network
namespace: others reach each other by a network interface, even on one machine.
"""

import copy
import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from crossover_ddp._ddp.groups import gather_objects
from crossover_ddp._system import environment
from crossover_ddp._system.machine import machine
from crossover_ddp.errors import UnsupportedConfigurationError

from .device import Native
from .journeys import nothing
from .links import Gloo, Halfway, Layout, Link, LinkAround, parts

logger = logging.getLogger(__name__)

Encode = Callable[[Tensor, Link], Link]
_LEAST_RANKS: Final = 4  # two nodes with two ranks each
_AUTO: Final = "auto"
_FLAT: Final = "flat"
_NETWORK_NAMESPACE: Final = Path("/proc/self/ns/net")


class Levels:
    """Which ranks of a group share a node.

    Args:
        nodes: the ranks of each node, in ascending order; equally many for each node.
        rank: this rank.
    """

    def __init__(self, nodes: Sequence[Sequence[int]], rank: int) -> None:
        # The ranks of this node.
        self.inside = next(node for node in nodes if rank in node)
        # For each place on a node, the ranks with this place.
        self.columns = [*zip(*nodes, strict=True)]
        # This rank's place on its node, and the ranks with the same one.
        self.place = self.inside.index(rank)
        self.between = self.columns[self.place]
        # Whether sums have the bits of a tree over all ranks; see [Note: two levels].
        count = len(self.inside)
        self.are_one_tree = count & (count - 1) == 0 and all(
            list(node) == list(range(node[0], node[0] + count)) and node[0] % count == 0
            for node in nodes
        )


def levels_of(group: dist.ProcessGroup) -> Levels | None:
    """Return the levels of ``group``; None if all ranks should exchange with each other directly.

    On failure: ``UnsupportedConfigurationError`` on all ranks if ``CROSSOVER_LEVELS`` is wrong or
    differs between ranks.

    **Collective**.
    """
    if group.size() < _LEAST_RANKS:
        return None
    wanted = os.environ.get(environment.LEVELS, _AUTO)
    gathered = gather_objects(group, (wanted, _node_of(wanted, dist.get_rank())))
    if len({wanted for wanted, _ in gathered}) > 1:
        raise UnsupportedConfigurationError(
            f"expected the same {environment.LEVELS} on all ranks, got "
            f"{sorted({wanted for wanted, _ in gathered})}; set it to the same value everywhere"
        )
    if wanted == _FLAT:
        return None
    by_node: dict[str | None, list[int]] = {}
    for rank, (_, node) in enumerate(gathered):
        by_node.setdefault(node, []).append(rank)
    if None in by_node:
        raise UnsupportedConfigurationError(
            f"expected {environment.LEVELS} to be 'auto', 'flat', or the number of each rank's node, "
            f"such as 0,0,1,1, for {dist.get_world_size()} ranks, got {wanted!r}"
        )
    counts = [len(ranks) for ranks in by_node.values()]
    if len(counts) == 1 or max(counts) == 1:
        return None
    if min(counts) < max(counts):
        if group.rank() == 0:
            logger.warning(
                "nodes have different numbers of ranks, %s, so that each rank exchanges gradients with all others "
                "over the network; with equally many on each node, a node would send less",
                counts,
            )
        return None
    return Levels([*by_node.values()], group.rank())


def _node_of(wanted: str, rank: int) -> str | None:
    """Return a name of this rank's node, see [Note: the same node]. None if ``wanted`` is wrong.

    Args:
        wanted: the value of ``CROSSOVER_LEVELS``.
        rank: this rank in the default group.
    """
    if wanted in (_AUTO, _FLAT):
        try:
            return f"{machine()} {_NETWORK_NAMESPACE.stat().st_ino}"
        except OSError:  # not Linux
            return machine()
    table = [each.strip() for each in wanted.split(",")]
    if len(table) != dist.get_world_size() or not all(table):
        return None
    return table[rank]


class TwoLevels:
    """A network of two levels, see [Note: two levels].

    Args:
        flat: the network of all ranks.
        levels: the levels of the group.
    """

    def __init__(self, flat: Native | Gloo, levels: Levels) -> None:
        self.levels = levels
        self.rank = flat.rank
        self.size = flat.size
        self.place = flat.place
        self.in_program_order = flat.in_program_order
        self.alignment_bytes = flat.alignment_bytes
        self._networks = flat, flat.among(levels.inside), flat.among(levels.between)
        self._lock = threading.Lock()
        self._free: list[torch.UntypedStorage] = []

    def link(self, *, divides: bool = True) -> Link:
        """Return the link for the next journey. All ranks must create links in the same order.

        With ``divides=False`` its `Link.reduce_scatter` returns the sum, always as a tree over all
        ranks.
        """
        if not divides and not self.levels.are_one_tree:
            return self._networks[0].link(divides=False)
        links = [network.link() for network in self._networks]
        return TwoLevelLink(self, *links, divides=divides)

    def interrupt(self) -> None:
        """Make every wait of this rank fail, and the peers' waits for it, if the backend can."""
        for network in self._networks:
            network.interrupt()

    def close(self, timeout_s: float) -> bool:
        """Stop the threads after their queued work, and return whether they ended in time.

        It is safe to call it more than once.
        """
        return all([network.close(timeout_s) for network in self._networks[::-1]])

    def borrow(self, like: Tensor) -> Tensor:
        """Lend memory for as many values as ``like`` has, until `give_back`."""
        if like.device.type != "cpu":
            return torch.empty_like(like)  # torch caches a device's memory itself
        storage = None
        with self._lock:
            while self._free and (storage is None or storage.nbytes() < like.nbytes):
                storage = self._free.pop()  # pieces that are too small are dropped
        if storage is None or storage.nbytes() < like.nbytes:
            return torch.empty_like(like)
        lent: Tensor = like.new_empty(0).set_(storage, 0, like.shape, (1,))
        return lent

    def give_back(self, lent: Tensor) -> None:
        if lent.device.type == "cpu":
            with self._lock:
                self._free.append(lent.untyped_storage())


class TwoLevelLink(LinkAround):
    """The collectives of one journey over two levels. `all_to_all` is flat.

    Values are *packed* by column: the parts of the ranks with place 0, by node, then those with
    place 1, and so on. A packed column is this rank's if it has the rank's place.
    """

    def __init__(
        self, net: TwoLevels, flat: Link, inside: Link, between: Link, *, divides: bool
    ) -> None:
        super().__init__(flat)
        self._divisor = self.size if divides else 1
        self.flat = flat
        self.between = between
        self.column = net.levels.between  # the ranks of this rank's column
        self._net = net
        self.inside = inside
        self._order = [rank for column in net.levels.columns for rank in column]
        self._encode: Encode | None = None
        # With a codec, from the reduce-scatter to the gather: packed memory, and the coded link.
        self._coded: tuple[Tensor, Link] | None = None

    def code(self, encode: Encode) -> None:
        """Use a codec between nodes, see [Note: coded between nodes].

        Args:
            encode: a function that encodes this rank's column, which holds the node's share
                of the mean, and returns the coded link that then carries it.
        """
        self._encode = encode

    @property
    def exact(self) -> Link:
        exact = copy.copy(self)
        exact._encode = exact._coded = None
        return exact

    def sent(self) -> int:
        return sum(link.sent() for link in (self.flat, self.inside, self.between))

    async def reduce_scatter(self, flat: Tensor, layout: Layout) -> Tensor:
        packed, link = await self._add_inside(flat, layout)
        own = await link.reduce_scatter(*self._column(packed, layout))
        shard = parts(flat, layout)[self.rank].copy_(own)
        if link is self.between:
            self._net.give_back(packed)
        else:
            self._coded = packed, link
        return shard

    async def all_gather(self, flat: Tensor, layout: Layout) -> None:
        link = self.between
        if self._coded is None:
            packed = self._net.borrow(flat)
        else:
            packed, link = self._coded
            self._coded = None
        self._packed_parts(packed, layout)[self.rank].copy_(parts(flat, layout)[self.rank])
        await link.all_gather(*self._column(packed, layout))
        await self._gather_inside(packed, flat, layout)

    async def all_reduce(self, flat: Tensor, layout: Layout, halfway: Halfway = nothing) -> None:
        packed, link = await self._add_inside(flat, layout)
        await link.all_reduce(*self._column(packed, layout), halfway)
        await self._gather_inside(packed, flat, layout)

    async def _add_inside(self, flat: Tensor, layout: Layout) -> tuple[Tensor, Link]:
        """Add the mean's addends within the node.

        Return packed memory with the sums of this rank's column, and the link between nodes.
        """
        packed = self._net.borrow(flat)
        for addend, part in zip(
            parts(flat, layout), self._packed_parts(packed, layout), strict=True
        ):
            torch.div(addend, self._divisor, out=part)
        column = await self.inside.reduce_scatter(packed, self._columns(layout))
        if self._encode is None:
            return packed, self.between
        await self.compute()  # encoding must not delay other buckets' sums
        return packed, self._encode(column, self.between)

    async def _gather_inside(self, packed: Tensor, flat: Tensor, layout: Layout) -> None:
        """Gather the columns from the ranks of the node, and unpack them."""
        await self.inside.all_gather(packed, self._columns(layout))
        for value, part in zip(
            parts(flat, layout), self._packed_parts(packed, layout), strict=True
        ):
            value.copy_(part)
        self._net.give_back(packed)

    def _columns(self, layout: Layout) -> Layout:
        """Return the number of values in each packed column."""
        return [sum([layout[rank] for rank in column]) for column in self._net.levels.columns]

    def _column(self, packed: Tensor, layout: Layout) -> tuple[Tensor, Layout]:
        """Return this rank's column, and the number of values in the part of each node's rank."""
        column = parts(packed, self._columns(layout))[self._net.levels.place]
        return column, [layout[rank] for rank in self.column]

    def _packed_parts(self, packed: Tensor, layout: Layout) -> list[Tensor]:
        """Return each rank's part of packed memory, by rank."""
        by_place = parts(packed, [layout[rank] for rank in self._order])
        by_rank = dict(zip(self._order, by_place, strict=True))
        return [by_rank[rank] for rank in range(self.size)]

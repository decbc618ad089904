"""A balanced binary tree over virtual ranks, added up from partial sums. Pure.

[Note: one tree] The virtual ranks 0 to V - 1 are the leaves. Leaf 0 is added to leaf 1, leaf 2 to
leaf 3, and so on; then these sums are added in pairs. A sum without a neighbour moves up as it is.
`tree_sum` of the engine adds in the same order. Each rank has consecutive leaves and adds siblings
as soon as it has both, like the digits of a binary counter. So it keeps about log2(V/W) + 1 sums.
If V/W is a power of two, one sum is left at the end of a step, a node of the tree, and the ranks'
sums are added as by `tree_sum`. Otherwise a few sums are left, and they are sent one by one. Either
way, each value is the result of the same additions, however many ranks there are.
"""

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

Value = TypeVar("Value")


class Node(NamedTuple, Generic[Value]):
    """The sum of the leaves ``start`` to ``stop`` (exclusive)."""

    start: int
    stop: int
    value: Value


class PartialSums(Generic[Value]):
    """The sums of consecutive leaves, as few as the tree allows.

    Args:
        count: the number of leaves of the tree.
        add: a function that returns the sum of two values. It may change either of them.
    """

    def __init__(self, count: int, add: Callable[[Value, Value], Value]) -> None:
        self.nodes: list[Node[Value]] = []
        self._count = count
        self._add = add

    def push(self, start: int, stop: int, value: Value) -> None:
        """Add the sum of the leaves ``start`` to ``stop``, which follow those so far."""
        while self.nodes and is_left_sibling(self.nodes[-1], stop, self._count):
            left = self.nodes.pop()
            start, value = left.start, self._add(left.value, value)
        self.nodes.append(Node(start, stop, value))


def is_left_sibling(left: Node[Any], stop: int, count: int) -> bool:
    """Return whether a sum is the left sibling of the leaves that follow it, up to ``stop``."""
    width = left.stop - left.start
    is_power = width & (width - 1) == 0
    is_left = left.start % (2 * width) == 0
    return is_power and is_left and stop == min(left.start + 2 * width, count)


def leaves_of(rank: int, world_size: int, count: int) -> range:
    """Return the virtual ranks of a rank. The first ranks have one more if they do not divide."""
    share, more = divmod(count, world_size)
    start = rank * share + min(rank, more)
    return range(start, start + share + (rank < more))


def sums_of(leaves: range, count: int) -> list[tuple[int, int]]:
    """Return the start and stop of each partial sum that is left of a rank's leaves."""
    sums: PartialSums[None] = PartialSums(count, lambda left, right: None)
    for leaf in leaves:
        sums.push(leaf, leaf + 1, None)
    return [(node.start, node.stop) for node in sums.nodes]

"""Who owns which parameter, and where owners' parts lie in a buffer that travels. Pure: no tensors, no processes."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from crossover_ddp._exchange.layout import Layout, Span


class Assignment(NamedTuple):
    """Rank of each parameter, in their order, and the cost of what each rank owns."""

    owners: tuple[int, ...]
    loads: tuple[int, ...]


class OwnedPart(NamedTuple):
    """A parameter in a bucket: its owner, and its elements."""

    owner: int
    numel: int


class OwnedLayout(NamedTuple):
    """A buffer cut by owner, and where each parameter is in it."""

    layout: Layout
    places: tuple[Span, ...]


def assign(costs: Sequence[int], world_size: int) -> Assignment:
    """Give each parameter to the rank that has the least so far, the most expensive one first.

    Of equal ones the last goes first, since backward makes gradients in about that order: those of one bucket spread
    over the ranks. No rank has more than 4/3 of the least possible (Graham's bound for this order, 1969).

    Args:
        costs: of each parameter, in the optimizers' order.
        world_size: number of ranks.

    Raises:
        ValueError: if ``world_size`` is below 1.
    """
    if world_size < 1:
        raise ValueError(f"expected at least one rank, got world_size={world_size}; pass the group's size")
    loads = [0] * world_size
    owners = [0] * len(costs)
    for number in sorted(range(len(costs)), key=lambda each: (-costs[each], -each)):
        owner = min(range(world_size), key=lambda rank: (loads[rank], rank))
        owners[number] = owner
        loads[owner] += costs[number]
    return Assignment(tuple(owners), tuple(loads))


@lru_cache(maxsize=1024)
def owned_layout(world_size: int, parts: tuple[OwnedPart, ...]) -> OwnedLayout:
    """Put each parameter behind those before it in its owner's part; the same on all ranks.

    Args:
        world_size: number of parts of the buffer.
        parts: the bucket's parameters, in its order.
    """
    filled = [0] * world_size
    offsets = []
    for owner, numel in parts:
        offsets.append(filled[owner])
        filled[owner] += numel
    layout = Layout.of_lengths(filled)
    starts = [layout.part(part.owner).start + offset for part, offset in zip(parts, offsets, strict=True)]
    return OwnedLayout(
        layout,
        tuple([Span(start, start + part.numel) for start, part in zip(starts, parts, strict=True)]),
    )

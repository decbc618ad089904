"""Where everything lies in the buffers that travel for one bucket of K-FAC. Pure: no tensors, no processes.

[Note: the payload] A rank's part begins with what comes back: the gradients of the layers that it owns, its rows of the
layers that are spread, its share of the parameters that pass through, a few bytes for the rank's own number. Behind it
lie, only on the way back, the solvers that all ranks get.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from crossover_ddp._exchange.layout import Layout, Span
from crossover_ddp._owners.packing import Item, packing


class PassingSpan(NamedTuple):
    """A run of elements that pass through: where they are in the bucket, and in the part of ``owner``."""

    bucket: Span
    owner: int
    offset: int


class LayerSizes(NamedTuple):
    """One layer of a payload.

    ``owner``: who has its factors. ``gradient_numel``: elements of its gradients. ``solver_numel``: of its solver, on
    the way back. ``rows_numel``: of each rank's rows of its gradient, which then does not go to the owner; empty: it
    does.
    """

    owner: int
    gradient_numel: int
    solver_numel: int = 0
    rows_numel: tuple[int, ...] = ()


@dataclass(frozen=True)
class PayloadLayout:
    """The contents of both buffers, by offsets into the owners' parts, see [Note: the payload].

    Args:
        there: parts of the buffer that is summed.
        back: parts of the buffer that returns.
        gradients: offsets of each layer's gradients in the parts, in the order of the layers: in that of its owner, or,
            of a layer that is spread, in those of all ranks.
        solvers: offset of each layer's solver in its owner's part of ``back``.
        passing: what goes through untouched.
        number_offsets: of each rank's own number, at the end of its part of ``back``.
    """

    there: Layout
    back: Layout
    gradients: tuple[tuple[int, ...], ...]
    solvers: tuple[int, ...]
    passing: tuple[PassingSpan, ...]
    number_offsets: tuple[int, ...]
    in_place: bool
    """Whether one buffer can go both ways."""


@lru_cache(maxsize=1024)
def payload_layout(
    world_size: int, layers: tuple[LayerSizes, ...], passing: tuple[Span, ...], number_numel: int = 0
) -> PayloadLayout:
    """Lay out one payload; the same on all ranks, since it depends on the arguments only.

    Args:
        world_size: number of parts.
        layers: the layers that travel.
        passing: spans of the bucket that pass through; they are cut so that the parts become as equal as they can.
        number_numel: elements at the end of each part for the rank's own number; may be 0.
    """
    rows = [[*enumerate(each.rows_numel)] or [(each.owner, each.gradient_numel)] for each in layers]
    items = tuple([Item(owner, numel, numel) for each in rows for owner, numel in each])
    behind = [Item(rank, number_numel, number_numel) for rank in range(world_size)]
    behind += [Item(each.owner, 0, each.solver_numel) for each in layers]
    made = packing(world_size, items, passing, tuple(behind))
    starts = [(made.there.part(rank).start, made.back.part(rank).start) for rank in range(world_size)]
    offsets = iter([place.there.start - starts[place.owner][0] for place in made.items])
    appendices = made.behind[world_size:]
    return PayloadLayout(
        made.there,
        made.back,
        tuple([tuple([next(offsets) for _ in each]) for each in rows]),
        tuple([place.back.start - starts[place.owner][1] for place in appendices]),
        tuple(
            [
                PassingSpan(span, place.owner, place.there.start - starts[place.owner][0])
                for span, place in made.passing
            ]
        ),
        tuple([place.there.start - starts[place.owner][0] for place in made.behind[:world_size]]),
        in_place=not any(layer.solver_numel for layer in layers),
    )

"""Where everything lies in the buffers that travel for one bucket of K-FAC. Pure: no tensors, no processes.

[Note: the payload] A rank's part begins with what comes back: the gradients of the layers that it owns, its rows of the
layers that are spread, its share of the parameters that pass through, a few bytes for the rank's own number. Behind it
lie, only on the way there, the factors of its layers, and, only on the way back, the solvers that all ranks get. So
both ways are the same up to the appendices.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from crossover_ddp._exchange.filling import PassingSpan, cut_up, fill_up
from crossover_ddp._exchange.layout import Layout, Span


class LayerSizes(NamedTuple):
    """One layer of a payload.

    ``owner``: who has its factors. ``gradient_numel``: elements of its gradients. ``factor_numel``: of its factors, on
    the way there; 0: they do not travel. ``solver_numel``: of its solver, on the way back. ``rows_numel``: of each
    rank's rows of its gradient, which then does not go to the owner; empty: it does.
    """

    owner: int
    gradient_numel: int
    factor_numel: int = 0
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
        factors: offset of each layer's factors in its owner's part of ``there``.
        solvers: offset of each layer's solver in its owner's part of ``back``.
        passing: what goes through untouched.
        number_offsets: of each rank's own number, at the end of its part of ``back``.
    """

    there: Layout
    back: Layout
    gradients: tuple[tuple[int, ...], ...]
    factors: tuple[int, ...]
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
    filled = [0] * world_size
    gradients: list[tuple[int, ...]] = []
    for layer in layers:
        if layer.rows_numel:
            gradients.append(tuple(filled))
            filled = [before + rows for before, rows in zip(filled, layer.rows_numel, strict=True)]
        else:
            gradients.append((filled[layer.owner],))
            filled[layer.owner] += layer.gradient_numel
    shares = fill_up(filled, sum(span.numel for span in passing))
    cut = tuple(cut_up(passing, shares, filled))
    number_offsets = tuple([before + share for before, share in zip(filled, shares, strict=True)])
    there = [offset + number_numel for offset in number_offsets]
    back = list(there)
    factors, solvers = [], []
    for layer in layers:
        factors.append(there[layer.owner])
        there[layer.owner] += layer.factor_numel
        solvers.append(back[layer.owner])
        back[layer.owner] += layer.solver_numel
    return PayloadLayout(
        Layout.of_lengths(there),
        Layout.of_lengths(back),
        tuple(gradients),
        tuple(factors),
        tuple(solvers),
        cut,
        number_offsets,
        in_place=not any(layer.factor_numel or layer.solver_numel for layer in layers),
    )

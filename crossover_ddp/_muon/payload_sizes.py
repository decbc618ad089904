"""Where everything lies in the buffers that travel for one bucket of Muon. Pure: no tensors, no processes.

[Note: Muon's payload] On the way there a rank's part holds the gradients of its matrices, and its share of what passes
through. On the way back it holds the directions of these matrices in bfloat16, two bytes a number whatever the
bucket's numbers take, the same share of what passes through, and for each of its matrices the squared norm of the
gradient, eight raw bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

from crossover_ddp._exchange.filling import PassingSpan, cut_up, fill_up
from crossover_ddp._exchange.layout import Layout, Span

DIRECTION_BYTES: Final = 2
NORM_BYTES: Final = 8


class MatrixSize(NamedTuple):
    """A matrix in a bucket: who owns it, and how many elements it has."""

    owner: int
    numel: int


@dataclass(frozen=True)
class MuonLayout:
    """The contents of both buffers, see [Note: Muon's payload]; all places count from the begin of a buffer.

    Args:
        there: parts of the buffer that is summed.
        back: parts of the buffer that returns.
        gradients: where each matrix is in ``there``, in the order of the matrices.
        directions: where its direction is in ``back``; the last element may be used in part.
        norms: where its squared norm is in ``back``.
        passing_there: what passes through, in the bucket and in ``there``.
        passing_back: the same in ``back``.
    """

    there: Layout
    back: Layout
    gradients: tuple[Span, ...]
    directions: tuple[Span, ...]
    norms: tuple[Span, ...]
    passing_there: tuple[tuple[Span, Span], ...]
    passing_back: tuple[tuple[Span, Span], ...]


@lru_cache(maxsize=1024)
def muon_layout(
    world_size: int, itemsize: int, matrices: tuple[MatrixSize, ...], passing: tuple[Span, ...]
) -> MuonLayout:
    """Lay out one payload; the same on all ranks, since it depends on the arguments only.

    Args:
        world_size: number of parts.
        itemsize: bytes of an element of the bucket, at most 8.
        matrices: that travel with this bucket.
        passing: spans of the bucket that pass through; they are cut so that the ranks' parts, both ways together,
            become as equal as they can.
    """
    small = [_elements(matrix.numel * DIRECTION_BYTES, itemsize) for matrix in matrices]
    norm = _elements(NORM_BYTES, itemsize)
    there, gradients = _stacked(world_size, matrices, [matrix.numel for matrix in matrices])
    back, directions = _stacked(world_size, matrices, small)
    both = [(one + other) // 2 for one, other in zip(there, back, strict=True)]
    shares = fill_up(both, sum(span.numel for span in passing))
    cut_there = tuple(cut_up(passing, shares, there))
    cut_back = tuple(cut_up(passing, shares, back))
    there = [before + share for before, share in zip(there, shares, strict=True)]
    before_norms = [before + share for before, share in zip(back, shares, strict=True)]
    counts, norms = _stacked(world_size, matrices, [norm] * len(matrices))
    back = [before + count for before, count in zip(before_norms, counts, strict=True)]
    layout_there, layout_back = Layout.of_lengths(there), Layout.of_lengths(back)
    owners = [matrix.owner for matrix in matrices]
    return MuonLayout(
        layout_there,
        layout_back,
        _placed(layout_there, owners, gradients),
        _placed(layout_back, owners, directions),
        _placed(
            layout_back,
            owners,
            [
                Span(span.start + before_norms[owner], span.stop + before_norms[owner])
                for owner, span in zip(owners, norms, strict=True)
            ],
        ),
        _placed_passing(layout_there, cut_there),
        _placed_passing(layout_back, cut_back),
    )


def _elements(size_bytes: int, itemsize: int) -> int:
    return -(-size_bytes // itemsize)


def _stacked(
    world_size: int, matrices: Sequence[MatrixSize], numels: Sequence[int]
) -> tuple[list[int], list[Span]]:
    """Put each matrix behind those before it in its owner's part; return the parts' lengths and the places."""
    filled = [0] * world_size
    places = []
    for matrix, numel in zip(matrices, numels, strict=True):
        start = filled[matrix.owner]
        places.append(Span(start, start + numel))
        filled[matrix.owner] = start + numel
    return filled, places


def _placed(layout: Layout, owners: Sequence[int], spans: Sequence[Span]) -> tuple[Span, ...]:
    starts = [layout.part(owner).start for owner in owners]
    return tuple(
        [Span(start + span.start, start + span.stop) for start, span in zip(starts, spans, strict=True)]
    )


def _placed_passing(layout: Layout, passing: Sequence[PassingSpan]) -> tuple[tuple[Span, Span], ...]:
    places = []
    for span, owner, offset in passing:
        start = layout.part(owner).start + offset
        places.append((span, Span(start, start + span.numel)))
    return tuple(places)

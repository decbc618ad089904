"""Lay out things that have owners in the two flat buffers that travel to the owners and back.

This module is pure: it touches no tensors. `copy_parts` of `crossover_ddp._engine.buckets` copies
elements between the bucket and the buffers.

[Note: packing] One buffer goes to the owners, and the other one returns from them. A rank's part of
each buffer begins with the things that it owns. They are followed by elements of the bucket that
pass through unchanged. These elements are divided so that the total length of each rank's two parts
is as equal as possible. Whole parameters, Muon's matrices, and K-FAC's layers and solvers travel in
this layout. K-FAC's factors have one of their own, because their lengths differ from rank to rank.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from crossover_ddp._ddp.layout import Span, spans_of


class Item(NamedTuple):
    """A thing that has an owner. It may travel one way only."""

    owner: int
    there: int  # elements that go to the owner
    back: int  # elements that return from it


class Place(NamedTuple):
    """The place of one thing in both buffers, and its owner."""

    owner: int
    there: Span
    back: Span


class Packing(NamedTuple):
    """The layout of both buffers, see [Note: packing]."""

    # By rank, the length of its part of the buffer that is summed.
    there: tuple[int, ...]
    # By rank, the length of its part of the buffer that returns.
    back: tuple[int, ...]
    # The place of each item, in the order of the items.
    items: tuple[Place, ...]
    # For each run of elements that pass through: its span in the bucket, and its place.
    passing: tuple[tuple[Span, Place], ...]


@lru_cache(maxsize=1024)
def packing(world_size: int, items: tuple[Item, ...], passing: tuple[Span, ...] = ()) -> Packing:
    """Lay out both buffers. The layout depends only on the arguments, so all ranks get the same.

    Args:
        world_size: the number of parts.
        items: the things that have owners.
        passing: the spans of the bucket that pass through, in order. They are cut where parts end.
    """
    there = [0] * world_size
    back = [0] * world_size
    offsets = _stack(items, there, back)
    both = [(out + home) // 2 for out, home in zip(there, back, strict=True)]
    cut = list(cut_up(passing, fill_up(both, sum(span.numel for span in passing))))
    pieces = [Item(owner, span.numel, span.numel) for span, owner in cut]
    offsets += _stack(pieces, there, back)

    parts_there = spans_of(tuple(there))
    parts_back = spans_of(tuple(back))
    places = []
    for item, (out, home) in zip((*items, *pieces), offsets, strict=True):
        start_there = parts_there[item.owner].start + out
        start_back = parts_back[item.owner].start + home
        span_there = Span(start_there, start_there + item.there)
        span_back = Span(start_back, start_back + item.back)
        places.append(Place(item.owner, span_there, span_back))
    spans = [span for span, _ in cut]
    passed = zip(spans, places[len(items) :], strict=True)
    return Packing(tuple(there), tuple(back), tuple(places[: len(items)]), tuple(passed))


def _stack(items: Sequence[Item], there: list[int], back: list[int]) -> list[tuple[int, int]]:
    """Append each item to its owner's two parts.

    ``there`` and ``back`` hold the lengths of the parts so far. They are updated in place.

    Returns:
        For each item, the offsets at which it begins in the two parts.
    """
    offsets = []
    for owner, numel_there, numel_back in items:
        offsets.append((there[owner], back[owner]))
        there[owner] += numel_there
        back[owner] += numel_back
    return offsets


def fill_up(filled: Sequence[int], numel: int) -> tuple[int, ...]:
    """Divide ``numel`` elements so that the fullest part becomes as small as possible.

    Args:
        filled: the length of each part so far.
        numel: the number of elements to add.

    Returns:
        The number of elements that each part gets.
    """
    # Fill the emptiest parts up to a common level, like water in connected vessels: find how many
    # parts the water reaches, and its level.
    order = sorted(range(len(filled)), key=lambda rank: (filled[rank], rank))
    for count in range(1, len(order) + 1):
        lowest = order[:count]
        level, over = divmod(sum(filled[rank] for rank in lowest) + numel, count)
        if count == len(order) or level + (over > 0) <= filled[order[count]]:
            break
    shares = [0] * len(filled)
    for place, rank in enumerate(sorted(lowest)):
        # The remainder goes to the last parts, as in `equal_lengths`.
        shares[rank] = level - filled[rank] + (place >= count - over)
    return tuple(shares)


def cut_up(passing: Sequence[Span], shares: Sequence[int]) -> Iterator[tuple[Span, int]]:
    """Cut the spans into pieces and yield each piece with its rank, starting with rank 0.

    Args:
        passing: the spans of the bucket that pass through, in order.
        shares: the number of elements that each rank gets.
    """
    borders = list(accumulate(shares))
    done = 0
    rank = 0
    for span in _merged(passing):
        start = span.start
        while start < span.stop:
            while borders[rank] <= done:
                rank += 1
            stop = min(span.stop, start + borders[rank] - done)
            yield Span(start, stop), rank
            done += stop - start
            start = stop


def _merged(spans: Sequence[Span]) -> list[Span]:
    merged: list[Span] = []
    for span in spans:
        if merged and merged[-1].stop == span.start:
            merged[-1] = Span(merged[-1].start, span.stop)
        elif span.numel:
            merged.append(span)
    return merged

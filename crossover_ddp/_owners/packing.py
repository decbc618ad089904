"""Where owned things lie in the buffers that travel for one bucket. Pure: no tensors, no processes.

[Note: packing] A rank's part holds, both ways, what it owns. Behind that lies so much of what passes through that the
parts, both ways together, become as equal as they can be.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from crossover_ddp._ddp.layout import Span, spans_of


class Item(NamedTuple):
    """Something with an owner: how many elements of it go there, and how many come back."""

    owner: int
    there: int
    back: int


class Place(NamedTuple):
    """Where something of ``owner`` lies in both buffers."""

    owner: int
    there: Span
    back: Span


class Packing(NamedTuple):
    """The contents of both buffers, see [Note: packing].

    Args:
        there: parts of the buffer that is summed.
        back: parts of the buffer that returns.
        items: places, in the order of the items.
        passing: what passes through: where it is in the bucket, and its place.
    """

    there: tuple[int, ...]
    back: tuple[int, ...]
    items: tuple[Place, ...]
    passing: tuple[tuple[Span, Place], ...]


@lru_cache(maxsize=1024)
def packing(world_size: int, items: tuple[Item, ...], passing: tuple[Span, ...] = ()) -> Packing:
    """Lay both buffers out; the same on all ranks, since it depends on the arguments only.

    Args:
        world_size: number of parts.
        items: what has an owner.
        passing: spans of the bucket that pass through, in order; they are cut where parts end.
    """
    there, back = [0] * world_size, [0] * world_size
    offsets = _stack(items, there, back)
    both = [(out + home) // 2 for out, home in zip(there, back, strict=True)]
    cut = list(cut_up(passing, fill_up(both, sum(span.numel for span in passing))))
    all_items = (*items, *(Item(owner, span.numel, span.numel) for span, owner in cut))
    offsets += _stack(all_items[len(items) :], there, back)
    lengths = tuple(there), tuple(back)
    parts = [spans_of(each) for each in lengths]
    places = []
    for (owner, numel_there, numel_back), (out, home) in zip(all_items, offsets, strict=True):
        a, b = parts[0][owner].start + out, parts[1][owner].start + home
        places.append(Place(owner, Span(a, a + numel_there), Span(b, b + numel_back)))
    spans = [span for span, _ in cut]
    passed = zip(spans, places[len(items) :], strict=True)
    return Packing(*lengths, tuple(places[: len(items)]), tuple(passed))


def _stack(items: Sequence[Item], there: list[int], back: list[int]) -> list[tuple[int, int]]:
    """Put each item behind what its owner's parts hold, which grow by it; return where it begins in them."""
    offsets = []
    for owner, numel_there, numel_back in items:
        offsets.append((there[owner], back[owner]))
        there[owner] += numel_there
        back[owner] += numel_back
    return offsets


def fill_up(filled: Sequence[int], numel: int) -> tuple[int, ...]:
    """Share ``numel`` elements out so that the fullest part is as small as it can be; the emptiest gets most."""
    order = sorted(range(len(filled)), key=lambda rank: (filled[rank], rank))
    for count in range(1, len(order) + 1):
        lowest = order[:count]
        level, over = divmod(sum(filled[rank] for rank in lowest) + numel, count)
        if count == len(order) or level + (over > 0) <= filled[order[count]]:
            break
    shares = [0] * len(filled)
    for place, rank in enumerate(sorted(lowest)):
        # The last ones get the odd elements, as in `equal_lengths`.
        shares[rank] = level - filled[rank] + (place >= count - over)
    return tuple(shares)


def cut_up(passing: Sequence[Span], shares: Sequence[int]) -> Iterator[tuple[Span, int]]:
    """Hand out the spans, each to a rank, in their order: rank 0's share first.

    Args:
        passing: spans of the bucket, in order.
        shares: elements that each rank gets.
    """
    borders = list(accumulate(shares))
    done, rank = 0, 0
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

"""What passes through a payload fills its parts up, so that they are as equal as they can be. Pure."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from .layout import Span


class PassingSpan(NamedTuple):
    """A run of elements that pass through: where they are in the bucket, and in the part of ``owner``."""

    bucket: Span
    owner: int
    offset: int


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
        # The last ones get the odd elements, as in Layout.equal.
        shares[rank] = level - filled[rank] + (place >= count - over)
    return tuple(shares)


def cut_up(passing: Sequence[Span], shares: Sequence[int], offsets: Sequence[int]) -> Iterator[PassingSpan]:
    """Hand out the spans in their order: rank 0's share first.

    Args:
        passing: spans of the bucket, in order.
        shares: elements that each rank gets.
        offsets: where they begin in the ranks' parts.
    """
    borders = list(accumulate(shares))
    done, rank = 0, 0
    for span in _merged(passing):
        start = span.start
        while start < span.stop:
            while borders[rank] <= done:
                rank += 1
            stop = min(span.stop, start + borders[rank] - done)
            yield PassingSpan(Span(start, stop), rank, offsets[rank] + done - (borders[rank] - shares[rank]))
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

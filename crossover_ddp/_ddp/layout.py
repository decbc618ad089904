"""Cuts a flat buffer into consecutive parts, one per rank. Pure: no tensors, no processes."""

from functools import cache, lru_cache
from itertools import accumulate
from typing import NamedTuple


class Span(NamedTuple):
    """The elements ``start`` to ``stop`` (exclusive) of a flat buffer."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start


@cache
def equal_lengths(numel: int, parts: int, multiple: int = 1) -> tuple[int, ...]:
    """Return the length of each part, in elements.

    All parts are equal, and multiples of ``multiple``; the remainder is added to the last one.
    """
    share = numel // parts // multiple * multiple
    return (*(share,) * (parts - 1), numel - share * (parts - 1))


@lru_cache(maxsize=256)
def spans_of(lengths: tuple[int, ...]) -> tuple[Span, ...]:
    """Return the span of each part, in the order of ranks."""
    stops = accumulate(lengths)
    return tuple([Span(stop - length, stop) for length, stop in zip(lengths, stops, strict=True)])

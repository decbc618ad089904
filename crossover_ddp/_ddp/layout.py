"""Cuts a flat buffer into consecutive parts, one per rank.

Pure: it needs neither tensors nor processes.
"""

from functools import cache, lru_cache
from itertools import accumulate
from typing import NamedTuple


class Span(NamedTuple):
    """The elements ``start`` to ``stop`` (exclusive) of a flat buffer."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.stop - self.start


@cache
def equal_lengths(numel: int, parts: int, multiple: int = 1) -> tuple[int, ...]:
    """Return the length of each part, in elements.

    All parts are equally long, and their length is a multiple of ``multiple``. Only the last part
    also gets the remainder.
    """
    share = numel // parts // multiple * multiple
    return (*(share,) * (parts - 1), numel - share * (parts - 1))


@lru_cache(maxsize=256)
def spans_of(lengths: tuple[int, ...]) -> tuple[Span, ...]:
    """Return the span of each part, in rank order."""
    stops = accumulate(lengths)
    return tuple([Span(stop - length, stop) for length, stop in zip(lengths, stops, strict=True)])

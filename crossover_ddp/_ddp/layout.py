"""How a flat buffer is cut into consecutive parts, one per rank. Pure: no tensors, no processes."""

from functools import lru_cache
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


@lru_cache(maxsize=256)
def spans_of(lengths: tuple[int, ...]) -> tuple[Span, ...]:
    """Return where each part is, in the order of ranks."""
    stops = list(accumulate(lengths))
    return tuple([Span(stop - length, stop) for length, stop in zip(lengths, stops, strict=True)])

"""How a flat buffer is cut into consecutive parts, one per rank. Pure: no tensors, no processes."""

from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Layout:
    """A partition of a flat buffer into consecutive parts, one per rank, in rank order; parts may be empty.

    Args:
        lengths: number of elements of each rank's part; their sum is the buffer's size.
    """

    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.lengths:
            raise ValueError("expected at least one part, got lengths=(); pass one length per rank")
        for rank, length in enumerate(self.lengths):
            if not isinstance(length, int) or length < 0:
                raise ValueError(
                    f"expected integer lengths >= 0, got lengths[{rank}]={length!r}; an empty part has length 0"
                )

    @classmethod
    def equal(cls, numel: int, parts: int) -> "Layout":
        """Give every part ``numel // parts`` elements, and the rest to the last part, too."""
        if parts < 1:
            raise ValueError(f"expected parts >= 1, got parts={parts}; pass the world size")
        if numel < 0:
            raise ValueError(f"expected numel >= 0, got numel={numel}; pass the buffer's size")
        return _equal(numel, parts)

    @classmethod
    def of_lengths(cls, lengths: Sequence[int]) -> "Layout":
        """Give rank i the next ``lengths[i]`` elements."""
        return cls(tuple(lengths))

    @property
    def parts(self) -> int:
        """Number of parts, equal to the world size."""
        return len(self.lengths)

    @property
    def numel(self) -> int:
        """Number of elements of the whole buffer."""
        return sum(self.lengths)

    def part(self, rank: int) -> Span:
        """Return the span that ``rank`` owns."""
        if not 0 <= rank < self.parts:
            raise ValueError(f"expected 0 <= rank < {self.parts}, got rank={rank}; pass a rank of the group")
        return _spans(self.lengths)[rank]


@lru_cache(maxsize=256)
def _equal(numel: int, parts: int) -> Layout:
    share = numel // parts
    return Layout((*(share,) * (parts - 1), numel - share * (parts - 1)))


@lru_cache(maxsize=256)
def _spans(lengths: tuple[int, ...]) -> tuple[Span, ...]:
    stops = list(accumulate(lengths))
    return tuple([Span(stop - length, stop) for length, stop in zip(lengths, stops, strict=True)])

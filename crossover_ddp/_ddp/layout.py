"""How a flat buffer is cut into consecutive parts, one per rank. Pure: no tensors, no processes."""

from collections.abc import Iterator, Sequence
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

    def chunks(self, chunk_numel: int) -> Iterator["Span"]:
        """Cut into consecutive spans of ``chunk_numel``; the last one may be shorter."""
        if chunk_numel < 1:
            raise ValueError(
                f"expected chunk_numel >= 1, got chunk_numel={chunk_numel}; pass a positive size"
            )
        for start in range(self.start, self.stop, chunk_numel):
            yield Span(start, min(start + chunk_numel, self.stop))


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
    def equal(cls, numel: int, parts: int, *, multiple: int = 1) -> "Layout":
        """Give every part ``numel // parts`` elements, rounded down to a ``multiple``, and the rest to the last part.

        The main region then is exactly what an equal-size, in-place ``reduce_scatter_tensor`` wants.
        """
        if parts < 1:
            raise ValueError(f"expected parts >= 1, got parts={parts}; pass the world size")
        if numel < 0:
            raise ValueError(f"expected numel >= 0, got numel={numel}; pass the buffer's size")
        if multiple < 1:
            raise ValueError(f"expected multiple >= 1, got multiple={multiple}; pass a number of elements")
        return _equal(numel, parts, multiple)

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

    @property
    def main_numel(self) -> int:
        """Size of the region that starts at 0 and is cut equally, or 0 if this layout is not an equal one."""
        return self.lengths[0] * self.parts if self.is_equal else 0

    @property
    def is_equal(self) -> bool:
        """Whether all parts are equal but the last one, which may be longer."""
        first, *between, last = (*self.lengths[:1], *self.lengths)
        return all(length == first for length in between) and last >= first

    def part(self, rank: int) -> Span:
        """Return the span that ``rank`` owns."""
        if not 0 <= rank < self.parts:
            raise ValueError(f"expected 0 <= rank < {self.parts}, got rank={rank}; pass a rank of the group")
        return _spans(self.lengths)[rank]

    def tail(self) -> Span:
        """Return what the last part has behind the main region of an equal layout."""
        return Span(self.main_numel, self.numel)


@lru_cache(maxsize=256)
def _equal(numel: int, parts: int, multiple: int) -> Layout:
    share = numel // parts // multiple * multiple
    return Layout((*(share,) * (parts - 1), numel - share * (parts - 1)))


@lru_cache(maxsize=256)
def _spans(lengths: tuple[int, ...]) -> tuple[Span, ...]:
    stops = list(accumulate(lengths))
    return tuple([Span(stop - length, stop) for length, stop in zip(lengths, stops, strict=True)])

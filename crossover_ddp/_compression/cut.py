"""How a bucket is cut into what is coded and what travels exact, owner by owner. Pure: no tensors, no processes."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from crossover_ddp._ddp.layout import Layout, Span

# A parameter of one dimension is a bias or a scale: few elements, and the model reacts to each.
_CODED_DIMENSIONS = 2


class OwnedSpan(NamedTuple):
    """What one owner has of one parameter.

    Args:
        parameter: its number in the bucket.
        span: in the bucket's flat buffer.
        begin: first element of it in the parameter.
    """

    parameter: int
    span: Span
    begin: int


class Part(NamedTuple):
    """What one owner has of a bucket; messages hold it in this order."""

    coded: tuple[OwnedSpan, ...]
    exact: tuple[OwnedSpan, ...]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of elements of each coded segment."""
        return tuple([segment.span.numel for segment in self.coded])

    def slots(self, multiple: int) -> tuple[Span, ...]:
        """Return where coded segments are when each begins at a multiple, one behind the other."""
        starts = accumulate([padded(length, multiple) for length in self.lengths], initial=0)
        return tuple(
            [Span(start, start + length) for start, length in zip(starts, self.lengths, strict=False)]
        )

    def coded_numel(self, multiple: int = 1) -> int:
        """Return the number of coded elements, padded."""
        return sum(padded(length, multiple) for length in self.lengths)

    @property
    def exact_numel(self) -> int:
        """Number of elements that travel exact."""
        return sum(segment.span.numel for segment in self.exact)


def padded(numel: int, multiple: int) -> int:
    """Round up to a multiple."""
    return -(-numel // multiple) * multiple


def cut(numels: Sequence[int], dimensions: Sequence[int], layout: Layout) -> tuple[Part, ...]:
    """Cut a bucket of parameters into the parts of its owners.

    Args:
        numels: of the parameters, in the order of the flat buffer.
        dimensions: of the parameters.
        layout: who owns which part of the buffer.
    """
    spans, start = [], 0
    for numel in numels:
        spans.append(Span(start, start + numel))
        start += numel
    if start != layout.numel:
        raise ValueError(f"expected {layout.numel} elements, got numels of {start}; pass those of the bucket")
    parts = []
    for owner in range(layout.parts):
        segments = list(_meets(spans, layout.part(owner)))
        coded = [each for each in segments if dimensions[each.parameter] >= _CODED_DIMENSIONS]
        exact = [each for each in segments if dimensions[each.parameter] < _CODED_DIMENSIONS]
        parts.append(Part(tuple(coded), tuple(exact)))
    return tuple(parts)


def _meets(spans: Sequence[Span], part: Span) -> Iterator[OwnedSpan]:
    for parameter, span in enumerate(spans):
        start, stop = max(span.start, part.start), min(span.stop, part.stop)
        if start < stop:
            yield OwnedSpan(parameter, Span(start, stop), start - span.start)

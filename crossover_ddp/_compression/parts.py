"""What of a flat buffer is coded and what travels exact, owner by owner. Pure: no processes."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from crossover_ddp._ddp.contents import Content, Run
from crossover_ddp._ddp.layout import Span

# A parameter of one dimension is a bias or a scale: few elements, and the model reacts to each.
_CODED_DIMENSIONS = 2


class Part(NamedTuple):
    """What one owner has of a buffer; messages hold it in this order."""

    coded: Sequence[Run]
    exact: Sequence[Span]

    @property
    def exact_numel(self) -> int:
        """Number of elements that travel exact."""
        return sum(span.stop - span.start for span in self.exact)

    def slots(self, multiple: int) -> list[Span]:
        """Return where coded runs are when each begins at a multiple, one behind the other."""
        numels = [run.span.stop - run.span.start for run in self.coded]
        starts = accumulate([padded(numel, multiple) for numel in numels], initial=0)
        return [Span(start, start + numel) for start, numel in zip(starts, numels, strict=False)]


def padded(numel: int, multiple: int) -> int:
    """Round up to a multiple."""
    return -(-numel // multiple) * multiple


def runs_of(contents: Sequence[Content], layout: Sequence[int]) -> list[Run]:
    """List what of a bucket may be rounded, in its order.

    Args:
        contents: of the bucket.
        layout: number of elements of each owner's part.
    """
    runs, start = [], 0
    for owner, numel in enumerate(layout):
        for parameter, _, span in contents:
            begin, stop = max(span.start, start), min(span.stop, start + numel)
            if begin < stop and parameter.dim() >= _CODED_DIMENSIONS:
                runs.append(Run(parameter, begin - span.start, owner, Span(begin, stop)))
        start += numel
    return runs


def parts_of(layout: Sequence[int], runs: Sequence[Run]) -> list[Part]:
    """Cut a buffer by owner into ``runs``, which are coded, and the rest, which travels exact."""
    parts, start = [], 0
    for owner, numel in enumerate(layout):
        stop, exact = start + numel, []
        coded = [run for run in runs if run.owner == owner]
        for span in (*[run.span for run in coded], Span(stop, stop)):
            if start < span.start:
                exact.append(Span(start, span.start))
            start = span.stop
        parts.append(Part(coded, exact))
    return parts

"""Where the parameters of two dimensions or more are in a payload of K-FAC: what a codec may round."""

from collections.abc import Iterator, Sequence

from torch import Tensor

from crossover_ddp._exchange.contents import Content
from crossover_ddp._exchange.layout import Layout, Span
from crossover_ddp._exchange.transfer import Travelling

from .payload_layout import PayloadLayout
from .round_plan import BucketLayer

_MATRIX = 2


def matrices(
    layout: PayloadLayout,
    layers: Sequence[BucketLayer],
    weights: Sequence[Tensor],
    owners: Sequence[int],
    contents: Sequence[Content],
) -> list[Travelling]:
    """List the weights of ``layers`` and what passes through; biases, factors and messages are left out.

    Args:
        layout: of the payload.
        layers: in it, none of them spread.
        weights: of the layers.
        owners: of all layers of the model.
        contents: of the bucket.
    """
    found: list[Travelling] = []
    for layer, weight, offsets in zip(layers, weights, layout.gradients, strict=True):
        found.append(_at(layout, owners[layer.index], offsets[0], weight, 0, weight.numel()))
    for span, owner, offset in layout.passing:
        for content, begin, stop in _meets(contents, span):
            if content.parameter.dim() >= _MATRIX:
                place = offset + begin - span.start
                first = begin - content.span.start
                found.append(_at(layout, owner, place, content.parameter, first, stop - begin))
    return sorted(found, key=lambda each: each.there.start)


def _at(
    layout: PayloadLayout, owner: int, offset: int, parameter: Tensor, begin: int, numel: int
) -> Travelling:
    def span(part: Layout) -> Span:
        start = part.part(owner).start + offset
        return Span(start, start + numel)

    return Travelling(parameter, begin, owner, span(layout.there), span(layout.back))


def _meets(contents: Sequence[Content], span: Span) -> Iterator[tuple[Content, int, int]]:
    """Yield the parameters that have elements in ``span`` of the bucket, with the first and the end of these."""
    for content in contents:
        begin, stop = max(content.span.start, span.start), min(content.span.stop, span.stop)
        if begin < stop:
            yield content, begin, stop

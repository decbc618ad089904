"""A bucket by owner: the layers that it completes, and what else of it passes through."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from crossover_ddp._ddp.contents import Content, Run
from crossover_ddp._ddp.layout import Span
from crossover_ddp._engine.journeys import Gate
from crossover_ddp._engine.links import Link
from crossover_ddp._owners.packing import Item, packing

from .bucket_layer import BucketLayer, Rows, Whole
from .preconditioner import Preconditioner
from .settings import HyperNow
from .spread import SpreadSolver, spread_numel


class Packed:
    """What travels in a bucket's place.

    A rank's part begins with the layers that it owns and its rows of those that are spread. Behind that lies its share
    of what passes through.

    Args:
        owned: this rank's layers.
        layers: those that the bucket completes.
        buffer: of the bucket, flat.
        contents: of the bucket.
        passing: spans of ``buffer`` that pass through.
        take: lends memory, by size.
        give: takes it back.
        bits: by layer, where those of a spread layer's direction are noted; see [Note: equal bits] in `journeys`.
        elsewhere: opened when the layers are written of which the bucket has a part, and a later one the rest.

    Attributes:
        factors: opened when all factors that have left so far are in the running means.
    """

    def __init__(
        self,
        owned: Preconditioner,
        layers: Sequence[BucketLayer],
        buffer: Tensor,
        contents: Sequence[Content],
        passing: tuple[Span, ...],
        *,
        take: Callable[[int], Tensor],
        give: Callable[[Tensor], None],
        bits: dict[int, Tensor],
        elsewhere: Sequence[Gate],
    ) -> None:
        self.layers = [
            Whole(each, owned) if each.spread is None else Rows(each, each.spread, owned, bits)
            for each in layers
        ]
        items = tuple([Item(owner, n, n) for layer in self.layers for owner, n in layer.items])
        made = packing(owned.setup.world_size, items, passing)
        self.layout, self.passing = made.there.lengths, made.passing
        self.flat, self._give = take(made.there.numel), give
        self._owned, self._buffer, self._contents = owned, buffer, contents
        new = [each for each in layers if each.sends_solver]
        self._new = sorted(new, key=lambda layer: owned.owners[layer.index])
        self.elsewhere, self.factors = elsewhere, owned.traffic.arrived
        places = iter(made.items)
        for layer in self.layers:
            layer.spans = [next(places).there for _ in layer.items]
            layer.pack(self.flat)
        for span, place in self.passing:
            _part(self.flat, place.there).copy_(_part(buffer, span))

    async def share_solvers(self, link: Link) -> None:
        """Copy solvers of spread layers that are new in this step from their owners to all."""
        owned, numels = self._owned, [spread_numel(layer.shape) for layer in self._new]
        if not numels:
            return
        counts = [0] * link.size
        for layer, numel in zip(self._new, numels, strict=True):
            counts[owned.owners[layer.index]] += numel
        flat = self.flat.new_empty(sum(counts))
        places = list(zip(self._new, flat.split(numels), strict=True))
        for layer, place in places:
            if layer.index in owned.curvatures:
                owned.spread.send(owned.curvatures[layer.index].spread(), place)
        await link.all_gather(flat, counts)
        for layer, place in places:
            curvature = owned.curvatures.get(layer.index)
            solver = SpreadSolver.unpack(place, layer.shape) if curvature is None else curvature.spread()
            owned.spread.keep(layer.index, solver)

    def work(self, layer: Whole | Rows, now: HyperNow) -> Tensor | None:
        """Precondition what of a layer is this rank's; return its term of the KL clip's sum, if any."""
        index, local = layer.layer.index, layer.layer.local
        with self._exact():
            if local is not None:
                self._owned.curvatures[index].add(*local, now.decay)
            return layer.work(now)

    def unload(self, scale: Tensor | None) -> None:
        """Write what came back into DDP's buckets, directions times ``scale``; None for 1."""
        with self._exact():
            for layer in self.layers:
                layer.bring_back(scale)
        for span, place in self.passing:
            _part(self._buffer, span).copy_(_part(self.flat, place.there))

    def _exact(self) -> torch.autocast:
        # A thread that calls backward(), or forward, may have been told to compute in half precision.
        return torch.autocast(self.flat.device.type, enabled=False)

    def done(self) -> None:
        """Give the memory back."""
        self._give(self.flat)

    def runs(self) -> list[Run]:
        """List where parameters of two dimensions or more travel, which a codec may round; no layer is spread then."""
        found = []
        for each in self.layers:
            (span,), ((owner, _),) = each.spans, each.items
            weight = self._owned.setup.layers[each.layer.index].weight
            found.append(Run(weight, 0, owner, Span(span.start, span.start + weight.numel())))
        for span, place in self.passing:
            for parameter, _, own in self._contents:
                begin, stop = max(own.start, span.start), min(own.stop, span.stop)
                if begin < stop and parameter.dim() > 1:
                    start = place.there.start - span.start
                    run = Span(start + begin, start + stop)
                    found.append(Run(parameter, begin - own.start, place.owner, run))
        return sorted(found, key=lambda run: run.span.start)


def _part(flat: Tensor, span: Span) -> Tensor:
    return flat[span.start : span.stop]

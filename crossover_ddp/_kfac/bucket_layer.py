"""One complete layer of K-FAC in a bucket: what travels of it, what is done with it, what comes back.

[Note: a layer's way] A layer goes to its owner, which preconditions it: `Whole`. Or, if all ranks have its solver, each
rank preconditions some rows of it: `Rows`, see [Note: spread layers] in `spread`. Both do the same in turn: `pack` on
the hook's thread, `work` between the halves, `bring_back` wherever the bucket's way ends.

[Note: equal bits] The last product of a spread layer is every rank's own. Should one round it otherwise than the others
one day, since its number of threads has changed, say, replicas would drift apart in silence. So each rank sends the sum
of the directions' bits, as whole numbers, with the messages of the next step, and all compare them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from crossover_ddp._exchange.layout import Span
from crossover_ddp._owners.packing import Item, Place

from .columns import LayerShape
from .factors import gradient_matrix, split_gradient
from .preconditioner import Preconditioner
from .settings import HyperNow
from .spread import SpreadSolver, rows_of, sides


@dataclass(eq=False)
class BucketLayer:
    """The gradients of a layer in DDP's buckets.

    ``lr``, ``bias_lr``: of its weight and its bias. ``local``: this rank's A and G, if it takes its own. ``spread``:
    its solver, if all ranks have it and the layer is spread in this step. ``sends_solver``: whether its owner sends it
    to all ranks in this step.
    """

    index: int
    shape: LayerShape
    weight: Tensor
    bias: Tensor | None
    lr: float
    bias_lr: float
    local: tuple[Tensor, Tensor] | None = None
    spread: SpreadSolver | None = None
    sends_solver: bool = False


class Whole:
    """A layer that goes to its owner.

    Args:
        layer: in DDP's buckets.
        owned: this rank's layers.

    Attributes:
        items: what travels.
        places: where; set before anything is packed.
    """

    def __init__(self, layer: BucketLayer, owned: Preconditioner) -> None:
        self.layer = layer
        self._owned = owned
        numel = layer.weight.numel() + (0 if layer.bias is None else layer.bias.numel())
        self.items = [Item(owned.owners[layer.index], numel, numel)]
        self.places: Sequence[Place] = ()

    def pack(self, there: Tensor) -> None:
        """Write the gradients."""
        weight, bias = self._views(there, self.places[0].there)
        weight.copy_(self.layer.weight)
        if bias is not None and self.layer.bias is not None:
            bias.copy_(self.layer.bias)

    def work(self, now: HyperNow, there: Tensor, back: Tensor) -> Tensor | None:
        """Precondition the mean, if this rank is the owner; return the layer's term of the KL clip's sum, if any."""
        curvature = self._owned.curvatures.get(self.layer.index)
        if curvature is None:
            return None
        # Not to send plain gradients for a whole period where the first factors were not finite.
        if now.inverts or curvature.lacks_solver:
            curvature.invert(now.damping)
        (place,), shape, solver = self.places, self.layer.shape, curvature.solver
        matrix = gradient_matrix(shape, *self._views(there, place.there))
        preconditioned = matrix
        if solver is not None:
            # With a bias it is a copy already, see [Note: copies before products] in `factors`.
            preconditioned = solver.precondition(matrix if shape.has_bias else matrix.clone())
        term = None
        if now.kl_clip is not None:  # now, since the direction may be written over the gradient
            term = self._kl_term(preconditioned * matrix.to(preconditioned.dtype))
        if solver is not None or back is not there:
            split_gradient(shape, preconditioned, *self._views(back, place.back))
        return term

    def bring_back(self, back: Tensor, scale: Tensor | None) -> None:
        """Write the direction, times ``scale``, to DDP's bucket; None for 1."""
        weight, bias = self._views(back, self.places[0].back)
        for source, target in ((weight, self.layer.weight), (bias, self.layer.bias)):
            if source is None or target is None:
                continue
            if scale is None:
                target.copy_(source)
            else:
                torch.mul(source, scale, out=target)

    def _views(self, flat: Tensor, span: Span) -> tuple[Tensor, Tensor | None]:
        """Return the views of weight and bias, one behind the other."""
        weight, bias = self.layer.weight, self.layer.bias
        middle = span.start + weight.numel()
        own = flat[span.start : middle].view(weight.shape)
        return own, None if bias is None else flat[middle : span.stop].view(bias.shape)

    def _kl_term(self, terms: Tensor) -> Tensor:
        """Sum up V·∇, [groups, g, a] with the bias in the last column, by the learning rates."""
        layer = self.layer
        if layer.bias is None or layer.bias_lr == layer.lr:
            return terms.sum(dtype=torch.float64) * layer.lr**2
        weight, bias = terms[..., :-1].sum(dtype=torch.float64), terms[..., -1].sum(dtype=torch.float64)
        return weight * layer.lr**2 + bias * layer.bias_lr**2


class Rows:
    """A layer of which each rank preconditions some rows; see `Whole`.

    Args:
        layer: in DDP's buckets.
        solver: that all ranks have.
        owned: this rank's layers.
        bits: by layer, where those of its direction are noted, see [Note: equal bits].
    """

    def __init__(
        self, layer: BucketLayer, solver: SpreadSolver, owned: Preconditioner, bits: dict[int, Tensor]
    ) -> None:
        self.layer = layer
        self._bits = bits
        self._solver = solver
        self._owned = owned
        self._rows = rows_of(layer.shape, owned.setup.world_size)
        self._width = sides(layer.shape)[1]
        numels = [rows.numel * self._width for rows in self._rows]
        self.items = [Item(rank, numel, numel) for rank, numel in enumerate(numels)]
        self.places: Sequence[Place] = ()

    def pack(self, there: Tensor) -> None:
        """Write each rank's rows of T ∇."""
        matrix = gradient_matrix(self.layer.shape, self.layer.weight, self.layer.bias)[0]
        # It runs inside of backward(), which may have been called under autocast.
        with torch.autocast(matrix.device.type, enabled=False):
            for rows, place in zip(self._rows, self.places, strict=True):
                self._solver.before(matrix, rows, self._view(there, place.there))

    def work(self, now: HyperNow, there: Tensor, back: Tensor) -> Tensor | None:
        """Precondition this rank's rows; return their term of the KL clip's sum, if any."""
        rank = self._owned.setup.rank
        place = self.places[rank]
        # See [Note: copies before products] in `factors`.
        turned = self._view(there, place.there).to(self._solver.right.dtype, copy=True)
        made = turned @ self._solver.right
        self._view(back, place.back).copy_(made)
        if now.kl_clip is None:
            return None
        return (made * turned).sum(dtype=torch.float64) * self.layer.lr**2

    def bring_back(self, back: Tensor, scale: Tensor | None) -> None:
        """Make the direction of all ranks' rows, times ``scale``, and write it to DDP's bucket; None for 1."""
        with torch.autocast(back.device.type, enabled=False):
            direction = self._solver.after([self._view(back, place.back) for place in self.places])
        if scale is not None:
            direction *= scale
        self._bits[self.layer.index] = _bits_of(direction)
        split_gradient(self.layer.shape, direction.unsqueeze(0), self.layer.weight, self.layer.bias)

    def _view(self, flat: Tensor, span: Span) -> Tensor:
        return flat[span.start : span.stop].view(-1, self._width)


def _bits_of(direction: Tensor) -> Tensor:
    """Return the sum of a direction's bits as whole numbers; 0 where it is not finite: no NaN is like another."""
    flat = direction if direction.is_contiguous() else direction.mT
    bits = flat.view(torch.int64 if flat.itemsize == 8 else torch.int32).sum(dtype=torch.int64)
    return bits * flat.isfinite().all()

"""One complete layer of K-FAC in a bucket: what travels of it, what is done with it, what comes back.

[Note: a layer's way] A layer goes to its owner, which preconditions it: `Whole`. Or, if all ranks have its solver, each
rank preconditions some rows of it: `Rows`, see [Note: spread layers] in `spread`. Both do the same in turn: `pack` on
the hook's thread, `work` between the halves, `bring_back` wherever the bucket's way ends.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from crossover_ddp._ddp.layout import Span
from crossover_ddp._engine.journeys import Gate

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
    to all ranks in this step. ``whole``: to be opened when it is written, if an earlier bucket has a part of it.
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
    whole: Gate | None = None


class Whole:
    """A layer that goes to its owner.

    Args:
        layer: in DDP's buckets.
        owned: this rank's layers.

    Attributes:
        layer: as given.
        items: what travels: by owner, how many elements.
        spans: where; set before anything is packed.
    """

    def __init__(self, layer: BucketLayer, owned: Preconditioner) -> None:
        self.layer = layer
        self._curvature = owned.curvatures.get(layer.index)
        numel = layer.weight.numel() + (0 if layer.bias is None else layer.bias.numel())
        self.items = [(owned.owners[layer.index], numel)]
        self.spans: Sequence[Span] = ()

    def pack(self, flat: Tensor) -> None:
        """Write the gradients."""
        weight, bias, (span,) = self.layer.weight, self.layer.bias, self.spans
        middle = span.start + weight.numel()
        self._weight = flat[span.start : middle].view(weight.shape)
        self._bias = None if bias is None else flat[middle : span.stop].view(bias.shape)
        self._weight.copy_(weight)
        if self._bias is not None and bias is not None:
            self._bias.copy_(bias)

    def needs_solver(self, now: HyperNow) -> bool:
        """Tell whether this rank, the owner, makes a solver now, if there are factors."""
        # Not to send plain gradients for a whole period where the first factors were not finite.
        return self._curvature is not None and (now.inverts or self._curvature.solver is None)

    def work(self, now: HyperNow) -> Tensor | None:
        """Precondition the mean, if this rank is the owner; return the layer's term of the KL clip's sum, if any."""
        curvature, layer = self._curvature, self.layer
        if curvature is None:
            return None
        if now.inverts or curvature.lacks_solver:
            curvature.invert(now.damping)
        matrix = gradient_matrix(layer.shape, self._weight, self._bias)
        preconditioned = matrix
        if curvature.solver is not None:
            # With a bias it is a copy already, see [Note: copies before products] in `factors`.
            preconditioned = curvature.solver.precondition(matrix if layer.shape.has_bias else matrix.clone())
        term = None
        if now.kl_clip is not None:  # now, since the direction is written over the gradient
            term = self._kl_term(preconditioned * matrix.to(preconditioned.dtype))
        if curvature.solver is not None:
            split_gradient(layer.shape, preconditioned, self._weight, self._bias)
        return term

    def bring_back(self, scale: Tensor | None) -> None:
        """Write the direction, times ``scale``, to DDP's bucket; None for 1."""
        for source, target in ((self._weight, self.layer.weight), (self._bias, self.layer.bias)):
            if source is None or target is None:
                continue
            if scale is None:
                target.copy_(source)
            else:
                torch.mul(source, scale, out=target)
        if self.layer.whole is not None:
            self.layer.whole.open()

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
        bits: by layer, where those of its direction are noted, see [Note: equal bits] in `journeys`.
    """

    def __init__(
        self, layer: BucketLayer, solver: SpreadSolver, owned: Preconditioner, bits: dict[int, Tensor]
    ) -> None:
        self.layer, self._solver, self._bits = layer, solver, bits
        self._rank = owned.setup.rank
        self._rows = rows_of(layer.shape, owned.setup.world_size)
        self._width = sides(layer.shape)[1]
        self.items = [(rank, rows.numel * self._width) for rank, rows in enumerate(self._rows)]
        self.spans: Sequence[Span] = ()

    def pack(self, flat: Tensor) -> None:
        """Write each rank's rows of T ∇."""
        self._parts = [flat[span.start : span.stop].view(-1, self._width) for span in self.spans]
        matrix = gradient_matrix(self.layer.shape, self.layer.weight, self.layer.bias)[0]
        for rows, part in zip(self._rows, self._parts, strict=True):
            self._solver.before(matrix, rows, part)

    def needs_solver(self, now: HyperNow) -> bool:
        """Tell that all ranks have it."""
        return False

    def work(self, now: HyperNow) -> Tensor | None:
        """Precondition this rank's rows; return their term of the KL clip's sum, if any."""
        own = self._parts[self._rank]
        # See [Note: copies before products] in `factors`.
        turned = own.to(self._solver.right.dtype, copy=True)
        made = turned @ self._solver.right
        own.copy_(made)
        if now.kl_clip is None:
            return None
        return (made * turned).sum(dtype=torch.float64) * self.layer.lr**2

    def bring_back(self, scale: Tensor | None) -> None:
        """Make the direction of all ranks' rows, times ``scale``, and write it to DDP's bucket; None for 1."""
        direction = self._solver.after(self._parts)
        if scale is not None:
            direction *= scale
        self._bits[self.layer.index] = _bits_of(direction)
        split_gradient(self.layer.shape, direction.unsqueeze(0), self.layer.weight, self.layer.bias)
        if self.layer.whole is not None:
            self.layer.whole.open()


def _bits_of(direction: Tensor) -> Tensor:
    """Return the sum of a direction's bits as whole numbers; 0 where it is not finite: no NaN is like another."""
    flat = direction if direction.is_contiguous() else direction.mT
    bits = flat.view(torch.int64 if flat.itemsize == 8 else torch.int32).sum(dtype=torch.int64)
    return bits * flat.isfinite().all()

"""One backward pass under K-FAC: hyper-parameters, packed buckets, and gates between journeys.

Each bucket's journey itself is `precondition` in `crossover_ddp.kfac_hooks`.

[Note: two routes of a layer] Most layers travel to their owner, which preconditions them. These are
`WholeLayer` objects. If all ranks have a layer's solver, each rank preconditions some of the
layer's rows. Such a layer is a `SpreadLayer`, see [Note: spread layers] in `spread`. Both classes
have the same three methods. `pack` runs on the hook's thread, `precondition` runs between the
reduce-scatter and the all-gather, and `unpack` runs at the end of the bucket's journey.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from crossover_ddp._ddp.contents import Content, Run, part_of
from crossover_ddp._ddp.layout import Span
from crossover_ddp._engine.journeys import Gate
from crossover_ddp._engine.links import Link
from crossover_ddp._owners.packing import Item, packing

from .curvature import OwnedLayer
from .factor_traffic import Factor
from .factors import gradient_matrix, split_gradient
from .layers import LayerShape
from .spread import SpreadSolver, rows_of, sides, spread_numel

Hyperparameter = float | Callable[[int], float]
"""A number, or a function that maps a step to a number."""


class StepHyperparameters(NamedTuple):
    """The values of the `Hyperparameters` in one step, and the work that is due in it."""

    damping: float
    decay: float
    kl_clip: float | None
    factor_steps: int
    inverse_steps: int
    # Whether this step's factors enter the running means.
    takes_factors: bool
    # Whether new solvers are computed in this step.
    inverts: bool


class Hyperparameters(NamedTuple):
    """The hyper-parameters. Each is a number or a function of the step."""

    damping: Hyperparameter
    factor_decay: Hyperparameter
    kl_clip: Hyperparameter | None
    factor_update_steps: int | Callable[[int], int]
    inv_update_steps: int | Callable[[int], int]

    def at(self, step: int) -> StepHyperparameters:
        """Return the values in ``step``. Raise ``ValueError`` if a value is out of range."""
        given: list[Any] = [value(step) if callable(value) else value for value in self]
        damping, decay, kl_clip, factor_steps, inverse_steps = given
        periods = (("factor_update_steps", factor_steps), ("inv_update_steps", inverse_steps))
        for name, period in periods:
            if not isinstance(period, int) or period < 1:
                raise ValueError(
                    f"expected a whole number of steps, 1 or more, got {name}={period!r}; "
                    "1 means every step"
                )
        if not 0 < damping < math.inf:
            raise ValueError(f"expected damping > 0, got damping={damping}; 0.001 is usual")
        if not 0 <= decay < 1:
            raise ValueError(
                f"expected 0 <= factor_decay < 1, got factor_decay={decay}; 0.95 is usual"
            )
        if kl_clip is not None and not kl_clip > 0:
            raise ValueError(f"expected kl_clip > 0, got kl_clip={kl_clip}; pass None for no clip")
        takes_factors = step % factor_steps == 0
        inverts = step % inverse_steps == 0
        return StepHyperparameters(
            damping, decay, kl_clip, factor_steps, inverse_steps, takes_factors, inverts
        )

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self._asdict().items())


class CountdownLatch(Gate):
    """A gate that opens when `count_down` has been called for each bucket and the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        # One count belongs to the backward pass itself, so that the latch cannot open between two
        # buckets. `Step.end` counts it down.
        self._remaining = 1

    def expect_one_more(self) -> None:
        with self._lock:
            self._remaining += 1

    def count_down(self) -> None:
        with self._lock:
            self._remaining -= 1
            is_last = self._remaining <= 0
        if is_last:
            self.open()


@dataclass(eq=False)
class Step:
    """One backward pass: the data that its buckets share, and the gates of their journeys."""

    now: StepHyperparameters
    # Learning rates by the parameters' ids. Empty if there is no KL clip.
    rates: Mapping[int, float]
    loss_scale: float
    device: torch.device
    # The gradients that DDP has delivered so far for treated layers, by the parameters' ids.
    gradients: dict[int, Tensor] = field(default_factory=dict)
    # For each layer whose gradients come in two buckets, by index: opened when both gradients are
    # written. The journey of the first bucket awaits the gate, and the journey of the last bucket
    # opens it.
    layer_written: dict[int, Gate] = field(default_factory=dict)
    # For each layer: the factors to send behind the gradients, see [Note: late factors].
    late_factors: list[list[Factor]] = field(default_factory=list)
    # This rank's terms in the KL clip's sum, by index of the layer. They are added in the order of
    # the layers, so that the rounding does not depend on the order of the buckets.
    kl_terms: dict[int, Tensor] = field(default_factory=dict)
    # Opens when this rank has done its share of the preconditioning in all buckets.
    all_preconditioned: CountdownLatch = field(default_factory=CountdownLatch)
    # Opens when the results of all buckets are in DDP's buffers.
    all_written: CountdownLatch = field(default_factory=CountdownLatch)
    # Opened when `scale` is known.
    scale_known: Gate = field(default_factory=Gate)
    # All directions are multiplied by this scale. None leaves them unchanged.
    scale: Tensor | None = None
    # Whether a bucket was refused. Nothing more is written then.
    is_refused: bool = False

    def end(self) -> None:
        """Expect no more buckets. It is safe to call this more than once."""
        self.all_preconditioned.count_down()
        self.all_written.count_down()

    def refuse(self) -> None:
        """Release all journeys that wait for a bucket, since it will not come."""
        self.is_refused = True
        self.all_preconditioned.open()
        self.scale_known.open()
        for gate in self.layer_written.values():
            gate.open()

    async def agree_on_scale(self, link: Link) -> None:
        """Compute the KL clip's scale from all ranks' terms, and resume before the other journeys.

        The journey of the last bucket calls this. The other buckets' journeys wait at
        `scale_known`.
        """
        if not self.is_refused and self.now.kl_clip is not None:
            await self._sum_kl_terms(link, self.now.kl_clip)
        # Open the gate, and resume before the journeys that wait at it.
        await self.scale_known.passed_first()

    async def _sum_kl_terms(self, link: Link, kl_clip: float) -> None:
        if self.kl_terms:
            terms = [term for _, term in sorted(self.kl_terms.items())]
            own = torch.stack(terms).sum()
        else:
            own = torch.zeros((), dtype=torch.float64, device=self.device)
        sums = own.new_empty(link.size)
        counts = [1] * link.size
        # Each rank sends its one number to all others.
        await link.all_to_all(own.repeat(link.size), counts, sums, counts)
        sums[link.rank] = own
        # The sums are added in the order of ranks, so that all ranks compute the same scale. If all
        # gradients are zero, the scale is min(1, inf).
        total = sums.sum().abs() / self.loss_scale**2
        self.scale = (kl_clip / total).sqrt().clamp(max=1.0)


@dataclass(eq=False)
class BucketLayer:
    """A layer whose last gradient came in this bucket."""

    owned: OwnedLayer
    # The gradients of the weight and, if there is one, of the bias. They are views of DDP's
    # buckets.
    gradients: list[Tensor]
    lr: float
    bias_lr: float
    # Opened when the layer is written. None unless an earlier bucket holds a part of the layer.
    written: Gate | None

    @property
    def shape(self) -> LayerShape:
        return self.owned.layer.shape

    def needs_solver(self, now: StepHyperparameters) -> bool:
        """Return whether this rank owns the layer and should now compute a solver, given factors.

        The first solver may be computed in any step. Otherwise, if the first factors were not
        finite, the layer would send plain gradients until the next step in which solvers are due.
        """
        curvature = self.owned.curvature
        return curvature is not None and (now.inverts or curvature.solver is None)


class WholeLayer(BucketLayer):
    """A layer that travels as a whole to its owner, which preconditions it."""

    def pieces(self, size: int) -> list[tuple[int, int]]:
        """Return (rank, number of elements) for each piece of the layer that travels.

        ``size`` is the number of ranks.
        """
        return [(self.owned.owner, sum(each.numel() for each in self.gradients))]

    def pack(self, flat: Tensor, spans: Sequence[Span]) -> None:
        """Copy the gradients to ``flat``. ``spans`` has one span for each piece from `pieces`."""
        (self.span,) = spans
        parts = part_of(flat, self.span).split([each.numel() for each in self.gradients])
        self._mean = [
            part.view(each.shape) for part, each in zip(parts, self.gradients, strict=True)
        ]
        for part, gradient in zip(self._mean, self.gradients, strict=True):
            part.copy_(gradient)

    def precondition(self, now: StepHyperparameters, rank: int) -> Tensor | None:
        """Precondition the mean gradient in place if this rank is the owner.

        Return the layer's term in the KL clip's sum. Return None if there is no clip, or if another
        rank is the owner.
        """
        curvature = self.owned.curvature
        if curvature is None:
            return None
        if self.needs_solver(now):
            curvature.invert(now.damping)
        solver = curvature.solver
        matrix = gradient_matrix(self.shape, *self._mean)
        preconditioned = matrix
        if solver is not None:
            # With a bias the matrix is already a copy, see [Note: copies before products] in
            # `factors`.
            preconditioned = solver.precondition(matrix if self.shape.has_bias else matrix.clone())
        term = None
        # This comes before `split_gradient` below, which overwrites the gradient with the
        # direction.
        if now.kl_clip is not None:
            term = self._kl_term(preconditioned * matrix.to(preconditioned.dtype))
        if solver is not None:
            split_gradient(preconditioned, *self._mean)
        return term

    def unpack(self, scale: Tensor | None) -> None:
        """Write the direction, times ``scale``, to DDP's bucket. None means a scale of 1."""
        for source, target in zip(self._mean, self.gradients, strict=True):
            if scale is None:
                target.copy_(source)
            else:
                torch.mul(source, scale, out=target)

    def _kl_term(self, products: Tensor) -> Tensor:
        """Return the sum of lr²·V·∇ over the layer.

        ``products`` is V·∇ elementwise, [groups, g, a], with the bias, if any, in the last column.
        """
        if self.bias_lr == self.lr:
            return products.sum(dtype=torch.float64) * self.lr**2
        weight = products[..., :-1].sum(dtype=torch.float64)
        bias = products[..., -1].sum(dtype=torch.float64)
        return weight * self.lr**2 + bias * self.bias_lr**2


class SpreadLayer(BucketLayer):
    """A layer whose rows are divided among all ranks. Each rank preconditions its own rows.

    The class has the same methods as `WholeLayer`.
    """

    @property
    def solver(self) -> SpreadSolver:
        assert self.owned.solver is not None
        return self.owned.solver

    def pieces(self, size: int) -> list[tuple[int, int]]:
        """Return (rank, number of elements) for each rank's rows, like `WholeLayer.pieces`."""
        self._rows = rows_of(self.shape, size)
        self._width = sides(self.shape)[1]
        return [(rank, rows.numel * self._width) for rank, rows in enumerate(self._rows)]

    def pack(self, flat: Tensor, spans: Sequence[Span]) -> None:
        """Compute T ∇ from this rank's own gradient, and write each rank's rows to its span."""
        self._parts = [part_of(flat, span).view(-1, self._width) for span in spans]
        matrix = gradient_matrix(self.shape, *self.gradients)[0]
        for rows, part in zip(self._rows, self._parts, strict=True):
            self.solver.before(matrix, rows, part)

    def precondition(self, now: StepHyperparameters, rank: int) -> Tensor | None:
        """Precondition this rank's rows in place.

        Return this rank's term in the KL clip's sum, or None if there is no clip.
        """
        own = self._parts[rank]
        # See [Note: copies before products] in `factors`.
        mean = own.to(self.solver.right.dtype, copy=True)
        preconditioned = mean @ self.solver.right
        own.copy_(preconditioned)
        if now.kl_clip is None:
            return None
        return (preconditioned * mean).sum(dtype=torch.float64) * self.lr**2

    def unpack(self, scale: Tensor | None) -> None:
        """Compute the direction from all rows, and write it, times ``scale``, to DDP's bucket."""
        direction = self.solver.after(self._parts)
        if scale is not None:
            direction *= scale
        split_gradient(direction.unsqueeze(0), *self.gradients)


@dataclass(eq=False)
class PackedBucket:
    """The flat tensor that travels in place of a bucket. It has the same gradients, sorted by rank.

    A rank's part begins with the layers that it owns and its rows of the spread layers. They are
    followed by the rank's share of the parameters that pass through.
    """

    # The bucket's index, flat buffer and contents.
    number: int
    buffer: Tensor
    contents: Sequence[Content]
    # The layers that the bucket completes.
    layers: Sequence[WholeLayer | SpreadLayer]
    # The spans of `buffer` that pass through: they become plain means and are not preconditioned.
    passing: tuple[Span, ...]
    rank: int
    size: int
    # For each bucket, by index: the tensor that travelled for it in the last step, for reuse.
    free: dict[int, Tensor]
    # Opened when all factors sent so far have been added to the running means.
    factors_added: Gate
    # One gate for each layer that a later bucket completes. It is opened when the layer is written.
    completed_later: Sequence[Gate]

    def __post_init__(self) -> None:
        pieces = [layer.pieces(self.size) for layer in self.layers]
        items = [Item(rank, numel, numel) for of_layer in pieces for rank, numel in of_layer]
        plan = packing(self.size, tuple(items), self.passing)
        self.layout = plan.there
        self._passing = plan.passing
        self.flat = self._tensor_of(sum(plan.there))
        places = iter(plan.items)
        with self._exact():
            for layer, of_layer in zip(self.layers, pieces, strict=True):
                layer.pack(self.flat, [next(places).there for _ in of_layer])
        for span, place in self._passing:
            part_of(self.flat, place.there).copy_(part_of(self.buffer, span))

    def _tensor_of(self, numel: int) -> Tensor:
        """Return the tensor that this bucket used in the last step if it fits, else a new one."""
        buffer = self.buffer
        used = self.free.pop(self.number, None)
        if used is not None:
            wanted = (numel, buffer.dtype, buffer.device)
            if (used.numel(), used.dtype, used.device) == wanted:
                return used
        return buffer.new_empty(numel)

    async def share_solvers(self, link: Link, *, renew: bool) -> None:
        """Copy the solvers of spread layers from their owners to all ranks.

        With ``renew``, this includes all spread layers in the bucket. Otherwise it includes only
        layers that have no solver yet.
        """
        spread = [each.owned for each in self.layers if each.owned.cost.spread]
        new = [each for each in spread if renew or each.solver is None]
        if not new:
            return
        new.sort(key=lambda each: each.owner)
        numels = [spread_numel(each.layer.shape) for each in new]
        counts = [0] * link.size
        for each, numel in zip(new, numels, strict=True):
            counts[each.owner] += numel
        flat = self.flat.new_empty(sum(counts))
        parts = flat.split(numels)
        for each, part in zip(new, parts, strict=True):
            if each.curvature is not None:
                own = each.curvature.spread()
                if own is None:
                    part.zero_()
                else:
                    own.pack(part)
        # All ranks wait for the owners here: no rank can use a solver before it has arrived.
        await link.all_gather(flat, counts)
        for each, part in zip(new, parts, strict=True):
            own = None if each.curvature is None else each.curvature.spread()
            # The owner keeps its own tensors, unless they were rounded to another dtype on the way.
            if own is not None and own.root.dtype == flat.dtype:
                each.solver = own
            else:
                each.solver = SpreadSolver.unpack(part, each.layer.shape)

    def precondition(
        self, layer: WholeLayer | SpreadLayer, now: StepHyperparameters
    ) -> Tensor | None:
        """Precondition this rank's part of a layer, and return its term in the KL clip's sum."""
        with self._exact():
            return layer.precondition(now, self.rank)

    def unpack(self, scale: Tensor | None) -> None:
        """Write the results to DDP's buckets.

        Directions are multiplied by ``scale`` unless it is None.
        """
        with self._exact():
            for layer in self.layers:
                layer.unpack(scale)
                if layer.written is not None:
                    layer.written.open()
        for span, place in self._passing:
            part_of(self.buffer, span).copy_(part_of(self.flat, place.there))

    def _exact(self) -> torch.autocast:
        # Autocast would compute directions in half precision. It may be on in the thread that calls
        # backward(), or in the forward that resumes a journey.
        return torch.autocast(self.flat.device.type, enabled=False)

    def runs(self) -> list[Run]:
        """Return the runs that tell a codec where each parameter lies in `flat`."""
        found = []
        for each in self.layers:
            assert isinstance(each, WholeLayer)
            start = each.span.start
            for parameter in each.owned.layer.parameters.values():
                found.append(Run(parameter, 0, Span(start, start + parameter.numel())))
                start += parameter.numel()
        for span, place in self._passing:
            moved = place.there.start - span.start
            for passed, _, own in self.contents:
                begin = max(own.start, span.start)
                stop = min(own.stop, span.stop)
                if begin < stop:
                    to = Span(moved + begin, moved + stop)
                    found.append(Run(passed, begin - own.start, to))
        return found

"""The gradients of K-FAC: steps, and the buckets that are packed for their journey.

`Preconditioner` works on the hook's thread: it prepares each `Step`, and packs each bucket into a
`PackedBucket`. The bucket's journey is `precondition` in `crossover_ddp.kfac_hooks`.

[Note: two routes of a layer] Most layers travel to their owner, which preconditions them. These are
`WholeLayer` objects. If all ranks have a layer's solver, each rank preconditions some of the
layer's rows. Such a layer is a `SpreadLayer`, see [Note: spread layers]. Both classes have the same
three methods. `pack` runs on the hook's thread, `precondition` runs between the reduce-scatter and
the all-gather, and `unpack` runs at the end of the bucket's journey.

[Note: directions that wait] After an exchange, the gradient of a layer's weight holds its
direction. If a backward pass added to it, in ``no_sync()`` or not, the owner would precondition the
sum, and thus the direction a second time. Therefore a hook inspects each gradient just before a
pass adds to it: by then the gradient must be None or zero. The gradient's version does not show
this: ``p.grad.data.zero_()`` does not change the version, but clipping does.
"""

import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from crossover_ddp._ddp.layout import Span
from crossover_ddp._engine.buckets import Bucket, Content, Run, contents_of, copy_parts, part_of
from crossover_ddp._engine.journeys import Gate
from crossover_ddp._engine.links import Link
from crossover_ddp._engine.observe import Meter
from crossover_ddp._owners.packing import Item, packing
from crossover_ddp._system import environment
from crossover_ddp.errors import UnsupportedConfigurationError

from .curvature import (
    SOLVERS,
    Curvature,
    OwnedLayer,
    SpreadSolver,
    WeightSharing,
    gradient_matrix,
    rows_of,
    sides,
    split_gradient,
    spread_numel,
)
from .factors import FactorCapture, FactorTraffic, weak_hook
from .layers import Layer, LayerShape
from .placement import LayerCost, place

_REMEDY: Final = (
    "call optimizer.zero_grad() between two exchanges, and to accumulate gradients do all "
    "backward passes of a step but the last one in model.no_sync(), or add up their losses"
)

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
            # With a bias the matrix is already a copy, see [Note: copies before products].
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
        # See [Note: copies before products].
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
    # The number of ranks.
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
        slots = iter(plan.items)
        with self.exact():
            for layer, of_layer in zip(self.layers, pieces, strict=True):
                layer.pack(self.flat, [next(slots).there for _ in of_layer])
        copy_parts(self.buffer, self.flat, [(span, slot.there) for span, slot in self._passing])

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
        items = [Item(each.owner, 0, spread_numel(each.layer.shape)) for each in new]
        plan = packing(link.size, tuple(items))
        flat = self.flat.new_empty(sum(plan.back))
        parts = [part_of(flat, slot.back) for slot in plan.items]
        for each, part in zip(new, parts, strict=True):
            if each.curvature is not None:
                own = each.curvature.spread()
                if own is None:
                    part.zero_()
                else:
                    own.pack(part)
        # All ranks wait for the owners here: no rank can use a solver before it has arrived.
        await link.all_gather(flat, plan.back)
        for each, part in zip(new, parts, strict=True):
            own = None if each.curvature is None else each.curvature.spread()
            # The owner keeps its own tensors, unless they were rounded to another dtype on the way.
            if own is not None and own.root.dtype == flat.dtype:
                each.solver = own
            else:
                each.solver = SpreadSolver.unpack(part, each.layer.shape)

    def unpack(self, scale: Tensor | None) -> None:
        """Write the results to DDP's buckets.

        Directions are multiplied by ``scale`` unless it is None.
        """
        with self.exact():
            for layer in self.layers:
                layer.unpack(scale)
                if layer.written is not None:
                    layer.written.open()
        copy_parts(self.flat, self.buffer, [(slot.there, span) for span, slot in self._passing])

    def exact(self) -> torch.autocast:
        """Return a context in which directions are computed in full precision.

        Autocast may be on in the thread that calls backward(), or in the forward that resumes a
        journey.
        """
        return torch.autocast(self.flat.device.type, enabled=False)

    def runs(self) -> list[Run]:
        """Return the places of all parameters in `flat`, for a codec."""
        found = []
        for each in self.layers:
            assert isinstance(each, WholeLayer)
            start = each.span.start
            for parameter in each.owned.layer.parameters.values():
                found.append(Run(parameter, 0, Span(start, start + parameter.numel())))
                start += parameter.numel()
        for span, slot in self._passing:
            moved = slot.there.start - span.start
            for passed, _, own in self.contents:
                begin = max(own.start, span.start)
                stop = min(own.stop, span.stop)
                if begin < stop:
                    to = Span(moved + begin, moved + stop)
                    found.append(Run(passed, begin - own.start, to))
        return found


class WaitingDirections:
    """Tracks the weights whose gradients hold directions, see [Note: directions that wait].

    Args:
        layers: the layers that K-FAC treats. All layer indices refer to this list.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._layers = layers
        # For each layer whose gradient held a direction after the last exchange: None until a
        # backward pass adds to it, then whether any of the direction was left at that time. The
        # values are tensors so that the host need not wait for the device.
        self._added_to: dict[int, Tensor | None] = {}
        # The same for a pass that may be about to add. It may also add nothing, like
        # `torch.autograd.grad`.
        self._about_to_add: dict[int, Tensor] = {}
        for index, layer in enumerate(layers):
            layer.weight.register_hook(weak_hook(self, "_before_adding", index))
            layer.weight.register_post_accumulate_grad_hook(weak_hook(self, "_added", index))

    def wait(self, layers: Iterable[int]) -> None:
        """Note that the gradients of these layers hold directions from now on."""
        self._added_to.update((index, None) for index in layers)

    def check(self, layers: Iterable[int]) -> None:
        """Refuse a bucket if a backward pass has added to the direction of any of these layers."""
        for index in layers:
            added = self._added_to.get(index)
            if added is not None and bool(added):
                weight = next(iter(self._layers[index].parameters))
                raise UnsupportedConfigurationError(
                    "expected gradients that were cleared since the last exchange, got a second "
                    f"backward() added to the K-FAC direction of {weight}, which would be "
                    f"preconditioned twice; {_REMEDY}"
                )

    def _before_adding(self, index: int, _: Tensor) -> None:
        if index not in self._added_to:
            return
        gradient = self._layers[index].weight.grad
        if gradient is None:
            del self._added_to[index]
            return
        before = self._added_to[index]
        left = gradient.detach().any()
        # A gradient that was cleared once no longer holds a direction, only the sum of later
        # passes.
        self._about_to_add[index] = left if before is None else before & left

    def _added(self, index: int, _: Tensor) -> None:
        if index in self._added_to:
            self._added_to[index] = self._about_to_add.pop(index)


def learning_rates(
    optimizer: Optimizer | Sequence[Optimizer] | None, layers: Sequence[Layer]
) -> dict[int, float]:
    """Return the current learning rates by the parameters' ids.

    On failure: ``UnsupportedConfigurationError`` if a parameter of the layers is in none of the
    optimizers.
    """
    groups = [group for each in listed(optimizer) for group in each.param_groups]
    rates = {id(parameter): float(group["lr"]) for group in groups for parameter in group["params"]}
    missing = [
        name for layer in layers for name, each in layer.parameters.items() if id(each) not in rates
    ]
    if missing:
        raise UnsupportedConfigurationError(
            "expected an optimizer that holds all parameters of K-FAC's layers, got none for "
            f"{', '.join(missing[:3])} ({len(missing)} in all), whose learning rates the KL clip "
            "needs; pass the optimizer that updates them, several as a sequence, or name the "
            "layers in skip=, or pass kl_clip=None"
        )
    return rates


def listed(optimizer: Optimizer | Sequence[Optimizer] | None) -> list[Optimizer]:
    """Return the optimizers as a list. There may be one, several or none."""
    found: list[Any] = [optimizer] if hasattr(optimizer, "param_groups") else [*(optimizer or ())]
    for each in found:
        if not hasattr(each, "param_groups"):
            raise ValueError(
                "expected an optimizer or a sequence of them, got "
                f"optimizer={type(each).__name__}; pass torch.optim.Optimizer objects"
            )
    return found


@dataclass(eq=False, kw_only=True)
class Preconditioner:
    """Packs each bucket, counts steps, and holds the layers that this rank owns."""

    # The model inside of DDP and torch.compile. The reference is weak because DDP holds the state
    # where Python's garbage collector does not see it.
    model: weakref.ref[nn.Module]
    # The layers that K-FAC treats, and their costs in the same order.
    treated: Sequence[Layer]
    costs: Sequence[LayerCost]
    hyperparameters: Hyperparameters
    group: dist.ProcessGroup
    solver: Literal["inverse", "eigen"]
    # Whether the damping is divided between both factors according to their traces.
    pi: bool
    sharing: WeightSharing
    accumulated: Literal["mean", "sum"]
    # Whether owners use only their own factors, so that no factors travel.
    local: bool
    loss_scale: Callable[[], float]
    # Returns the learning rates by the parameters' ids.
    rates: Callable[[], dict[int, float]]

    def __post_init__(self) -> None:
        self.rank = self.group.rank()
        self.world_size = self.group.size()
        # The number of steps between two solvers, as of step 0. The choice of owners depends on it.
        self.inverse_steps = self.hyperparameters.at(0).inverse_steps
        self._waiting = WaitingDirections(self.treated)
        # The index of each parameter's layer, by the parameter's id.
        self._layer_of: dict[int, int] = {}
        for index, layer in enumerate(self.treated):
            for parameter in layer.parameters.values():
                self._layer_of[id(parameter)] = index
        self.begin(place(self.costs, self.world_size, self.inverse_steps))

    def begin(self, owners: Sequence[int], steps: int = 0) -> None:
        """Reset to the state after ``steps`` steps, with no factors or solvers yet.

        ``owners[i]`` is the rank that owns layer ``i``.
        """
        # The number of backward passes whose gradients have been exchanged.
        self.steps = steps
        # This rank's part of each layer.
        self.layers: list[OwnedLayer] = []
        of_layers = zip(self.treated, self.costs, owners, strict=True)
        for index, (layer, cost, owner) in enumerate(of_layers):
            curvature = self.curvature(layer) if owner == self.rank else None
            self.layers.append(OwnedLayer(index, layer, cost, owner, curvature))
        model = self.model()
        assert model is not None
        self.capture = FactorCapture(
            self.treated,
            model=model,
            sharing=self.sharing,
            accumulated=self.accumulated,
            loss_scale=self.loss_scale,
            only=[each.index for each in self.layers if each.curvature] if self.local else None,
            ranks=1 if self.local else self.world_size,
        )
        self.traffic = FactorTraffic(self.layers, self.capture, self.group, self.local)
        # For each bucket, by index: the tensor that travelled for it in the last step, for reuse.
        self.free: dict[int, Tensor] = {}
        # The backward pass under way. None before its first bucket is packed.
        self._step: Step | None = None
        # Whether a bucket in the backward pass under way was refused, perhaps before `_step` was
        # created.
        self._has_refused = False
        # Whether to take no factors and to compute no solvers.
        self._is_closed = environment.is_set(environment.DISABLE)
        self._prepare_step()

    def curvature(self, layer: Layer) -> Curvature:
        """Create the state that a layer's owner keeps, without factors or a solver."""
        start: Any = "identity" if self.sharing == "kfac-pytorch" else "batch"
        return Curvature(layer.shape, SOLVERS[self.solver], self.pi, start)

    @property
    def own(self) -> dict[str, Curvature]:
        """The curvatures of the layers that this rank owns, by the layer's name."""
        return {
            each.layer.name: each.curvature for each in self.layers if each.curvature is not None
        }

    def close(self) -> None:
        """Take no more factors and compute no more solvers from now on."""
        self._is_closed = True
        self.traffic.late.clear()
        self.capture.close()

    # --- a step -----------------------------------------------------------------------------------

    def _prepare_step(self, after: Gate | None = None) -> None:
        """Prepare the next step: switch the capture on or off, and send late factors.

        ``after`` is the gate of the previous step's gradients. The factors leave when it is open.
        """
        # The next backward pass raises it, if there is one.
        self._error: Exception | None = None
        try:
            now = self._now()
        except Exception as error:
            # A schedule may end with the last step, so this may never be raised.
            self._error = error
            self.capture.active = False
            return
        self.capture.active = now.takes_factors
        # The next step's factors and solvers build on all factors taken so far.
        self.traffic.leave(after, all_groups=now.takes_factors or now.inverts)

    def _now(self) -> StepHyperparameters:
        now = self.hyperparameters.at(self.steps)
        if self._is_closed:
            return now._replace(takes_factors=False, inverts=False)
        return now

    @torch.no_grad()
    def enter(self, bucket: dist.GradBucket, meter: Meter) -> None:
        """Prepare a backward pass if ``bucket`` is its first. ``meter`` counts factor traffic."""
        if bucket.index():
            return
        self.traffic.begin_pass(meter)
        if self._step is not None:
            # The previous backward pass ended before its last bucket.
            self._step.refuse()
        self._step = None
        self._has_refused = False
        self.capture.begin_exchange()

    def refuse(self, bucket: dist.GradBucket) -> None:
        """Note that ``bucket`` will not be exchanged, so that no journey waits for it."""
        self._has_refused = True
        if self._step is not None:
            self._step.refuse()
        if bucket.is_last():
            if self._step is not None:
                self._step.end()
            self.end()

    def end(self) -> None:
        """Count the step whose last bucket is under way or refused, and prepare the next step."""
        ended = self._step
        after = None
        self._step = None
        if ended is not None:
            after = ended.all_written
            self._waiting.wait({self._layer_of[parameter] for parameter in ended.gradients})
            self.traffic.end_pass(ended.now.decay, ended.now.factor_steps)
        self._has_refused = False
        self.steps += 1
        self.capture.begin_step()
        self._prepare_step(after)

    def _begin(self, device: torch.device) -> Step:
        if self._error is not None:
            raise self._error
        now = self._now()
        rates = {} if now.kl_clip is None else self.rates()
        step = Step(now, rates, self.loss_scale(), device)
        if self._has_refused:
            step.refuse()
        return step

    # --- a bucket ---------------------------------------------------------------------------------

    @torch.no_grad()
    def pack(self, bucket: dist.GradBucket) -> PackedBucket:
        """Pack the tensor that travels for ``bucket``, and send the factors of its layers.

        An error that is raised here refuses the bucket.
        """
        # `.data` has a version counter of its own. So user code's writes show in the gradients'
        # counters, and ours do not.
        buffer = bucket.buffer().data
        if self._step is None:
            self._step = self._begin(buffer.device)
        step = self._step
        contents = [
            each._replace(gradient=each.gradient.data) for each in contents_of(bucket, buffer)
        ]
        ids = [id(parameter) for parameter, *_ in contents]
        self._waiting.check([self._layer_of[each] for each in ids if each in self._layer_of])
        layers, passing, completed_later = self._sorted(step, contents)
        if bucket.is_last() and not step.is_refused:
            self._check_complete(step)
        if step.now.takes_factors and layers:
            owned = [layer.owned for layer in layers]
            self.traffic.take(owned, step.now.decay, inverts=step.now.inverts)
        return PackedBucket(
            bucket.index(),
            buffer,
            contents,
            layers,
            passing,
            size=self.world_size,
            free=self.free,
            factors_added=self.traffic.arrived,
            completed_later=completed_later,
        )

    def expect(self, bucket: Bucket, packed: PackedBucket) -> Step:
        """Count a packed bucket whose journey is about to begin, and return its step."""
        step = self._step
        assert step is not None
        step.all_preconditioned.expect_one_more()
        step.all_written.expect_one_more()
        if bucket.last:
            step.end()
        bucket.tensor = packed.flat
        return step

    def _sorted(
        self, step: Step, contents: Sequence[Content]
    ) -> tuple[list[WholeLayer | SpreadLayer], tuple[Span, ...], list[Gate]]:
        """Sort a bucket's contents into layers and spans that pass through.

        Returns:
            The layers that the bucket completes, the spans that pass through, and one gate for each
            layer that a later bucket completes.
        """
        complete = []
        passing = []
        incomplete = set()
        for parameter, gradient, span in contents:
            index = self._layer_of.get(id(parameter))
            if index is None:
                passing.append(span)
                continue
            step.gradients[id(parameter)] = gradient
            incomplete.add(index)
            parameters = self.treated[index].parameters.values()
            if all(id(each) in step.gradients for each in parameters):
                complete.append(self._bucket_layer(step, self.layers[index]))
                incomplete.remove(index)
        gates = []
        # A refused step writes nothing, so these gates would never open.
        if not step.is_refused:
            gates = [step.layer_written.setdefault(index, Gate()) for index in sorted(incomplete)]
        return complete, tuple(passing), gates

    def _bucket_layer(self, step: Step, owned: OwnedLayer) -> WholeLayer | SpreadLayer:
        parameters = owned.layer.parameters.values()
        weight, *bias = [step.gradients[id(each)] for each in parameters]
        # Without a clip there are no rates, and none are needed.
        lr, *of_bias = [step.rates.get(id(each), 0.0) for each in parameters]
        bias_lr = of_bias[0] if of_bias else lr
        # A row may hold weights and a bias, so its term in the clip's sum allows for only one rate.
        is_whole = step.now.inverts or owned.solver is None or bias_lr != lr
        kind = WholeLayer if is_whole else SpreadLayer
        gradients = [weight.mT if owned.layer.shape.transposed else weight, *bias]
        return kind(owned, gradients, lr, bias_lr, step.layer_written.get(owned.index))

    def _check_complete(self, step: Step) -> None:
        """Refuse the last bucket in a backward pass if some of a layer's gradients have not come.

        The layer's other gradients would be exchanged neither as plain gradients nor as a
        direction.
        """
        for layer in self.treated:
            missing = [
                name for name, each in layer.parameters.items() if id(each) not in step.gradients
            ]
            if 0 < len(missing) < len(layer.parameters):
                raise UnsupportedConfigurationError(
                    "expected gradients of all parameters of K-FAC's layers, got none of "
                    f"{missing[0]}, which was frozen since the KFACState was made, or which DDP "
                    "ignores; make the KFACState after that, or name the layer in skip="
                )

"""The journey of a bucket of K-FAC: what travels, when, and who waits for whom.

[Note: who waits for whom] An inversion waits for the factors that left before it, and these for those before them: a
running mean is not commutative. No direction is written before the KL clip is known, for which all of the step's
buckets must have been worked on. A layer whose bias and weight come in two buckets travels with the last of them; the
other one is whole when that has been written. These waits form no circle: factors wait for buckets of former steps
only, owners' work for factors, the clip for the owners' work, buckets for the clip and for later buckets.

[Note: a layer's way] A layer goes to its owner, which preconditions it: `Whole`. Or, if all ranks have its solver, each
rank preconditions some rows of it: `Rows`, see [Note: spread layers] in `spread`. Both do the same in turn: `pack` on
the hook's thread, `work` between the halves, `bring_back` wherever the bucket's way ends.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from crossover_ddp._ddp.contents import Content, Run, part_of
from crossover_ddp._ddp.layout import Span
from crossover_ddp._engine.buckets import Bucket, JourneyTurn
from crossover_ddp._engine.journeys import Gate
from crossover_ddp._engine.links import Link
from crossover_ddp._owners.packing import Item, packing

from .curvature import OwnedLayer
from .factor_traffic import Factor
from .factors import gradient_matrix, split_gradient
from .layers import LayerShape
from .spread import SpreadSolver, rows_of, sides, spread_numel


async def precondition(
    packed: "Packed",
    step: "Step",
    bucket: Bucket,
    link: Link,
    turn: JourneyTurn,
    *,
    solvers_in_turn: bool,
) -> None:
    """Average each layer's gradient at its owner, who preconditions it, and copy the direction to all."""
    if not solvers_in_turn:
        turn.release()
    await bucket.computed()
    await link.reduce_scatter(packed.flat, packed.layout)
    if not solvers_in_turn:
        turn.request()

    await link.compute()
    for layer in packed.layers:
        if layer.needs_solver(step.now):
            await packed.factors
        if (term := packed.work(layer, step.now)) is not None:
            step.terms[layer.owned.index] = term
    step.worked.passes()
    if bucket.last:
        await step.worked
        if (
            bucket.deferred
        ):  # before all gathers; else behind them, or the last one would wait for the others
            await step.agree(link)

    if not bucket.deferred or await bucket.summed():
        if solvers_in_turn:
            turn.release()
            turn.request()
        await link.all_gather(packed.flat, packed.layout)
        await packed.share_solvers(link, anew=step.now.inverts)
        if bucket.last and not bucket.deferred:
            await step.agree(link)
        await step.clip
        for gate in packed.elsewhere:
            await gate
        if not step.is_refused:
            packed.unload(step.scale)
    packed.free[packed.number] = packed.flat
    step.written.passes()
    await turn.acquire()


Hyper = float | Callable[[int], float]


class HyperNow(NamedTuple):
    """The hyper-parameters in one step, as in `Hypers`, and what is due in it."""

    damping: float
    decay: float
    kl_clip: float | None
    factor_steps: int
    inverse_steps: int
    takes_factors: bool
    inverts: bool


class Hypers(NamedTuple):
    """The hyper-parameters, each a number or a function of the step."""

    damping: Hyper
    factor_decay: Hyper
    kl_clip: Hyper | None
    factor_update_steps: int | Callable[[int], int]
    inv_update_steps: int | Callable[[int], int]

    def at(self, step: int) -> HyperNow:
        """Return their values in ``step``; raise ``ValueError`` for one that makes no sense."""
        given: list[Any] = [value(step) if callable(value) else value for value in self]
        damping, decay, kl_clip, every, inverts_every = given
        for name, period in (("factor_update_steps", every), ("inv_update_steps", inverts_every)):
            if not isinstance(period, int) or period < 1:
                raise ValueError(
                    f"expected a whole number of steps, 1 or more, got {name}={period!r}; 1 means every step"
                )
        if not 0 < damping < math.inf:
            raise ValueError(f"expected damping > 0, got damping={damping}; 0.001 is usual")
        if not 0 <= decay < 1:
            raise ValueError(
                f"expected 0 <= factor_decay < 1, got factor_decay={decay}; 0.95 is usual"
            )
        if kl_clip is not None and not kl_clip > 0:
            raise ValueError(f"expected kl_clip > 0, got kl_clip={kl_clip}; pass None for no clip")
        takes, inverts = step % every == 0, step % inverts_every == 0
        return HyperNow(damping, decay, kl_clip, every, inverts_every, takes, inverts)

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self._asdict().items())


class Everyone(Gate):
    """Opened when all who were expected have passed, and nobody else is."""

    def __init__(self) -> None:
        super().__init__()
        self._left = 1  # until `passes` is called for the backward pass itself

    def expect(self) -> None:
        with self._lock:
            self._left += 1

    def passes(self) -> None:
        with self._lock:
            self._left -= 1
            is_last = self._left <= 0
        if is_last:
            self.open()


@dataclass(eq=False)
class Step:
    """One backward pass.

    Args:
        rates: learning rates by the parameters' ids, if there is a clip.
        waiting: gradients of layers that are not complete yet, by the parameters' ids.
        whole: by layer of which a part waits in an earlier bucket: opened when all of it is written.
        taken: factors that leave behind the gradients, by layer.
        terms: of the KL clip's sum, by layer: added in the order of layers, whatever the order of buckets.
        worked: opened when the owners' work on all buckets is done.
        written: opened when all buckets are written.
        clip: opened when ``scale`` is known, by which all directions are scaled; None: by nothing.
        is_refused: whether a bucket was refused: nothing is written any more.
    """

    now: HyperNow
    rates: Mapping[int, float]
    loss_scale: float
    device: torch.device
    waiting: dict[int, Tensor] = field(default_factory=dict)
    whole: dict[int, Gate] = field(default_factory=dict)
    taken: list[list[Factor]] = field(default_factory=list)
    terms: dict[int, Tensor] = field(default_factory=dict)
    worked: Everyone = field(default_factory=Everyone)
    written: Everyone = field(default_factory=Everyone)
    clip: Gate = field(default_factory=Gate)
    scale: Tensor | None = None
    is_refused: bool = False

    def end(self) -> None:
        """Expect no more buckets. May be called again."""
        self.worked.passes()
        self.written.passes()

    def refuse(self) -> None:
        """Let nobody wait for a bucket that does not come."""
        self.is_refused = True
        for gate in (self.worked, self.clip, *self.whole.values()):
            gate.open()

    async def agree(self, link: Link) -> None:
        """Find the scale, from the sums of all ranks' terms, and go on before all that wait for it."""
        if not self.is_refused and self.now.kl_clip is not None:
            await self._sum_up(link, self.now.kl_clip)
        await self.clip.passed_first()

    async def _sum_up(self, link: Link, kl_clip: float) -> None:
        terms = [
            term for _, term in sorted(self.terms.items())
        ]  # rounded alike whatever the buckets
        own = (
            torch.stack(terms).sum()
            if terms
            else torch.zeros((), dtype=torch.float64, device=self.device)
        )
        sums, counts = own.new_empty(link.size), [1] * link.size
        await link.all_to_all(own.repeat(link.size), counts, sums, counts)
        sums[link.rank] = own
        # In the order of ranks, so that all get the same. Where all gradients are zero the scale is min(1, inf).
        total = sums.sum().abs() / self.loss_scale**2
        self.scale = (kl_clip / total).sqrt().clamp(max=1.0)


@dataclass(eq=False)
class BucketLayer:
    """A layer whose gradients DDP's buckets have brought.

    Args:
        gradients: of the weight, and of the bias if it has one, in DDP's buckets.
        whole: to be opened when it is written, if an earlier bucket has a part of it.
    """

    owned: OwnedLayer
    gradients: list[Tensor]
    lr: float
    bias_lr: float
    whole: Gate | None

    @property
    def shape(self) -> LayerShape:
        return self.owned.layer.shape

    def needs_solver(self, now: HyperNow) -> bool:
        """Tell whether this rank, the owner, makes a solver now, if there are factors."""
        # Not to send plain gradients for a whole period where the first factors were not finite.
        curvature = self.owned.curvature
        return curvature is not None and (now.inverts or curvature.solver is None)


class Whole(BucketLayer):
    """A layer that goes to its owner."""

    def items(self, size: int) -> list[tuple[int, int]]:
        """Return what travels between so many ranks: by owner, how many elements."""
        return [(self.owned.owner, sum(each.numel() for each in self.gradients))]

    def pack(self, flat: Tensor, spans: Sequence[Span]) -> None:
        """Copy what travels to its places, one for each of `items`."""
        (self.span,) = spans
        places = part_of(flat, self.span).split([each.numel() for each in self.gradients])
        self._mean = [
            place.view(each.shape) for place, each in zip(places, self.gradients, strict=True)
        ]
        for place, gradient in zip(self._mean, self.gradients, strict=True):
            place.copy_(gradient)

    def work(self, now: HyperNow, rank: int) -> Tensor | None:
        """Precondition the mean, if this rank is the owner; return the layer's term of the KL clip's sum, if any."""
        curvature = self.owned.curvature
        if curvature is None:
            return None
        if self.needs_solver(now):
            curvature.invert(now.damping)
        preconditioned = matrix = gradient_matrix(self.shape, *self._mean)
        if curvature.solver is not None:
            # With a bias it is a copy already, see [Note: copies before products] in `factors`.
            preconditioned = curvature.solver.precondition(
                matrix if self.shape.has_bias else matrix.clone()
            )
        term = None
        if now.kl_clip is not None:  # now, since the direction is written over the gradient
            term = self._kl_term(preconditioned * matrix.to(preconditioned.dtype))
        if curvature.solver is not None:
            split_gradient(preconditioned, *self._mean)
        return term

    def bring_back(self, scale: Tensor | None) -> None:
        """Write the direction, times ``scale``, to DDP's bucket; None for 1."""
        for source, target in zip(self._mean, self.gradients, strict=True):
            if scale is None:
                target.copy_(source)
            else:
                torch.mul(source, scale, out=target)

    def _kl_term(self, terms: Tensor) -> Tensor:
        """Sum up V·∇, [groups, g, a] with the bias in the last column, by the learning rates."""
        if self.bias_lr == self.lr:
            return terms.sum(dtype=torch.float64) * self.lr**2
        weight, bias = (
            terms[..., :-1].sum(dtype=torch.float64),
            terms[..., -1].sum(dtype=torch.float64),
        )
        return weight * self.lr**2 + bias * self.bias_lr**2


class Rows(BucketLayer):
    """A layer of which each rank preconditions some rows; see `Whole`."""

    @property
    def solver(self) -> SpreadSolver:
        assert self.owned.solver is not None
        return self.owned.solver

    def items(self, size: int) -> list[tuple[int, int]]:
        """Return as `Whole.items`: each rank owns its rows."""
        self._rows, self._width = rows_of(self.shape, size), sides(self.shape)[1]
        return [(rank, rows.numel * self._width) for rank, rows in enumerate(self._rows)]

    def pack(self, flat: Tensor, spans: Sequence[Span]) -> None:
        self._parts = [part_of(flat, span).view(-1, self._width) for span in spans]
        matrix = gradient_matrix(self.shape, *self.gradients)[0]
        for rows, part in zip(self._rows, self._parts, strict=True):
            self.solver.before(matrix, rows, part)

    def work(self, now: HyperNow, rank: int) -> Tensor | None:
        """Precondition this rank's rows; return their term of the KL clip's sum, if any."""
        own = self._parts[rank]
        # See [Note: copies before products] in `factors`.
        turned = own.to(self.solver.right.dtype, copy=True)
        made = turned @ self.solver.right
        own.copy_(made)
        if now.kl_clip is None:
            return None
        return (made * turned).sum(dtype=torch.float64) * self.lr**2

    def bring_back(self, scale: Tensor | None) -> None:
        """Make the direction of all ranks' rows, times ``scale``, and write it to DDP's bucket; None for 1."""
        direction = self.solver.after(self._parts)
        if scale is not None:
            direction *= scale
        split_gradient(direction.unsqueeze(0), *self.gradients)


@dataclass(eq=False)
class Packed:
    """What travels in a bucket's place.

    A rank's part begins with the layers that it owns and its rows of those that are spread. Behind that lies its share
    of what passes through.

    Args:
        number, buffer, contents: of the bucket; flat.
        layers: those that the bucket completes.
        passes: spans of ``buffer`` that pass through.
        free: by number of a bucket, memory that has travelled for it before.
        factors: opened when all factors that have left so far are in the running means.
        elsewhere: opened when the layers are written of which the bucket has a part, and a later one the rest.
    """

    number: int
    buffer: Tensor
    contents: Sequence[Content]
    layers: Sequence[Whole | Rows]
    passes: tuple[Span, ...]
    rank: int
    size: int
    free: dict[int, Tensor]
    factors: Gate
    elsewhere: Sequence[Gate]

    def __post_init__(self) -> None:
        items = [layer.items(self.size) for layer in self.layers]
        made = packing(
            self.size,
            tuple([Item(owner, n, n) for each in items for owner, n in each]),
            self.passes,
        )
        self.layout, self._passing = made.there, made.passing
        flat, numel = self.free.pop(self.number, self.buffer[:0]), sum(made.there)
        if (flat.numel(), flat.dtype, flat.device) != (
            numel,
            self.buffer.dtype,
            self.buffer.device,
        ):
            flat = self.buffer.new_empty(numel)
        self.flat = flat
        places = iter(made.items)
        with self._exact():
            for layer, each in zip(self.layers, items, strict=True):
                layer.pack(flat, [next(places).there for _ in each])
        for span, place in self._passing:
            part_of(flat, place.there).copy_(part_of(self.buffer, span))

    async def share_solvers(self, link: Link, *, anew: bool) -> None:
        """Copy solvers of spread layers from their owners to all, those that nobody has yet, or all ``anew``."""
        spread = [each.owned for each in self.layers if each.owned.cost.spread]
        new = sorted(
            [each for each in spread if anew or each.solver is None], key=lambda each: each.owner
        )
        if not new:
            return
        numels, counts = [spread_numel(each.layer.shape) for each in new], [0] * link.size
        for each, numel in zip(new, numels, strict=True):
            counts[each.owner] += numel
        flat = self.flat.new_empty(sum(counts))
        places = list(zip(new, flat.split(numels), strict=True))
        for each, place in places:
            if each.curvature is not None:
                own = each.curvature.spread()
                place.zero_() if own is None else own.pack(place)
        await link.all_gather(flat, counts)
        for each, place in places:
            own = None if each.curvature is None else each.curvature.spread()
            is_same = own is not None and own.root.dtype == flat.dtype  # else as the others have it
            each.solver = own if is_same else SpreadSolver.unpack(place, each.layer.shape)

    def work(self, layer: Whole | Rows, now: HyperNow) -> Tensor | None:
        """Precondition what of a layer is this rank's; return its term of the KL clip's sum, if any."""
        with self._exact():
            return layer.work(now, self.rank)

    def unload(self, scale: Tensor | None) -> None:
        """Write what came back into DDP's buckets, directions times ``scale``; None for 1."""
        with self._exact():
            for layer in self.layers:
                layer.bring_back(scale)
                if layer.whole is not None:
                    layer.whole.open()
        for span, place in self._passing:
            part_of(self.buffer, span).copy_(part_of(self.flat, place.there))

    def _exact(self) -> torch.autocast:
        # A thread that calls backward(), or forward, may have been told to compute in half precision.
        return torch.autocast(self.flat.device.type, enabled=False)

    def runs(self) -> list[Run]:
        """List where parameters travel, for a codec; no layer is spread then."""
        found = []
        for each in self.layers:
            assert isinstance(each, Whole)
            start = each.span.start
            for treated in each.owned.layer.parameters.values():
                found.append(Run(treated, 0, Span(start, start + treated.numel())))
                start += treated.numel()
        for span, place in self._passing:
            moved = place.there.start - span.start
            for parameter, _, own in self.contents:
                begin, stop = max(own.start, span.start), min(own.stop, span.stop)
                if begin < stop:
                    found.append(
                        Run(parameter, begin - own.start, Span(moved + begin, moved + stop))
                    )
        return found

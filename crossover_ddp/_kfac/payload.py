"""One backward pass of K-FAC: what each bucket sends in its place, and what the owners do with it.

[Note: a layer travels with its last bucket] DDP may put a layer's bias into one bucket and its weight into the next.
The owner needs both, so what comes early waits in its bucket until the layer is complete, and travels with the bucket
that completes it. All Futures of a step complete together, hence nobody looks at the early bucket before.

[Note: messages] The KL clip scales all preconditioned gradients by one number made of sums over all layers. Each
rank's sum over its own layers travels at the end of its part of the last bucket, as eight raw bytes; so every rank
scales by the same bits. On steps that take factors each rank tells in the same place how many columns its mini-batch
had of each factor, so that all ranks know what can be sent as columns the next time (see [Note: few columns]).

A layer that is spread goes its own way, see [Note: spread layers].
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor

from crossover_ddp._exchange.layout import Span
from crossover_ddp._exchange.transfer import Cargo, Freight
from crossover_ddp._system.worker import Worker

from .columns import LayerShape, triangle_numel
from .curvature import Curvature
from .factor_sums import Room
from .factors import (
    BatchFactor,
    Gram,
    Solver,
    gradient_matrix,
    pack_triangle,
    precondition,
    split_gradient,
    unpack_triangle,
)
from .manifest import Load, Manifest, manifest
from .row_product import RowProduct, goes_by_rows
from .spread import SpreadRows, SpreadSolver, rows_of, sides, spread_numel

_NO_ROOM: Final = Room()


@dataclass(frozen=True)
class StepPlan:
    """What all ranks do in one step; made of the step's number and the hyper-parameters of that moment.

    Args:
        rank, world_size: of this process.
        owners: of each layer.
        damping, decay, kl_clip: see ``KFACState``; kl_clip None scales nothing.
        scale: of the loss in this backward pass, undone in the KL clip.
        takes_factors: whether the running factors are updated by what is in the buckets.
        factors_trail: whether they are updated by what follows later; see [Note: late factors] in ``late``.
        inverts: whether new solvers are made.
        factors_travel: whether factors are averaged over the ranks; otherwise the owner takes its own.
        inverter: the thread that makes solvers while the old ones serve on; None makes them at once.
        keeps_turn: whether making solvers is compute inside the job's turn.
        solver: which kind, as in ``KFACState``.
    """

    rank: int
    world_size: int
    owners: tuple[int, ...]
    damping: float
    decay: float
    kl_clip: float | None
    scale: float = 1.0
    takes_factors: bool = True
    factors_trail: bool = False
    inverts: bool = True
    factors_travel: bool = True
    inverter: Worker | None = None
    keeps_turn: bool = False
    solver: Literal["inverse", "eigen"] = "inverse"


@dataclass(eq=False)
class Passenger:
    """One complete layer in a cargo: its gradients in DDP's buckets, and this rank's factors of the step.

    ``spread``: its solver, if all ranks have it and the layer is spread in this step. ``sends_solver``: whether its
    owner sends it to all ranks in this step.
    """

    index: int
    shape: LayerShape
    weight: Tensor
    bias: Tensor | None
    lr: float
    a: Tensor | None = None
    g: Tensor | None = None
    sends_a: bool = True
    room: Room = _NO_ROOM
    spread: SpreadSolver | None = None
    sends_solver: bool = False

    @property
    def gradient_numel(self) -> int:
        """Elements of weight and bias."""
        return self.weight.numel() + (0 if self.bias is None else self.bias.numel())

    def parcels(self, world_size: int) -> tuple["Parcel", ...]:
        """Return what travels of the factors in the bucket: G, then A unless it went early."""
        g = Parcel(self.shape.groups, self.shape.g_dim, self.room.g, world_size)
        a = Parcel(self.shape.groups, self.shape.a_dim, self.room.a, world_size)
        return (g, a) if self.sends_a else (g,)


class Parcel(NamedTuple):
    """How one factor travels: its triangle, or ``room`` columns of each rank; and behind it whether there is one.

    Columns are put in a place of each rank's own, so that their sum over the ranks holds those of all.
    """

    groups: int
    dim: int
    room: int
    world_size: int

    @property
    def numel(self) -> int:
        """Elements in the buffer that is summed."""
        if self.room:
            return self.world_size * self.groups * self.dim * self.room + 1
        return triangle_numel(self.groups, self.dim) + 1

    def pack(self, factor: Tensor | None, out: Tensor, rank: int) -> None:
        """Write this rank's factor, [groups, dim, dim], or its columns, [groups, dim, count]; None: it has none."""
        if factor is None:
            out.zero_()
            return
        out[-1] = 1.0
        if not self.room:
            pack_triangle(factor.to(out.dtype), out[:-1])
            return
        out[:-1].zero_()
        own = out[:-1].view(self.world_size, self.groups, self.dim, self.room)[rank]
        own[..., : factor.shape[-1]].copy_(factor)

    def unpack(self, mean: Tensor) -> BatchFactor:
        """Return the mean over the ranks that had a factor, [groups, dim, dim]; not a number if none had."""
        body, weight = mean[:-1], mean[-1]
        if not self.room:
            return unpack_triangle(body, self.groups, self.dim) / weight
        columns = body.view(self.world_size, self.groups, self.dim, self.room).permute(1, 2, 0, 3)
        # The buffer was divided by the number of ranks, the columns' squares so by its square.
        return Gram(columns.reshape(self.groups, self.dim, -1) * (self.world_size / weight).sqrt())


class Message(NamedTuple):
    """What a rank tells all others at the end of a step, see [Note: messages]."""

    kl_sum: Tensor
    counts: Tensor

    @staticmethod
    def size_bytes(count_numel: int) -> int:
        """Return the size: eight bytes, and four for each count, in multiples of eight."""
        return 8 + -(-4 * count_numel // 8) * 8

    def pack(self, out: Tensor) -> None:
        """Write the raw bytes."""
        size = out.numel() * out.itemsize
        raw = torch.zeros(size, dtype=torch.uint8, device=out.device)
        raw[:8] = self.kl_sum.reshape(1).view(torch.uint8)
        raw[8 : 8 + self.counts.numel() * 4] = self.counts.view(torch.uint8)
        out.copy_(raw.view(out.dtype))

    @classmethod
    def unpack(cls, message: Tensor, count_numel: int) -> "Message":
        """Read them again."""
        raw = message.clone().view(torch.uint8)
        return cls(
            raw[:8].clone().view(torch.float64), raw[8 : 8 + 4 * count_numel].clone().view(torch.int32)
        )


@dataclass(eq=False)
class Round:
    """One backward pass: what has arrived of it, and what is to be done at its end.

    Args:
        plan: the same on all ranks.
        curvatures: by layer, of those that this rank owns.
        early: the input factors that came ahead of their buckets, summed over the ranks: a parcel, and its contents.
        spread: by layer, the solvers that all ranks have, which go on to the next round.

    Attributes:
        counts: how many columns this rank's factors had, int32; set before the last bucket if factors travel.
        greatest_counts: the greatest over all ranks, when the step has ended.
    """

    plan: StepPlan
    curvatures: Mapping[int, Curvature]
    early: dict[int, tuple[Parcel, Tensor]] = field(default_factory=dict)
    spread: dict[int, SpreadSolver] = field(default_factory=dict)
    waiting: dict[int, Tensor] = field(default_factory=dict)
    cargoes: list["BucketCargo"] = field(default_factory=list)
    kl_terms: dict[int, Tensor] = field(default_factory=dict)
    counts: Tensor | None = None
    greatest_counts: Tensor | None = None

    def kl_sum(self) -> Tensor | None:
        """Return this rank's share of the KL clip's sum; rounded alike whatever buckets the layers came in."""
        terms = [self.kl_terms[index] for index in sorted(self.kl_terms)]
        return torch.stack(terms).sum() if terms else None

    def unload(self, last: "BucketCargo") -> None:
        """Read the messages; bring the preconditioned gradients back, scaled by the KL clip, if there is one."""
        messages = last.messages()
        if self.counts is not None:
            self.greatest_counts = torch.stack([message.counts for message in messages]).amax(0)
        if self.plan.kl_clip is None:
            last.bring_back(None)
            return
        # In the order of ranks, so that all get the same.
        total = torch.stack([message.kl_sum for message in messages]).sum().abs() / self.plan.scale**2
        # Nothing to scale by where all gradients are zero: min(1, inf).
        scale = (self.plan.kl_clip / total).sqrt().clamp(max=1.0)
        for cargo in self.cargoes:
            cargo.bring_back(scale)


class BucketCargo:
    """The layers that one bucket completes and what else of it passes through, packed for the way.

    Args:
        round: of this backward pass.
        passengers: the layers.
        buffer: of the bucket, flat.
        passing: spans of ``buffer`` that pass through.
        last: whether this is the step's last bucket.
        take: lends the memory of a buffer that goes both ways, by size; it is used until the round ends.
    """

    def __init__(
        self,
        round: Round,
        passengers: Sequence[Passenger],
        buffer: Tensor,
        passing: tuple[Span, ...],
        *,
        last: bool,
        take: Callable[[int], Tensor],
    ) -> None:
        self._round = round
        self._passengers = passengers
        self._buffer = buffer
        plan = round.plan
        self._with_factors = plan.takes_factors and plan.factors_travel
        loads = tuple([self._load(each) for each in passengers])
        has_message = last and (plan.kl_clip is not None or round.counts is not None)
        self._count_numel = 0 if round.counts is None else round.counts.numel()
        message_bytes = Message.size_bytes(self._count_numel) if has_message else 0
        self._message_numel = message_bytes // buffer.itemsize
        self.manifest: Manifest = manifest(plan.world_size, loads, passing, self._message_numel)
        self._products: dict[int, RowProduct | SpreadRows] = {}
        self._back = take(self.manifest.back.numel)
        if self.manifest.in_place:
            self._there = self._back
        else:
            # Sums of squares: 16-bit numbers would be too coarse for them.
            dtype = torch.promote_types(buffer.dtype, torch.float32)
            self._there = buffer.new_empty(self.manifest.there.numel, dtype=dtype)
        self._pack()
        round.cargoes.append(self)

    def cargo(self) -> Cargo:
        """Return what the engine needs to know."""
        there = Freight(self._there, self.manifest.there)
        back = there if self.manifest.in_place else Freight(self._back, self.manifest.back)
        arriving = self._arriving if self._going_by_rows() else None
        return Cargo(there, back, self._step, self._unload, self._round.plan.keeps_turn, arriving)

    # On the hook's thread.

    def _pack(self) -> None:
        for passenger, offsets, factor_offset in self._places():
            start = self.manifest.there.part(self._round.plan.owners[passenger.index]).start
            if passenger.spread is not None:
                self._pack_rows(passenger, passenger.spread, offsets)
            else:
                weight, bias = _views(passenger, self._there, start + offsets[0])
                weight.copy_(passenger.weight)
                if bias is not None and passenger.bias is not None:
                    bias.copy_(passenger.bias)
            if self._with_factors:
                self._pack_factors(passenger, start + factor_offset)
        for bucket, owner, offset in self.manifest.passing:
            start = self.manifest.there.part(owner).start + offset
            self._there[start : start + bucket.numel].copy_(self._buffer[bucket.start : bucket.stop])
        for rank in range(self._round.plan.world_size) if self._message_numel else ():
            self._message(rank, self._there).zero_()

    def _load(self, passenger: Passenger) -> Load:
        plan, shape = self._round.plan, passenger.shape
        parcels = passenger.parcels(plan.world_size) if self._with_factors else ()
        rows: tuple[int, ...] = ()
        if passenger.spread is not None:
            rows = tuple([span.numel * sides(shape)[1] for span in rows_of(shape, plan.world_size)])
        return Load(
            plan.owners[passenger.index],
            passenger.gradient_numel,
            sum(parcel.numel for parcel in parcels),
            spread_numel(shape, solver=plan.solver) if passenger.sends_solver else 0,
            rows,
        )

    def _pack_rows(self, passenger: Passenger, spread: SpreadSolver, offsets: Sequence[int]) -> None:
        matrix = gradient_matrix(passenger.shape, passenger.weight, passenger.bias)[0]
        # It runs inside of backward(), which may have been called under autocast.
        with torch.autocast(matrix.device.type, enabled=False):
            for rank, rows in enumerate(rows_of(passenger.shape, self._round.plan.world_size)):
                spread.before(matrix, rows, self._rows(passenger, self._there, rank, offsets))

    def _rows(self, passenger: Passenger, buffer: Tensor, rank: int, offsets: Sequence[int]) -> Tensor:
        """Return the view of a rank's rows of a spread layer, [rows, l]."""
        layout = self.manifest.there if buffer is self._there else self.manifest.back
        return _rows(passenger, buffer, rank, layout.part(rank).start + offsets[rank], layout.parts)

    def _pack_factors(self, passenger: Passenger, start: int) -> None:
        plan = self._round.plan
        for parcel, factor in zip(
            passenger.parcels(plan.world_size), (passenger.g, passenger.a), strict=False
        ):
            parcel.pack(factor, self._there[start : start + parcel.numel], plan.rank)
            start += parcel.numel

    def _places(self) -> list[tuple[Passenger, tuple[int, ...], int]]:
        """Return each layer with the offsets of its gradients in the parts and of its factors in its owner's."""
        return list(zip(self._passengers, self.manifest.gradients, self.manifest.factors, strict=True))

    # On the owner, between the halves.

    def _step(self, part: Tensor, final: Callable[[int], None]) -> None:
        # With one rank, and on NCCL, this runs inside of backward(), which may have been called under autocast.
        with torch.autocast(part.device.type, enabled=False):
            self._own_step(part, final)

    def _own_step(self, part: Tensor, final: Callable[[int], None]) -> None:
        plan, rank = self._round.plan, self._round.plan.rank
        back = self._back[slice(*self.manifest.back.part(rank))]
        for passenger, offsets, factor_offset in self._places():
            owned = plan.owners[passenger.index] == rank
            if owned and plan.takes_factors:
                self._take_factors(self._round.curvatures[passenger.index], passenger, part[factor_offset:])
            if passenger.spread is not None:
                self._multiply_rows(passenger, passenger.spread, part, back, offsets[rank], final)
            elif owned:
                curvature = self._round.curvatures[passenger.index]
                # Not to send plain gradients for a whole period where the first factors were not finite.
                if plan.inverts or curvature.lacks_solver:
                    curvature.invert(plan.damping, plan.inverter)
                self._precondition(curvature, passenger, part, back, offsets[0], final)
        self._pack_solvers(back)
        if not self.manifest.in_place:
            for bucket, owner, offset in self.manifest.passing:
                if owner == rank:
                    back[offset : offset + bucket.numel].copy_(part[offset : offset + bucket.numel])
        if self._message_numel:
            total, counts = self._round.kl_sum(), self._round.counts
            total = back.new_zeros(1, dtype=torch.float64) if total is None else total
            counts = back.new_zeros(0, dtype=torch.int32) if counts is None else counts
            Message(total, counts).pack(self._message(rank, self._back))

    def _take_factors(self, curvature: Curvature, passenger: Passenger, factors: Tensor) -> None:
        decay = self._round.plan.decay
        if not self._with_factors:
            if passenger.a is not None and passenger.g is not None:
                curvature.add(passenger.a, passenger.g, decay)
            return
        parcels = passenger.parcels(self._round.plan.world_size)
        g = parcels[0].unpack(factors[: parcels[0].numel])
        if passenger.sends_a:
            a = parcels[1].unpack(factors[parcels[0].numel : parcels[0].numel + parcels[1].numel])
        else:
            parcel, mean = self._round.early[passenger.index]
            a = parcel.unpack(mean)
        curvature.add(a, g, decay)

    def _going_by_rows(self) -> bool:
        plan = self._round.plan
        # New solvers are made when all has arrived.
        return not plan.inverts and any(
            each.spread is not None or (plan.owners[each.index] == plan.rank and goes_by_rows(each.shape))
            for each in self._passengers
        )

    def _arriving(self, numel: int) -> None:
        """See ``Cargo.arriving``."""
        plan = self._round.plan
        part = self._there[slice(*self.manifest.there.part(plan.rank))]
        for passenger, offsets, _ in self._places():
            if passenger.spread is not None:
                self._spread_rows(passenger, passenger.spread, part, offsets[plan.rank]).advance(
                    numel - offsets[plan.rank]
                )
                continue
            if plan.owners[passenger.index] != plan.rank or not goes_by_rows(passenger.shape):
                continue
            product = self._products.get(passenger.index)
            if product is None and (solver := self._round.curvatures[passenger.index].solver()) is not None:
                product = self._products[passenger.index] = _row_product(passenger, solver, part, offsets[0])
            if product is not None:
                product.advance(numel - offsets[0])

    def _spread_rows(
        self, passenger: Passenger, spread: SpreadSolver, part: Tensor, offset: int
    ) -> SpreadRows:
        plan = self._round.plan
        product = self._products.get(passenger.index)
        if not isinstance(product, SpreadRows):
            turned = _rows(passenger, part, plan.rank, offset, plan.world_size)
            rows = rows_of(passenger.shape, plan.world_size)[plan.rank]
            product = self._products[passenger.index] = SpreadRows(spread, rows, turned)
        return product

    def _multiply_rows(
        self,
        passenger: Passenger,
        spread: SpreadSolver,
        part: Tensor,
        back: Tensor,
        offset: int,
        final: Callable[[int], None],
    ) -> None:
        """Make this rank's rows of a spread layer, and its share of the KL clip's sum."""
        plan = self._round.plan
        source, target = (_rows(passenger, flat, plan.rank, offset, plan.world_size) for flat in (part, back))
        terms = []
        for rows, made in self._spread_rows(passenger, spread, part, offset).results():
            block = slice(*rows)
            if plan.kl_clip is not None:
                terms.append((made * source[block].to(made.dtype)).sum(dtype=torch.float64))
            target[block].copy_(made)
            final(offset + rows.stop * source.shape[1])
        del self._products[passenger.index]
        if terms:
            self._round.kl_terms[passenger.index] = torch.stack(terms).sum() * passenger.lr**2

    def _pack_solvers(self, back: Tensor) -> None:
        plan = self._round.plan
        for passenger, offset in zip(self._passengers, self.manifest.solvers, strict=True):
            if passenger.sends_solver and plan.owners[passenger.index] == plan.rank:
                packed = back[offset : offset + spread_numel(passenger.shape, solver=plan.solver)]
                spread = self._round.curvatures[passenger.index].spread()
                if spread is None:
                    packed.zero_()
                else:
                    spread.pack(packed)

    def _precondition(
        self,
        curvature: Curvature,
        passenger: Passenger,
        part: Tensor,
        back: Tensor,
        offset: int,
        final: Callable[[int], None],
    ) -> None:
        weight, bias = _views(passenger, part, offset)
        out, out_bias = _views(passenger, back, offset)
        matrix = gradient_matrix(passenger.shape, weight, bias)
        if bias is None:
            matrix = matrix.clone()  # as with a bias; see `RowProduct.advance`
        arrived = self._products.pop(passenger.index, None)
        product = arrived if isinstance(arrived, RowProduct) else None
        solver = curvature.solver() if product is None else None
        if solver is not None and goes_by_rows(passenger.shape):
            product = _row_product(passenger, solver, part, offset)
        preconditioned = matrix
        if product is not None:
            preconditioned = self._by_rows(product, passenger, back, offset, final)
        elif solver is not None:
            preconditioned = precondition(solver, matrix)
        if product is None and (preconditioned is not matrix or not self.manifest.in_place):
            split_gradient(passenger.shape, preconditioned, out, out_bias)
        final(offset + passenger.gradient_numel)
        if self._round.plan.kl_clip is not None:
            wide = matrix.to(preconditioned.dtype)
            term = (preconditioned * wide).sum(dtype=torch.float64) * passenger.lr**2
            self._round.kl_terms[passenger.index] = term

    @staticmethod
    def _by_rows(
        product: RowProduct, passenger: Passenger, back: Tensor, offset: int, final: Callable[[int], None]
    ) -> Tensor:
        """Write rows to where they leave from as they are made; return all of them, [1, g, a]."""
        shape = passenger.shape
        weight, bias = _views(passenger, back, offset)
        flat = weight.view(shape.g_dim, -1)
        made = []
        for rows, values in product.results():
            flat[rows].copy_(values[:, : flat.shape[1]])
            if bias is not None:
                bias[rows].copy_(values[:, -1])
            final(offset + rows.stop * flat.shape[1])
            made.append(values)
        return torch.cat(made).unsqueeze(0)

    # Wherever the bucket's way ends.

    def _unload(self) -> None:
        self._take_solvers()
        if self._message_numel:
            self._round.unload(self)
        elif self._round.plan.kl_clip is None:
            self.bring_back(None)

    def _take_solvers(self) -> None:
        """Keep the solvers that all ranks have now."""
        plan, spread = self._round.plan, self._round.spread
        for passenger, offset in zip(self._passengers, self.manifest.solvers, strict=True):
            if not passenger.sends_solver:
                continue
            owner = plan.owners[passenger.index]
            if owner == plan.rank:
                solver = self._round.curvatures[passenger.index].spread()
            else:
                start = self.manifest.back.part(owner).start + offset
                packed = self._back[start : start + spread_numel(passenger.shape, solver=plan.solver)]
                solver = SpreadSolver.unpack(packed, passenger.shape, solver=plan.solver)
            if solver is None:
                spread.pop(passenger.index, None)
            else:
                spread[passenger.index] = solver

    def _bring_rows_back(
        self, passenger: Passenger, spread: SpreadSolver, offsets: Sequence[int], scale: Tensor | None
    ) -> None:
        ranks = range(self._round.plan.world_size)
        with torch.autocast(self._back.device.type, enabled=False):
            direction = spread.after([self._rows(passenger, self._back, rank, offsets) for rank in ranks])
        if scale is not None:
            direction *= scale
        split_gradient(passenger.shape, direction.unsqueeze(0), passenger.weight, passenger.bias)

    def bring_back(self, scale: Tensor | None) -> None:
        """Write what came back into DDP's buckets; ``scale`` for the preconditioned gradients, None for 1."""
        for passenger, offsets, _ in self._places():
            if passenger.spread is not None:
                self._bring_rows_back(passenger, passenger.spread, offsets, scale)
                continue
            start = self.manifest.back.part(self._round.plan.owners[passenger.index]).start
            weight, bias = _views(passenger, self._back, start + offsets[0])
            for source, target in ((weight, passenger.weight), (bias, passenger.bias)):
                if source is None or target is None:
                    continue
                if scale is None:
                    target.copy_(source)
                else:
                    torch.mul(source, scale, out=target)
        for bucket, owner, offset in self.manifest.passing:
            start = self.manifest.back.part(owner).start + offset
            self._buffer[bucket.start : bucket.stop].copy_(self._back[start : start + bucket.numel])

    def messages(self) -> list[Message]:
        """Return what the ranks have told at the end of their parts, in the order of ranks."""
        return [
            Message.unpack(self._message(rank, self._back), self._count_numel)
            for rank in range(self._round.plan.world_size)
        ]

    def _message(self, rank: int, buffer: Tensor) -> Tensor:
        layout = self.manifest.there if buffer is self._there else self.manifest.back
        start = layout.part(rank).start + self.manifest.number_offsets[rank]
        return buffer[start : start + self._message_numel]


def _row_product(passenger: Passenger, solver: Solver, part: Tensor, offset: int) -> RowProduct:
    return RowProduct(passenger.shape, solver, *_views(passenger, part, offset))


def _rows(passenger: Passenger, flat: Tensor, rank: int, start: int, world_size: int) -> Tensor:
    """Return the view of a rank's rows of a spread layer, [rows, l], which begin at ``start`` of ``flat``."""
    rows, width = rows_of(passenger.shape, world_size)[rank].numel, sides(passenger.shape)[1]
    return flat[start : start + rows * width].view(rows, width)


def _views(passenger: Passenger, flat: Tensor, start: int) -> tuple[Tensor, Tensor | None]:
    middle = start + passenger.weight.numel()
    weight = flat[start:middle].view(passenger.weight.shape)
    if passenger.bias is None:
        return weight, None
    return weight, flat[middle : middle + passenger.bias.numel()].view(passenger.bias.shape)

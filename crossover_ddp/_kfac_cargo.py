"""One backward pass of K-FAC: what each bucket sends in its place, and what the owners do with it.

[Note: a layer travels with its last bucket] DDP may put a layer's bias into one bucket and its weight into the next.
The owner needs both, so what comes early waits in its bucket until the layer is complete, and travels with the bucket
that completes it. All Futures of a step complete together, hence nobody looks at the early bucket before.

[Note: one number each] The KL clip scales all preconditioned gradients by one number made of sums over all layers.
Each rank's sum over its own layers travels at the end of its part of the last bucket, as eight raw bytes; so every
rank scales by the same bits.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import torch
from torch import Tensor

from ._curvature import Curvature
from ._factors import LayerShape, gradient_matrix, pack_triangle, split_gradient, unpack_triangle
from ._journey import Cargo, Freight
from ._layout import Span
from ._manifest import Load, Manifest, manifest
from ._worker import Worker

_NUMBER_BYTES: Final = 8


@dataclass(frozen=True)
class StepPlan:
    """What all ranks do in one step; made of the step's number and the hyper-parameters of that moment.

    Args:
        rank, world_size: of this process.
        owners: of each layer.
        damping, decay, kl_clip: see ``KFACState``; kl_clip None scales nothing.
        scale: of the loss in this backward pass, undone in the KL clip.
        takes_factors: whether the running factors are updated.
        inverts: whether new solvers are made.
        factors_travel: whether factors are averaged over the ranks; otherwise the owner takes its own.
        inverter: the thread that makes solvers while the old ones serve on; None makes them at once.
        keeps_turn: whether making solvers is compute inside the job's turn.
    """

    rank: int
    world_size: int
    owners: tuple[int, ...]
    damping: float
    decay: float
    kl_clip: float | None
    scale: float = 1.0
    takes_factors: bool = True
    inverts: bool = True
    factors_travel: bool = True
    inverter: Worker | None = None
    keeps_turn: bool = False


@dataclass(eq=False)
class Passenger:
    """One complete layer in a cargo: its gradients in DDP's buckets, and this rank's factors of the step."""

    index: int
    shape: LayerShape
    weight: Tensor
    bias: Tensor | None
    lr: float
    a: Tensor | None = None
    g: Tensor | None = None
    sends_a: bool = True

    @property
    def gradient_numel(self) -> int:
        """Elements of weight and bias."""
        return self.weight.numel() + (0 if self.bias is None else self.bias.numel())

    @property
    def factor_numel(self) -> int:
        """Elements of what travels of the factors: each triangle, and how many ranks have one."""
        return self.shape.g_numel + 1 + (self.shape.a_numel + 1 if self.sends_a else 0)


class Early(NamedTuple):
    """An input factor that came ahead of its bucket: the sum over the ranks, and how many had one, over W."""

    triangle: Tensor
    weight: Tensor


@dataclass(eq=False)
class Round:
    """One backward pass: what has arrived of it, and what is to be done at its end.

    Args:
        plan: the same on all ranks.
        curvatures: by layer, of those that this rank owns.
    """

    plan: StepPlan
    curvatures: Mapping[int, Curvature]
    early: dict[int, Early] = field(default_factory=dict)
    waiting: dict[int, Tensor] = field(default_factory=dict)
    cargoes: list["BucketCargo"] = field(default_factory=list)
    kl_sum: Tensor | None = None

    def add_kl(self, term: Tensor) -> None:
        """Add a layer's share of the KL clip's sum. Called on the owner."""
        self.kl_sum = term if self.kl_sum is None else self.kl_sum + term

    def unload(self, last: "BucketCargo") -> None:
        """Bring all preconditioned gradients back, scaled by the KL clip."""
        scale = self._kl_scale(last)
        for cargo in self.cargoes:
            cargo.bring_back(scale)

    def _kl_scale(self, last: "BucketCargo") -> Tensor:
        total = last.sum_of_numbers().abs() / self.plan.scale**2
        assert self.plan.kl_clip is not None
        # Nothing to scale by where all gradients are zero: min(1, inf).
        return (self.plan.kl_clip / total).sqrt().clamp(max=1.0)


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
        self._last = last
        plan = round.plan
        self._with_factors = plan.takes_factors and plan.factors_travel
        loads = tuple(
            Load(plan.owners[each.index], each.gradient_numel, each.factor_numel if self._with_factors else 0)
            for each in passengers
        )
        has_number = last and plan.kl_clip is not None
        self._number_numel = _NUMBER_BYTES // buffer.itemsize if has_number else 0
        self.manifest: Manifest = manifest(plan.world_size, loads, passing, self._number_numel)
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
        return Cargo(there, back, self._step, self._unload, self._round.plan.keeps_turn)

    # On the hook's thread.

    def _pack(self) -> None:
        for passenger, load_offset, factor_offset in self._places():
            owner = self._round.plan.owners[passenger.index]
            start = self.manifest.there.part(owner).start
            weight, bias = _views(passenger, self._there, start + load_offset)
            weight.copy_(passenger.weight)
            if bias is not None and passenger.bias is not None:
                bias.copy_(passenger.bias)
            if self._with_factors:
                self._pack_factors(passenger, start + factor_offset)
        for bucket, owner, offset in self.manifest.passing:
            start = self.manifest.there.part(owner).start + offset
            self._there[start : start + bucket.numel].copy_(self._buffer[bucket.start : bucket.stop])
        for rank in range(self._round.plan.world_size) if self._number_numel else ():
            self._number(rank, self._there).zero_()

    def _pack_factors(self, passenger: Passenger, start: int) -> None:
        shape = passenger.shape
        stop = start + shape.g_numel + 1
        pack_factor(passenger.g, self._there[start:stop])
        if passenger.sends_a:
            pack_factor(passenger.a, self._there[stop : stop + shape.a_numel + 1])

    def _places(self) -> list[tuple[Passenger, int, int]]:
        return list(zip(self._passengers, self.manifest.gradients, self.manifest.factors, strict=True))

    # On the owner, between the halves.

    def _step(self, part: Tensor) -> None:
        plan, rank = self._round.plan, self._round.plan.rank
        back = self._back[slice(*self.manifest.back.part(rank))]
        for passenger, offset, factor_offset in self._places():
            if plan.owners[passenger.index] != rank:
                continue
            curvature = self._round.curvatures[passenger.index]
            if plan.takes_factors:
                self._take_factors(curvature, passenger, part[factor_offset:])
            if plan.inverts:
                curvature.invert(plan.damping, plan.inverter)
            self._precondition(curvature, passenger, part, back, offset)
        if not self.manifest.in_place:
            for bucket, owner, offset in self.manifest.passing:
                if owner == rank:
                    back[offset : offset + bucket.numel].copy_(part[offset : offset + bucket.numel])
        if self._number_numel:
            total = self._round.kl_sum
            total = back.new_zeros(1, dtype=torch.float64) if total is None else total
            self._number(rank, self._back).copy_(total.reshape(1).view(back.dtype))

    def _take_factors(self, curvature: Curvature, passenger: Passenger, factors: Tensor) -> None:
        shape, decay = passenger.shape, self._round.plan.decay
        if not self._with_factors:
            if passenger.a is not None and passenger.g is not None:
                curvature.add(passenger.a, passenger.g, decay)
            return
        g_stop = shape.g_numel + 1
        g = unpack_factor(factors[:g_stop], shape.groups, shape.g_dim)
        if passenger.sends_a:
            a = unpack_factor(factors[g_stop : g_stop + shape.a_numel + 1], shape.groups, shape.a_dim)
        else:
            triangle, weight = self._round.early[passenger.index]
            a = unpack_triangle(triangle, shape.groups, shape.a_dim) / weight
        curvature.add(a, g, decay)

    def _precondition(
        self, curvature: Curvature, passenger: Passenger, part: Tensor, back: Tensor, offset: int
    ) -> None:
        weight, bias = _views(passenger, part, offset)
        out, out_bias = _views(passenger, back, offset)
        matrix = gradient_matrix(passenger.shape, weight, bias)
        if curvature.ready:
            matrix = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
            preconditioned = curvature.precondition(matrix)
        else:
            preconditioned = matrix
        if self._round.plan.kl_clip is not None:
            self._round.add_kl((preconditioned * matrix).sum(dtype=torch.float64) * passenger.lr**2)
        if preconditioned is not matrix or not self.manifest.in_place:
            split_gradient(passenger.shape, preconditioned, out, out_bias)

    # Wherever the bucket's way ends.

    def _unload(self) -> None:
        if self._round.plan.kl_clip is None:
            self.bring_back(None)
        elif self._last:
            self._round.unload(self)

    def bring_back(self, scale: Tensor | None) -> None:
        """Write what came back into DDP's buckets; ``scale`` for the preconditioned gradients, None for 1."""
        for passenger, offset, _ in self._places():
            start = self.manifest.back.part(self._round.plan.owners[passenger.index]).start
            weight, bias = _views(passenger, self._back, start + offset)
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

    def sum_of_numbers(self) -> Tensor:
        """Add up what the ranks have sent at the end of their parts, in the order of ranks. float64, shape []."""
        numbers = [
            self._number(rank, self._back).clone().view(torch.float64)
            for rank in range(self._round.plan.world_size)
        ]
        return torch.cat(numbers).sum()

    def _number(self, rank: int, buffer: Tensor) -> Tensor:
        layout = self.manifest.there if buffer is self._there else self.manifest.back
        start = layout.part(rank).start + self.manifest.number_offsets[rank]
        return buffer[start : start + self._number_numel]


def pack_factor(factor: Tensor | None, out: Tensor) -> None:
    """Write a factor's triangle, and behind it 1; zeros for a factor that this rank does not have."""
    if factor is None:
        out.zero_()
        return
    pack_triangle(factor.to(out.dtype), out[:-1])
    out[-1] = 1.0


def unpack_factor(mean: Tensor, groups: int, dim: int) -> Tensor:
    """Return the mean over the ranks that had a factor; not a number where none had. Shape [groups, dim, dim]."""
    return unpack_triangle(mean[:-1], groups, dim) / mean[-1]


def _views(passenger: Passenger, flat: Tensor, start: int) -> tuple[Tensor, Tensor | None]:
    middle = start + passenger.weight.numel()
    weight = flat[start:middle].view(passenger.weight.shape)
    if passenger.bias is None:
        return weight, None
    return weight, flat[middle : middle + passenger.bias.numel()].view(passenger.bias.shape)

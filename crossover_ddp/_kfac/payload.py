"""One backward pass of K-FAC: what each bucket sends in its place, and what the owners do with it.

[Note: a layer travels with its last bucket] DDP may put a layer's bias into one bucket and its weight into the next.
The owner needs both, so what comes early waits in its bucket until the layer is complete, and travels with the bucket
that completes it. All Futures of a step complete together, hence the early bucket is not read before.

[Note: messages] The KL clip scales all preconditioned gradients by one number made of sums over all layers. Each
rank's sum over its own layers travels at the end of its part of the last bucket, as eight raw bytes; so every rank
scales by the same bits. On steps that take factors each rank sends in the same place how many columns its mini-batch
had of each factor, so that all ranks know what can be sent as columns the next time (see [Note: few columns]).

A layer that is spread goes its own way, see [Note: spread layers].

[Note: brought back late] In decoupled training buckets are gathered in another order than backward's, some of them
while the next forward runs. The last bucket comes before all that are still to be gathered, since it has the messages.
What came before waits for them in its payload; what comes later is scaled when it comes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from crossover_ddp._exchange.layout import Layout, Span
from crossover_ddp._exchange.transfer import Payload, Sharded

from .curvature import Curvature
from .factors import gradient_matrix, split_gradient
from .message import Message
from .payload_layout import LayerSizes, PayloadLayout, payload_layout
from .round_plan import BucketLayer, RoundPlan
from .spread import SpreadSolver, spread_numel
from .spread_payload import SpreadPayload


@dataclass(eq=False)
class KFACRound:
    """One backward pass: what has arrived of it, and what is to be done at its end.

    Args:
        plan: the same on all ranks.
        curvatures: by layer, of those that this rank owns.
        spread: by layer, the solvers that all ranks have, which go on to the next round.

    Attributes:
        counts: how many columns this rank's factors had, int32; set before the last bucket if factors travel.
        greatest_counts: the greatest over all ranks, when the step has ended.
        brought_by: by the number of a bucket, those of later ones that bring parts of it, or what it is scaled by.
    """

    plan: RoundPlan
    curvatures: Mapping[int, Curvature]
    spread: dict[int, SpreadSolver] = field(default_factory=dict)
    waiting: dict[int, Tensor] = field(default_factory=dict)
    payloads: list["BucketPayload"] = field(default_factory=list)
    kl_terms: dict[int, Tensor] = field(default_factory=dict)
    counts: Tensor | None = None
    greatest_counts: Tensor | None = None
    brought_by: dict[int, set[int]] = field(default_factory=dict)
    bucket_of: dict[int, int] = field(default_factory=dict)
    _scale: Tensor | None = None

    def kl_sum(self) -> Tensor | None:
        """Return this rank's share of the KL clip's sum; rounded alike whatever buckets the layers came in."""
        terms = [self.kl_terms[index] for index in sorted(self.kl_terms)]
        return torch.stack(terms).sum() if terms else None

    def unload(self, payload: "BucketPayload") -> None:
        """Bring what has come back, scaled by the KL clip, if there is one; see [Note: brought back late]."""
        if payload.has_message:
            self._read_messages(payload)
        if self.plan.kl_clip is None:
            payload.bring_back(None)
        elif payload.has_message:
            for each in self.payloads:
                if each.has_arrived:
                    each.bring_back(self._scale)
        elif self._scale is not None:
            payload.bring_back(self._scale)

    def _read_messages(self, last: "BucketPayload") -> None:
        messages = last.messages()
        if self.counts is not None:
            self.greatest_counts = torch.stack([message.counts for message in messages]).amax(0)
        if self.plan.kl_clip is None:
            return
        # In the order of ranks, so that all get the same.
        total = torch.stack([message.kl_sum for message in messages]).sum().abs() / self.plan.scale**2
        # Nothing to scale by where all gradients are zero: min(1, inf).
        self._scale = (self.plan.kl_clip / total).sqrt().clamp(max=1.0)


class BucketPayload:
    """The layers that one bucket completes and what else of it passes through, packed for the way.

    Args:
        round: of this backward pass.
        layers: the layers.
        buffer: of the bucket, flat.
        passing: spans of ``buffer`` that pass through.
        last: whether this is the step's last bucket.
        take: lends the memory of a buffer that goes both ways, by size; it is used until the round ends.
    """

    def __init__(
        self,
        round: KFACRound,
        layers: Sequence[BucketLayer],
        buffer: Tensor,
        passing: tuple[Span, ...],
        *,
        last: bool,
        take: Callable[[int], Tensor],
    ) -> None:
        self._round = round
        self._layers = layers
        self._buffer = buffer
        plan = round.plan
        self._spread = SpreadPayload(plan, round.curvatures, round.spread)
        sizes = tuple([self._sizes(each) for each in layers])
        has_message = last and (plan.kl_clip is not None or round.counts is not None)
        self._count_numel = 0 if round.counts is None else round.counts.numel()
        message_bytes = Message.size_bytes(self._count_numel) if has_message else 0
        self._message_numel = message_bytes // buffer.itemsize
        self.has_arrived = False
        self.layout: PayloadLayout = payload_layout(plan.world_size, sizes, passing, self._message_numel)
        self._back = take(self.layout.back.numel)
        self._there = self._back if self.layout.in_place else buffer.new_empty(self.layout.there.numel)
        self._pack()
        round.payloads.append(self)

    def payload(self) -> Payload:
        """Return what the engine needs to know."""
        there = Sharded(self._there, self.layout.there)
        back = there if self.layout.in_place else Sharded(self._back, self.layout.back)
        return Payload(there, back, self._step, self._unload, self._round.plan.keeps_turn)

    # On the hook's thread.

    def _pack(self) -> None:
        for layer, offsets in self._places():
            start = self.layout.there.part(self._round.plan.owners[layer.index]).start
            if layer.spread is not None:
                self._spread.pack(layer, layer.spread, self._there, self._starts(self.layout.there, offsets))
            else:
                weight, bias = _views(layer, self._there, start + offsets[0])
                weight.copy_(layer.weight)
                if bias is not None and layer.bias is not None:
                    bias.copy_(layer.bias)
        for bucket, owner, offset in self.layout.passing:
            start = self.layout.there.part(owner).start + offset
            self._there[start : start + bucket.numel].copy_(self._buffer[bucket.start : bucket.stop])
        for rank in range(self._round.plan.world_size) if self._message_numel else ():
            self._message(rank, self._there).zero_()

    def _sizes(self, layer: BucketLayer) -> LayerSizes:
        plan, shape = self._round.plan, layer.shape
        rows = () if layer.spread is None else self._spread.rows_numel(shape)
        return LayerSizes(
            plan.owners[layer.index],
            layer.gradient_numel,
            spread_numel(shape, solver=plan.solver) if layer.sends_solver else 0,
            rows,
        )

    @staticmethod
    def _starts(layout: Layout, offsets: Sequence[int]) -> list[int]:
        """Return where something begins in the buffer that has ``offsets`` in the ranks' parts."""
        return [layout.part(rank).start + offset for rank, offset in enumerate(offsets)]

    def _places(self) -> list[tuple[BucketLayer, tuple[int, ...]]]:
        """Return each layer with the offsets of its gradients in the parts."""
        return list(zip(self._layers, self.layout.gradients, strict=True))

    # On the owner, between the halves.

    def _step(self, part: Tensor) -> None:
        # With one rank, and on NCCL, this runs inside of backward(), which may have been called under autocast.
        with torch.autocast(part.device.type, enabled=False):
            self._own_step(part)

    def _own_step(self, part: Tensor) -> None:
        plan, rank = self._round.plan, self._round.plan.rank
        back = self._back[slice(*self.layout.back.part(rank))]
        for layer, offsets in self._places():
            owned = plan.owners[layer.index] == rank
            if layer.local is not None:
                self._round.curvatures[layer.index].add(*layer.local, plan.decay)
            if layer.spread is not None:
                term = self._spread.multiply(layer, layer.spread, part, back, offsets[rank])
                if term is not None:
                    self._round.kl_terms[layer.index] = term
            elif owned:
                curvature = self._round.curvatures[layer.index]
                # Not to send plain gradients for a whole period where the first factors were not finite.
                if plan.inverts or curvature.lacks_solver:
                    curvature.invert(plan.damping)
                self._precondition(layer, part, back, offsets[0])
        for layer, offset in zip(self._layers, self.layout.solvers, strict=True):
            if layer.sends_solver and plan.owners[layer.index] == rank:
                self._spread.send_solver(layer, back[offset:])
        if not self.layout.in_place:
            for bucket, owner, offset in self.layout.passing:
                if owner == rank:
                    back[offset : offset + bucket.numel].copy_(part[offset : offset + bucket.numel])
        if self._message_numel:
            total, counts = self._round.kl_sum(), self._round.counts
            total = back.new_zeros(1, dtype=torch.float64) if total is None else total
            counts = back.new_zeros(0, dtype=torch.int32) if counts is None else counts
            Message(total, counts).pack(self._message(rank, self._back))

    def _precondition(self, layer: BucketLayer, part: Tensor, back: Tensor, offset: int) -> None:
        weight, bias = _views(layer, part, offset)
        matrix = gradient_matrix(layer.shape, weight, bias)
        solver = self._round.curvatures[layer.index].solver
        preconditioned = matrix
        if solver is not None:
            # With a bias it is a copy already, see [Note: copies before products] in `factors`.
            preconditioned = solver.precondition(matrix if layer.shape.has_bias else matrix.clone())
        if (
            self._round.plan.kl_clip is not None
        ):  # first, since the direction may be written over the gradient
            terms = preconditioned * matrix.to(preconditioned.dtype)
            self._round.kl_terms[layer.index] = _kl_term(layer, terms)
        if solver is not None or not self.layout.in_place:
            split_gradient(layer.shape, preconditioned, *_views(layer, back, offset))

    # Wherever the bucket's way ends.

    def _unload(self) -> None:
        for layer, offset in zip(self._layers, self.layout.solvers, strict=True):
            if layer.sends_solver:
                start = self.layout.back.part(self._round.plan.owners[layer.index]).start + offset
                self._spread.take_solver(layer, self._back[start:])
        self.has_arrived = True
        self._round.unload(self)

    @property
    def has_message(self) -> bool:
        """Whether the ranks' messages come with it."""
        return self._message_numel > 0

    def bring_back(self, scale: Tensor | None) -> None:
        """Write what came back into DDP's buckets; ``scale`` for the preconditioned gradients, None for 1."""
        for layer, offsets in self._places():
            if layer.spread is not None:
                starts = self._starts(self.layout.back, offsets)
                self._spread.bring_back(layer, layer.spread, self._back, starts, scale)
                continue
            start = self.layout.back.part(self._round.plan.owners[layer.index]).start
            weight, bias = _views(layer, self._back, start + offsets[0])
            for source, target in ((weight, layer.weight), (bias, layer.bias)):
                if source is None or target is None:
                    continue
                if scale is None:
                    target.copy_(source)
                else:
                    torch.mul(source, scale, out=target)
        for bucket, owner, offset in self.layout.passing:
            start = self.layout.back.part(owner).start + offset
            self._buffer[bucket.start : bucket.stop].copy_(self._back[start : start + bucket.numel])

    def messages(self) -> list[Message]:
        """Return the messages at the end of the ranks' parts, in the order of ranks."""
        return [
            Message.unpack(self._message(rank, self._back), self._count_numel)
            for rank in range(self._round.plan.world_size)
        ]

    def _message(self, rank: int, buffer: Tensor) -> Tensor:
        layout = self.layout.there if buffer is self._there else self.layout.back
        start = layout.part(rank).start + self.layout.number_offsets[rank]
        return buffer[start : start + self._message_numel]


def _kl_term(layer: BucketLayer, terms: Tensor) -> Tensor:
    """Sum up V·∇, [groups, g, a] with the bias in the last column, by the learning rates."""
    if layer.bias is None or layer.bias_lr == layer.lr:
        return terms.sum(dtype=torch.float64) * layer.lr**2
    weight, bias = terms[..., :-1].sum(dtype=torch.float64), terms[..., -1].sum(dtype=torch.float64)
    return weight * layer.lr**2 + bias * layer.bias_lr**2


def _views(layer: BucketLayer, flat: Tensor, start: int) -> tuple[Tensor, Tensor | None]:
    middle = start + layer.weight.numel()
    weight = flat[start:middle].view(layer.weight.shape)
    if layer.bias is None:
        return weight, None
    return weight, flat[middle : middle + layer.bias.numel()].view(layer.bias.shape)

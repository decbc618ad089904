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
from typing import NamedTuple

import torch
from torch import Tensor

from crossover_ddp._exchange.contents import Content
from crossover_ddp._exchange.layout import Span
from crossover_ddp._exchange.transfer import Payload, Sharded, Travelling
from crossover_ddp._owners.packing import Item, Place, packing
from crossover_ddp.errors import ExchangeError

from .bucket_layer import BucketLayer, Rows, Whole
from .preconditioner import Preconditioner
from .settings import HyperNow
from .spread import SpreadSolver, spread_numel


class Message(NamedTuple):
    """What each rank sends to all others, see [Note: messages].

    ``kl_sum``: float64; ``bits``: int64, one or none, see [Note: equal bits] in `bucket_layer`; ``counts``: int32.
    """

    kl_sum: Tensor
    bits: Tensor
    counts: Tensor

    @property
    def nbytes(self) -> int:
        """The size, a multiple of eight."""
        return -(-sum(each.nbytes for each in self) // 8) * 8

    def pack(self, out: Tensor) -> None:
        """Write the raw bytes."""
        raw = torch.zeros(self.nbytes, dtype=torch.uint8, device=out.device)
        whole = torch.cat([each.view(torch.uint8) for each in self])
        raw[: whole.numel()] = whole
        out.copy_(raw.view(out.dtype))

    def read(self, packed: Tensor) -> "Message":
        """Read another rank's, of the same sizes."""
        raw = packed.clone().view(torch.uint8)
        sizes = [each.nbytes for each in self]
        parts = raw[: sum(sizes)].split(sizes)
        return Message(*[part.clone().view(own.dtype) for part, own in zip(parts, self, strict=True)])


@dataclass(eq=False)
class KFACRound:
    """One backward pass: what has arrived of it, and what is to be done at its end.

    Args:
        owned: this rank's layers.
        now: what is due, the same on all ranks.
        scale: of the loss, undone in the KL clip.
        trails: whether the factors follow behind the gradients, see [Note: late factors] in `factor_traffic`.
        former_bits: those of the step before, see [Note: equal bits] in `bucket_layer`.

    Attributes:
        bits: of this step's directions of spread layers, when they have come back.
        counts: how many columns this rank's factors had, int32; set before the last bucket if factors travel.
        greatest_counts: the greatest over all ranks, when the step has ended.
        brought_by: by the number of a bucket, those of later ones that bring parts of it, or what it is scaled by.
    """

    owned: Preconditioner
    now: HyperNow
    scale: float
    trails: bool
    former_bits: Mapping[int, Tensor]
    bits: dict[int, Tensor] = field(default_factory=dict)
    waiting: dict[int, Tensor] = field(default_factory=dict)
    payloads: list["BucketPayload"] = field(default_factory=list)
    kl_terms: dict[int, Tensor] = field(default_factory=dict)
    counts: Tensor | None = None
    greatest_counts: Tensor | None = None
    brought_by: dict[int, set[int]] = field(default_factory=dict)
    bucket_of: dict[int, int] = field(default_factory=dict)
    _scale: Tensor | None = None

    def message(self, device: torch.device) -> Message | None:
        """Return a message of the right sizes, with the columns' numbers; None if none is due."""
        compares = bool(self.owned.spread.chosen)
        if self.now.kl_clip is None and self.counts is None and not compares:
            return None
        return Message(
            torch.empty(1, dtype=torch.float64, device=device),
            torch.empty(int(compares), dtype=torch.int64, device=device),
            torch.empty(0, dtype=torch.int32, device=device) if self.counts is None else self.counts,
        )

    def sums(self, device: torch.device) -> dict[str, Tensor]:
        """Return this rank's share of the KL clip's sum, rounded alike whatever the buckets, and its bits."""
        terms = [self.kl_terms[index] for index in sorted(self.kl_terms)]
        kl_sum = torch.stack(terms).sum() if terms else torch.zeros((), dtype=torch.float64, device=device)
        found = {"kl_sum": kl_sum.reshape(1)}
        if self.owned.spread.chosen:
            bits = [self.former_bits[index] for index in sorted(self.former_bits)]
            total = torch.stack(bits).sum() if bits else torch.zeros((), dtype=torch.int64, device=device)
            found["bits"] = total.reshape(1)
        return found

    def unload(self, payload: "BucketPayload") -> None:
        """Bring what has come back, scaled by the KL clip, if there is one; see [Note: brought back late]."""
        if payload.has_message:
            self._read_messages(payload)
        if self.now.kl_clip is None:
            payload.bring_back(None)
        elif payload.has_message:
            for each in self.payloads:
                if each.has_arrived:
                    each.bring_back(self._scale)
        elif self._scale is not None:
            payload.bring_back(self._scale)

    def _read_messages(self, last: "BucketPayload") -> None:
        messages = last.messages()
        bits = torch.stack([message.bits for message in messages])
        # On a GPU the host waits for it, so only where it does so anyway.
        compares = bits.numel() > 0 and (self.now.inverts or not bits.is_cuda)
        if compares and bool((bits != bits[0]).any()):
            raise ExchangeError(
                "expected the same directions of layers that are spread on all ranks, got other bits on some; restart "
                "the job from a checkpoint, with the same processor, torch and number of threads for all ranks"
            )
        if self.counts is not None:
            self.greatest_counts = torch.stack([message.counts for message in messages]).amax(0)
        if self.now.kl_clip is None:
            return
        # In the order of ranks, so that all get the same.
        total = torch.stack([message.kl_sum for message in messages]).sum().abs() / self.scale**2
        # Nothing to scale by where all gradients are zero: min(1, inf).
        self._scale = (self.now.kl_clip / total).sqrt().clamp(max=1.0)


class BucketPayload:
    """The layers that one bucket completes and what else of it passes through, packed for the way.

    A rank's part begins with the layers that it owns and its rows of those that are spread. Behind that lie its share
    of the parameters that pass through, its message, and, only on the way back, the solvers that all ranks get.

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
        self._buffer = buffer
        self._owned = owned = round.owned
        self._layers = [
            Whole(each, owned) if each.spread is None else Rows(each, each.spread, owned, round.bits)
            for each in layers
        ]
        self.has_arrived = False
        self._message = round.message(buffer.device) if last else None
        ranks, numel = owned.setup.world_size, 0
        if self._message is not None:
            numel = self._message.nbytes // buffer.itemsize
        behind = [Item(rank, numel, numel) for rank in range(ranks)]
        senders = [each for each in layers if each.sends_solver]
        behind += [Item(owned.owners[each.index], 0, spread_numel(each.shape)) for each in senders]
        items = tuple([item for each in self._layers for item in each.items])
        self._packing = made = packing(ranks, items, passing, tuple(behind))
        places = iter(made.items)
        for layer in self._layers:
            layer.places = [next(places) for _ in layer.items]
        self._messages = made.behind[:ranks]
        self._solvers = list(zip(senders, made.behind[ranks:], strict=True))
        self._back = take(made.back.numel)
        self._there = buffer.new_empty(made.there.numel) if senders else self._back
        self._pack()
        round.payloads.append(self)

    def payload(self, matrices: Callable[[], Sequence[Travelling]]) -> Payload:
        """Return what the engine needs to know; ``matrices``: see `matrices`."""
        there = Sharded(self._there, self._packing.there)
        back = there if self._there is self._back else Sharded(self._back, self._packing.back)
        keeps_turn = self._round.now.inverts and self._owned.setup.keeps_turn
        return Payload(there, back, self._step, self._unload, keeps_turn, matrices=matrices)

    def matrices(self, weights: Mapping[int, Tensor], contents: Sequence[Content]) -> list[Travelling]:
        """List where parameters of two dimensions or more travel, which a codec may round; no layer is spread then.

        Args:
            weights: of the layers, by index.
            contents: of the bucket.
        """
        found = []
        for each in self._layers:
            (place,), weight = each.places, weights[each.layer.index]
            found.append(_travelling(weight, 0, place, Span(0, weight.numel())))
        for span, place in self._packing.passing:
            for parameter, _, own in contents:
                begin, stop = max(own.start, span.start), min(own.stop, span.stop)
                if begin < stop and parameter.dim() > 1:
                    run = Span(begin - span.start, stop - span.start)
                    found.append(_travelling(parameter, begin - own.start, place, run))
        return sorted(found, key=lambda each: each.there.start)

    # On the hook's thread.

    def _pack(self) -> None:
        for layer in self._layers:
            layer.pack(self._there)
        for span, place in self._packing.passing:
            _part(self._there, place.there).copy_(_part(self._buffer, span))
        for place in self._messages:
            _part(self._there, place.there).zero_()

    # On the owner, between the halves.

    def _step(self, part: Tensor) -> None:
        # With one rank, and on NCCL, this runs inside of backward(), which may have been called under autocast.
        with torch.autocast(part.device.type, enabled=False):
            self._own_step()

    def _own_step(self) -> None:
        owned, now, rank = self._owned, self._round.now, self._owned.setup.rank
        for each in self._layers:
            index = each.layer.index
            if each.layer.local is not None:
                owned.curvatures[index].add(*each.layer.local, now.decay)
            term = each.work(now, self._there, self._back)
            if term is not None:
                self._round.kl_terms[index] = term
        for layer, place in self._solvers:
            if place.owner == rank:
                owned.spread.send(owned.curvatures[layer.index].spread(), _part(self._back, place.back))
        if self._there is not self._back:
            for _, place in self._packing.passing:
                if place.owner == rank:
                    _part(self._back, place.back).copy_(_part(self._there, place.there))
        if self._message is not None:
            made = self._message._replace(**self._round.sums(self._back.device))
            made.pack(_part(self._back, self._messages[rank].back))

    # Wherever the bucket's way ends.

    def _unload(self) -> None:
        for layer, place in self._solvers:
            curvature = self._owned.curvatures.get(layer.index)
            if curvature is not None:
                solver = curvature.spread()
            else:
                solver = SpreadSolver.unpack(_part(self._back, place.back), layer.shape)
            self._owned.spread.keep(layer.index, solver)
        self.has_arrived = True
        self._round.unload(self)

    @property
    def has_message(self) -> bool:
        """Whether the ranks' messages come with it."""
        return self._message is not None

    def bring_back(self, scale: Tensor | None) -> None:
        """Write what came back into DDP's buckets; ``scale`` for the preconditioned gradients, None for 1."""
        for layer in self._layers:
            layer.bring_back(self._back, scale)
        for span, place in self._packing.passing:
            _part(self._buffer, span).copy_(_part(self._back, place.back))

    def messages(self) -> list[Message]:
        """Return the ranks' messages, in the order of ranks."""
        assert self._message is not None
        return [self._message.read(_part(self._back, place.back)) for place in self._messages]


def _part(flat: Tensor, span: Span) -> Tensor:
    return flat[span.start : span.stop]


def _travelling(parameter: Tensor, begin: int, place: Place, run: Span) -> Travelling:
    there, back = (Span(span.start + run.start, span.start + run.stop) for span in (place.there, place.back))
    return Travelling(parameter, begin, place.owner, there, back)

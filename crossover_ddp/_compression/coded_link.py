"""A codec as a link around a link, so that every journey can travel coded without knowing it.

[Note: residuals] A rank keeps what its messages to owners do not hold, in units of its gradient; an owner what its
message to all does not hold, in units of the mean, or of what it makes of the mean. After each step, for each element:
what all ranks apply = mean of gradients + mean of what ranks had kept + what the owner had kept − the same of what is
kept now. An owner does not send to itself: its own addend enters the sum exact.

[Note: without a look] Nothing here reads a value on the host, which launches all of this while the device is still at
earlier work: messages have one size, and what is not finite, or not in use, shows in tensors.
"""

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Final, NamedTuple

import torch
from torch import Tensor

from crossover_ddp._ddp.contents import Run
from crossover_ddp._ddp.layout import Span
from crossover_ddp._engine.links import Layout, Link, LinkAround, parts

from .codec import Codec, PerPair, Scratch

_ALIGNED: Final = 16
# Shares of NCCL's collectives that begin elsewhere are slow.
_ALIGNED_BY_COLLECTIVES: Final = 128
# A parameter of one dimension is a bias or a scale: few elements, and the model reacts to each.
_CODED_DIMENSIONS: Final = 2


class Part(NamedTuple):
    """What one owner has of a buffer, in the order of its values: what is coded, then what travels exact."""

    coded: list[Run]
    exact: list[Span]

    @property
    def spans(self) -> list[Span]:
        return [*[run.span for run in self.coded], *self.exact]

    def slots(self, multiple: int) -> list[Span]:
        """Return where the spans are when coded runs begin at multiples, one behind the other, and the rest follows."""
        room = [padded(run.span.numel, multiple) for run in self.coded]
        starts = accumulate([*room, *[span.numel for span in self.exact]], initial=0)
        return [
            Span(start, start + span.numel) for start, span in zip(starts, self.spans, strict=False)
        ]


def padded(numel: int, multiple: int) -> int:
    return -(-numel // multiple) * multiple


def parts_of(runs: Sequence[Run], layout: Sequence[int]) -> list[Part]:
    """Cut all that travels by owner into what is coded and what travels exact."""
    found, start = [], 0
    for numel in layout:
        part, stop = Part([], []), start + numel
        for parameter, begin, span in runs:
            own = Span(max(span.start, start), min(span.stop, stop))
            if own.start >= own.stop:
                continue
            if parameter.dim() >= _CODED_DIMENSIONS:
                part.coded.append(Run(parameter, begin + own.start - span.start, own))
            else:
                is_next = part.exact and part.exact[-1].stop == own.start
                part.exact.append(Span(part.exact.pop().start if is_next else own.start, own.stop))
        found.append(part)
        start = stop
    return found


class Sent(NamedTuple):
    """The bytes of messages, and how many each rank has of them."""

    tensor: Tensor
    layout: Layout


class _Message(NamedTuple):
    """Exact values in float32, and behind them the bytes of a codec."""

    codec: Codec
    exact: Tensor
    coded: Tensor


class CodedLink(LinkAround):
    """One bucket's messages to owners, who add what they mean, and to all, of the mean or of what owners make of it.

    It stays from step to step, around each step's link, with what the messages leave behind, see [Note: residuals].
    Whole gradients are encoded, added in float32, and divided then. After `reduce_scatter` own parts are what all ranks
    will decode; where owners have work they are the mean until `all_gather`.

    ``scratch``: memory for a moment. ``has_work``: owners send something else than the mean. ``leaves_unused``: a
    parameter whose gradients are all zero may have none.
    """

    _is_exact = False

    def __init__(
        self,
        link: Link,
        codecs: tuple[PerPair, Codec],
        parameters: Sequence[Tensor],
        parts: Sequence[Part],
        device: torch.device,
        scratch: Scratch,
        has_work: bool = False,
        leaves_unused: bool = False,
    ) -> None:
        super().__init__(link)
        (push, pull), rank, ranks = codecs, link.rank, range(len(parts))
        self.parameters, self.parts, self._has_work = list(parameters), parts, has_work
        self._leaves_unused, self._scratch = leaves_unused, scratch
        self._multiple = multiple = math.lcm(*[codec.multiple for codec in (*push.all(), pull)])
        self._slots = [part.slots(multiple) for part in parts]
        # Of each part's values those that are coded, and all of them. The residual of what travels exact stays 0.
        self._coded = [
            sum(padded(run.span.numel, multiple) for run in part.coded) for part in parts
        ]
        exact = [sum(span.numel for span in part.exact) for part in parts]
        sizes = map(sum, zip(self._coded, exact, strict=True))
        self._kept = [torch.zeros(size, dtype=torch.float32, device=device) for size in sizes]
        self._addend = torch.empty_like(self._kept[rank])
        # CUDA multiplies by the reciprocal of a number of the host: other bits than the CPU's for three ranks or more.
        self._divisor = torch.full((), float(len(parts)), dtype=torch.float32, device=device)
        # Their memory stays: a device's other stream may still read the last step's when the next one begins.
        others = [peer for peer in ranks if peer != rank]
        made = push.between
        self._outgoing, self._sent = self._messages(
            {peer: (peer, made(rank, peer)) for peer in others}
        )
        self._incoming, self._received = self._messages(
            {peer: (rank, made(peer, rank)) for peer in others}
        )
        self._gather, self._returned = self._messages({owner: (owner, pull) for owner in ranks})

    def _messages(self, made: dict[int, tuple[int, Codec]]) -> tuple[Sent, dict[int, _Message]]:
        """Return memory for messages, and these by peer; ``made``: whose part each is about, and what encodes it."""
        aligned = _ALIGNED_BY_COLLECTIVES if self.in_program_order else _ALIGNED
        exact = [
            4 * (len(kept) - coded) for kept, coded in zip(self._kept, self._coded, strict=True)
        ]
        heads = [padded(nbytes, _ALIGNED) for nbytes in exact]
        ends = {
            peer: heads[of] + codec.nbytes(self._coded[of]) for peer, (of, codec) in made.items()
        }
        sizes = [padded(ends.get(peer, 0), aligned) for peer in range(len(self.parts))]
        if self.in_program_order and len(made) == len(sizes):  # one all-gather has equal parts
            sizes = [max(sizes)] * len(sizes)
        # Zeros, not empty: what padding holds should not be what the process had there before.
        sent = Sent(torch.zeros(sum(sizes), dtype=torch.uint8, device=self._addend.device), sizes)
        messages = {}
        for peer, (owner, codec) in made.items():
            memory = parts(*sent)[peer]
            values = memory[: exact[owner]].view(torch.float32)
            messages[peer] = _Message(codec, values, memory[heads[owner] : ends[peer]])
        return sent, messages

    @property
    def nbytes(self) -> int:
        return sum(kept.nbytes for kept in self._kept)

    def kept(self) -> list[tuple[Tensor, Tensor]]:
        """Return each coded parameter with its whole residual, flat, in units of this rank's gradient."""
        # An owner's, of a mean, counts as often as there are ranks; of something else it is left out.
        of_owner = 0 if self._has_work else len(self.parts)
        found: dict[int, tuple[Tensor, Tensor]] = {}
        for owner, part in enumerate(self.parts):
            factor = of_owner if owner == self.rank else 1
            for run, piece in zip(part.coded, self._views(self._kept[owner], owner), strict=False):
                numel = run.parameter.numel() * (2 if run.parameter.is_complex() else 1)
                whole = run.parameter, piece.new_zeros(numel)
                _, residual = found.setdefault(id(run.parameter), whole)
                residual[run.begin : run.begin + len(piece)] = piece * factor
        return [*found.values()]

    def scale(self, factor: float | Tensor) -> None:
        for kept in self._kept:
            kept.mul_(factor)

    def drained(self, link: Link) -> "CodedLink":
        """Let the next step travel exact; owners' residuals go with what they make."""
        self._link, self._is_exact = link, True
        return self

    def encode(self, flat: Tensor, link: Link) -> None:
        """Write the messages to the owners, of ``flat``, which will hold what they send back; ``link`` carries both."""
        self._flat, self._link = flat, link
        for owner, message in self._sent.items():
            self._encode(self._pieces(owner), owner, message, self._borrowed(owner))
        self._collect(self._pieces(self.rank), self.rank, self._addend)  # aside

    async def reduce_scatter(self, flat: Tensor, layout: Layout) -> Tensor:
        if self._is_exact:
            return await super().reduce_scatter(flat, layout)
        await self.all_to_all(*self._outgoing, *self._incoming)
        await self.compute()
        mean = self._mean()
        if self._has_work:
            self._write(self.rank, mean)
        else:
            self._encode_own(mean)
        return parts(flat, layout)[self.rank]

    async def all_gather(self, flat: Tensor, layout: Layout) -> None:
        if self._is_exact:
            own = self._kept[self.rank]
            if own.is_cuda:  # the host lets go of it before the device has read it
                own.record_stream(torch.cuda.current_stream(own.device))
            for run, kept in zip(
                self.parts[self.rank].coded, self._views(own, self.rank), strict=False
            ):
                flat[slice(*run.span)].add_(kept)
            await super().all_gather(flat, layout)
            return
        if self._has_work:
            self._collect(self._pieces(self.rank), self.rank, self._addend)
            self._encode_own(self._addend)
        await super().all_gather(*self._gather)
        for owner in range(self.size):
            if owner != self.rank:
                self._unload(owner)

    def sent_bytes(self, flat: Tensor) -> tuple[int, int]:
        """Return what this rank sends in both halves, and would if it were exact."""
        exact = flat.numel() * flat.itemsize * (self.size - 1) // self.size
        to_owners, to_all = (
            len(self._outgoing.tensor),
            (self.size - 1) * self._gather.layout[self.rank],
        )
        return to_owners + to_all, 2 * exact

    def _mean(self) -> Tensor:
        # Two addends may change places, so the first two ranks add to their own.
        own, is_begun = self._addend, self.rank <= 1
        values = own if is_begun else self._borrowed(self.rank).zero_()
        coded, exact = self._halves(values, self.rank)
        for rank in range(self.size):
            if rank != self.rank:
                message = self._received[rank]
                exact.add_(message.exact)
                if len(coded):
                    message.codec.add_decoded(message.coded, coded)
            elif not is_begun:
                values.add_(own)
        return values.div_(self._divisor)

    def _encode_own(self, values: Tensor) -> None:
        """Write the message to all, and decode it: all ranks have the same, the owner, too."""
        self._encode(self._views(values, self.rank), self.rank, self._returned[self.rank], values)
        self._unload(self.rank)

    def _unload(self, owner: int) -> None:
        """Decode an owner's message to all into the bucket."""
        message, values = self._returned[owner], self._borrowed(owner)
        coded, exact = self._halves(values, owner)
        exact.copy_(message.exact)
        if len(coded):
            if (decode := getattr(message.codec, "decode", None)) is not None:
                decode(message.coded, coded)
            else:
                message.codec.add_decoded(message.coded, coded.zero_())
        self._write(owner, values)

    def _encode(
        self, pieces: Sequence[Tensor], owner: int, message: _Message, values: Tensor
    ) -> None:
        """Encode ``pieces`` plus residuals, in the memory of ``values``; residuals of what is all zero stay.

        A parameter that is used nowhere keeps its gradient of None, so what travelled for it would be lost.
        """
        (coded, exact), (kept, _) = (
            self._halves(values, owner),
            self._halves(self._kept[owner], owner),
        )
        coded_pieces = pieces[: len(self.parts[owner].coded)] if self._leaves_unused else ()
        unused = [each.any().logical_not() for each in coded_pieces]
        self._collect(pieces, owner, values, self._kept[owner])
        message.exact.copy_(exact)
        if not len(coded):
            return
        before = kept.clone() if unused else kept
        for piece, is_unused in zip(self._views(values, owner), unused, strict=False):
            piece.masked_fill_(is_unused, 0)
        message.codec.encode(coded, message.coded, kept)
        for slot, is_unused in zip(self._slots[owner], unused, strict=False):
            piece = kept[slice(*slot)]
            torch.where(is_unused, before[slice(*slot)], piece, out=piece)

    # Values of one owner's part, padded: what is coded, and behind it what travels exact.

    def _borrowed(self, owner: int) -> Tensor:
        return self._scratch.take(len(self._kept[owner]), self._addend.device)

    def _halves(self, values: Tensor, owner: int) -> tuple[Tensor, Tensor]:
        return values[: self._coded[owner]], values[self._coded[owner] :]

    def _views(self, values: Tensor, owner: int) -> list[Tensor]:
        return _places(values, self._slots[owner])

    def _pieces(self, owner: int) -> list[Tensor]:
        return _places(self._flat, self.parts[owner].spans)

    def _write(self, owner: int, values: Tensor) -> None:
        if pieces := self._pieces(owner):
            torch._foreach_copy_(pieces, self._views(values, owner))

    def _collect(
        self, pieces: Sequence[Tensor], owner: int, out: Tensor, kept: Tensor | None = None
    ) -> None:
        """Write ``pieces``, and what is ``kept`` of them, to ``out``, and zeros between them."""
        for slot, _ in zip(self._slots[owner], self.parts[owner].coded, strict=False):
            out[slot.stop : padded(slot.stop, self._multiple)].zero_()
        places = self._views(out, owner)
        if kept is not None:
            for piece, residual, place in zip(
                pieces, self._views(kept, owner), places, strict=True
            ):
                torch.add(piece, residual, out=place)
        elif places:
            torch._foreach_copy_(places, list(pieces))


def _places(values: Tensor, spans: Sequence[Span]) -> list[Tensor]:
    return [values[start:stop] for start, stop in spans]

"""A codec as a link around a link, so that every journey can travel coded without knowing it.

[Note: residuals] A rank keeps what its messages to owners do not hold, in units of its gradient; an owner what its
message to all does not hold, in units of the mean, or of what it makes of the mean. After each step, for each element:
what all ranks apply = mean of gradients + mean of what ranks had kept + what the owner had kept − the same of what is
kept now. An owner does not send to itself: its own addend enters the sum exact.

[Note: without a look] By a backend's own collectives, all of this is launched by the hook's thread, in the program's
order, while the device is still at earlier work. So nothing here reads a value on the host: messages have one size, and
what is not finite, or not in use, shows in tensors.
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
    """What one owner has of a buffer; messages hold it in this order."""

    coded: list[Run]
    exact: list[Span]

    def slots(self, multiple: int) -> list[Span]:
        """Return where coded runs are when each begins at a multiple, one behind the other."""
        numels = [run.span.numel for run in self.coded]
        starts = accumulate([padded(numel, multiple) for numel in numels], initial=0)
        return [Span(start, start + numel) for start, numel in zip(starts, numels, strict=False)]


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

    It stays from step to step, around each step's link, with what the messages leave behind, see [Note: residuals]. The
    codes are those of whole gradients, are added in float32, and divided then. Own parts are what all ranks will decode
    as soon as `reduce_scatter` is done, but where owners have work: there they are the mean until `all_gather`.

    ``link`` carries the first messages. ``scratch`` is memory for a moment, of all buckets. ``has_work``: owners send
    something else than the mean. ``leaves_unused``: a parameter whose gradients are all zero may have none.
    """

    def __init__(
        self,
        link: Link,
        codecs: tuple[PerPair, Codec],
        parameters: Sequence[Tensor],
        parts: Sequence[Part],
        device: torch.device,
        scratch: Scratch,
        *,
        has_work: bool = False,
        leaves_unused: bool = False,
    ) -> None:
        super().__init__(link)
        (push, pull), rank, ranks = codecs, link.rank, range(len(parts))
        self.parameters, self.parts, self._has_work = list(parameters), parts, has_work
        self._leaves_unused, self._scratch = leaves_unused, scratch
        self._multiple = math.lcm(*[codec.multiple for codec in (*push.all(), pull)])
        self._slots = [part.slots(self._multiple) for part in parts]
        numels = [padded(slots[-1].stop, self._multiple) if slots else 0 for slots in self._slots]
        self._kept = [torch.zeros(numel, device=device) for numel in numels]
        self._addend = torch.empty(numels[rank], device=device)
        self._exact_addend = torch.empty(sum(span.numel for span in parts[rank].exact), device=device)
        # CUDA multiplies by the reciprocal of a number of the host: other bits than the CPU's for three ranks or more.
        self._divisor = torch.full((), float(len(parts)), device=device)
        # Their memory stays: a device's other stream may still read the last step's when the next one begins.
        others = [peer for peer in ranks if peer != rank]
        made = push.between
        self._outgoing, self._sent = self._messages({peer: (peer, made(rank, peer)) for peer in others})
        self._incoming, self._received = self._messages({peer: (rank, made(peer, rank)) for peer in others})
        self._gather, self._returned = self._messages({owner: (owner, pull) for owner in ranks})

    def _messages(self, made: dict[int, tuple[int, Codec]]) -> tuple[Sent, dict[int, _Message]]:
        """Return memory for messages, and these by peer.

        ``made``: by peer, whose part the message is about, and what encodes it.
        """
        aligned = _ALIGNED_BY_COLLECTIVES if self.in_program_order else _ALIGNED
        exact = [4 * sum(span.numel for span in part.exact) for part in self.parts]
        heads = [padded(nbytes, _ALIGNED) for nbytes in exact]
        ends = {peer: heads[of] + codec.nbytes(len(self._kept[of])) for peer, (of, codec) in made.items()}
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
        """Return each coded parameter with its whole residual, flat, in units of this rank's gradient.

        An owner's residual is part of a mean; so many times as there are ranks, it is part of this rank's gradient.
        Where owners send something else than the mean, theirs is left out.
        """
        of_owner = 0 if self._has_work else len(self.parts)
        found: dict[int, tuple[Tensor, Tensor]] = {}
        for owner, part in enumerate(self.parts):
            factor = of_owner if owner == self.rank else 1
            for run, piece in zip(part.coded, self._views(self._kept[owner], owner), strict=True):
                numel = run.parameter.numel() * (2 if run.parameter.is_complex() else 1)
                whole = run.parameter, piece.new_zeros(numel)
                _, residual = found.setdefault(id(run.parameter), whole)
                residual[run.begin : run.begin + len(piece)] = piece * factor
        return [*found.values()]

    def scale(self, factor: float | Tensor) -> None:
        for kept in self._kept:
            kept.mul_(factor)

    def add_own(self, flat: Tensor) -> None:
        """Add what this owner's messages to all have left out, where owners have work, to what it has made now."""
        own = self._kept[self.rank]
        if own.is_cuda:  # the host lets go of it before the device has read it
            own.record_stream(torch.cuda.current_stream(own.device))
        pieces = _coded_places(flat, self.parts[self.rank])
        for piece, kept in zip(pieces, self._views(own, self.rank), strict=True):
            piece.add_(kept)

    # --- messages --------------------------------------------------------------------------------------------

    def encode(self, flat: Tensor, link: Link) -> None:
        """Write the messages to the owners. On the hook's thread, when the last step's messages are decoded.

        Messages to owners are made of ``flat``, and owners' messages fill it; ``link`` carries this step's.
        """
        self._flat, self._link = flat, link
        for owner, message in self._sent.items():
            pieces = _coded_places(flat, self.parts[owner])
            values = self._scratch.take(len(self._kept[owner]), flat.device)
            self._collect(pieces, owner, values, self._kept[owner])
            self._encode(values, owner, message, self._unused(pieces))
            self._copy_exact(owner, message.exact)
        self._collect_own(self._exact_addend)

    async def reduce_scatter(self, flat: Tensor, layout: Layout) -> Tensor:
        await self.all_to_all(*self._outgoing, *self._incoming)
        await self.compute()
        rank, exact = self.rank, self._returned[self.rank].exact
        values = self._mean(exact)
        if self._has_work:
            self._write(rank, exact, values)
        else:
            self._encode_own(values)
        return parts(flat, layout)[rank]

    async def all_gather(self, flat: Tensor, layout: Layout) -> None:
        if self._has_work:
            self._collect_own(self._returned[self.rank].exact)
            self._encode_own(self._addend)
        await super().all_gather(*self._gather)
        for owner in range(self.size):
            if owner != self.rank:
                self._unload(owner)

    def sent_bytes(self, flat: Tensor) -> tuple[int, int]:
        """Return what this rank sends in both halves, and would if it were exact."""
        exact = flat.numel() * flat.itemsize * (self.size - 1) // self.size
        to_owners, to_all = len(self._outgoing.tensor), (self.size - 1) * self._gather.layout[self.rank]
        return to_owners + to_all, 2 * exact

    def _mean(self, exact: Tensor) -> Tensor:
        """Return the mean over the ranks of what is coded, and write that of the rest to ``exact``."""
        # Two addends may change places, so the first two ranks add to their own.
        is_begun = self.rank <= 1
        own = self._addend
        values = own if is_begun else self._scratch.take(len(own), own.device).zero_()
        exact.zero_()
        for rank in range(len(self.parts)):
            if rank != self.rank:
                message = self._received[rank]
                exact.add_(message.exact)
                if len(values):
                    message.codec.add_decoded(message.coded, values)
                continue
            exact.add_(self._exact_addend)
            if not is_begun:
                values.add_(own)
        exact.div_(self._divisor)
        return values.div_(self._divisor)

    def _encode_own(self, values: Tensor) -> None:
        """Write the message to all, and decode it: all ranks have the same, the owner, too."""
        rank, unused = self.rank, self._unused(self._views(values, self.rank))
        self._encode(values.add_(self._kept[rank]), rank, self._returned[rank], unused)
        self._unload(rank)

    def _unload(self, owner: int) -> None:
        """Decode an owner's message to all into the bucket."""
        message, values = self._returned[owner], self._scratch.take(len(self._kept[owner]), self._flat.device)
        if self.parts[owner].coded:
            if (decode := getattr(message.codec, "decode", None)) is not None:
                decode(message.coded, values)
            else:
                message.codec.add_decoded(message.coded, values.zero_())
        self._write(owner, message.exact, values)

    def _write(self, owner: int, exact: Tensor, values: Tensor) -> None:
        part = self.parts[owner]
        _copy(_places(self._flat, part.exact), _split(exact, part))
        _copy(_coded_places(self._flat, part), self._views(values, owner))

    # --- values of one owner's part, padded --------------------------------------------------------------------

    def _views(self, values: Tensor, owner: int) -> list[Tensor]:
        return _places(values, self._slots[owner])

    def _collect(self, pieces: Sequence[Tensor], owner: int, out: Tensor, kept: Tensor | None = None) -> None:
        """Write ``pieces``, and what is ``kept`` of them, to ``out``, and zeros between them."""
        for slot in self._slots[owner]:
            if slot.stop % self._multiple:
                out[slot.stop : padded(slot.stop, self._multiple)].zero_()
        if kept is None:
            _copy(self._views(out, owner), pieces)
            return
        views = self._views(kept, owner), self._views(out, owner)
        for piece, residual, place in zip(pieces, *views, strict=True):
            torch.add(piece, residual, out=place)

    def _collect_own(self, exact: Tensor) -> None:
        """Keep what this rank owns aside, and write what travels exact of it to ``exact``."""
        self._collect(_coded_places(self._flat, self.parts[self.rank]), self.rank, self._addend)
        self._copy_exact(self.rank, exact)

    def _copy_exact(self, owner: int, out: Tensor) -> None:
        part = self.parts[owner]
        _copy(_split(out, part), _places(self._flat, part.exact))

    def _unused(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return for each gradient whether it is all zero, if that matters."""
        return [each.any().logical_not() for each in gradients] if self._leaves_unused else []

    def _encode(self, values: Tensor, owner: int, message: _Message, unused: Sequence[Tensor]) -> None:
        """Encode gradients plus residuals; those of ``unused`` stay where they are.

        A parameter that is used nowhere keeps its gradient of None, so what travelled for it would be lost.
        """
        kept = self._kept[owner]
        if not len(values):
            return
        before = kept.clone() if unused else kept
        for piece, is_unused in zip(self._views(values, owner), unused, strict=False):
            piece.masked_fill_(is_unused, 0)
        message.codec.encode(values, message.coded, kept)
        views = self._views(kept, owner), self._views(before, owner)
        for piece, old, is_unused in zip(*views, unused, strict=False):
            torch.where(is_unused, old, piece, out=piece)


class DrainedLink(LinkAround):
    """A link for the exact step of a bucket whose owners have work: their residuals go with what they make."""

    def __init__(self, link: Link, coded: CodedLink) -> None:
        super().__init__(link)
        self._coded = coded

    async def all_gather(self, flat: Tensor, layout: Layout) -> None:
        self._coded.add_own(flat)
        await super().all_gather(flat, layout)


def _places(values: Tensor, spans: Sequence[Span]) -> list[Tensor]:
    return [values[start:stop] for start, stop in spans]


def _coded_places(flat: Tensor, part: Part) -> list[Tensor]:
    return _places(flat, [run.span for run in part.coded])


def _copy(to: Sequence[Tensor], of: Sequence[Tensor]) -> None:
    if to:
        torch._foreach_copy_(list(to), list(of))


def _split(exact: Tensor, part: Part) -> list[Tensor]:
    return [*exact.split_with_sizes([stop - start for start, stop in part.exact])] if part.exact else []

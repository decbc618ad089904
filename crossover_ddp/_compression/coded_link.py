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
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Final, NamedTuple

import torch
from torch import Tensor

from crossover_ddp._ddp.contents import Content, Run
from crossover_ddp._ddp.layout import Span
from crossover_ddp._engine.links import Layout, Link, LinkAround, parts

from .choice import Codecs
from .codec import Codec, Scratch

_ALIGNED: Final = 16
# Shares of NCCL's collectives that begin elsewhere are slow.
_ALIGNED_BY_COLLECTIVES: Final = 128
# A parameter of one dimension is a bias or a scale: few elements, and the model reacts to each.
_CODED_DIMENSIONS: Final = 2


class Part(NamedTuple):
    """What one owner has of a buffer; messages hold it in this order."""

    coded: Sequence[Run]
    exact: Sequence[Span]

    @property
    def exact_numel(self) -> int:
        return sum(span.stop - span.start for span in self.exact)

    def slots(self, multiple: int) -> list[Span]:
        """Return where coded runs are when each begins at a multiple, one behind the other."""
        numels = [run.span.stop - run.span.start for run in self.coded]
        starts = accumulate([padded(numel, multiple) for numel in numels], initial=0)
        return [Span(start, start + numel) for start, numel in zip(starts, numels, strict=False)]


def padded(numel: int, multiple: int) -> int:
    return -(-numel // multiple) * multiple


def runs_of(contents: Sequence[Content], layout: Sequence[int]) -> list[Run]:
    """List what of a bucket may be rounded, in its order."""
    runs, start = [], 0
    for owner, numel in enumerate(layout):
        for parameter, _, span in contents:
            begin, stop = max(span.start, start), min(span.stop, start + numel)
            if begin < stop and parameter.dim() >= _CODED_DIMENSIONS:
                runs.append(Run(parameter, begin - span.start, owner, Span(begin, stop)))
        start += numel
    return runs


def parts_of(layout: Sequence[int], runs: Sequence[Run]) -> list[Part]:
    """Cut a buffer by owner into ``runs``, which are coded, and the rest, which travels exact."""
    parts, start = [], 0
    for owner, numel in enumerate(layout):
        stop, exact = start + numel, []
        coded = [run for run in runs if run.owner == owner]
        for span in (*[run.span for run in coded], Span(stop, stop)):
            if start < span.start:
                exact.append(Span(start, span.start))
            start = span.stop
        parts.append(Part(coded, exact))
    return parts


class Sent(NamedTuple):
    """The bytes of messages, and how many each rank has of them."""

    tensor: Tensor
    layout: Layout


class _Message:
    """Exact values in float32, then the codec's bytes."""

    def __init__(self, exact_numel: int, codec: Codec, numel: int, memory: Tensor) -> None:
        head = padded(4 * exact_numel, _ALIGNED)
        self.codec = codec
        self.exact = memory[: 4 * exact_numel].view(torch.float32)
        self.coded = memory[head : head + codec.nbytes(numel)]

    def decode(self, out: Tensor) -> None:
        decode = getattr(self.codec, "decode", None)
        if decode is None:
            self.codec.add_decoded(self.coded, out.zero_())
        else:
            decode(self.coded, out)


class CodedLink(LinkAround):
    """One bucket's messages to owners, who add what they mean, and to all, of the mean or of what owners make of it.

    It stays from step to step, around each step's link, with what the messages leave behind, see [Note: residuals]. The
    codes are those of whole gradients, are added in float32, and divided then. Own parts are what all ranks will decode
    as soon as `reduce_scatter` is done, but where owners have work.

    Args:
        link: that carries the first messages.
        codecs: for both halves.
        parameters: of the bucket.
        parts: what is coded, by owner; exact parts may be others in each step.
        device: of the gradients.
        has_work: owners send something else than the mean.
        leaves_unused: a parameter whose gradients are all zero may have none.
        scratch: memory for a moment, of all buckets.
    """

    def __init__(
        self,
        link: Link,
        codecs: Codecs,
        parameters: Sequence[Tensor],
        parts: Sequence[Part],
        device: torch.device,
        scratch: Scratch,
        *,
        has_work: bool = False,
        leaves_unused: bool = False,
    ) -> None:
        super().__init__(link)
        self.parameters, self.parts, self.has_work = list(parameters), parts, has_work
        self._codecs, self._leaves_unused, self._scratch = codecs, leaves_unused, scratch
        self._multiple = math.lcm(*(codec.multiple for codec in codecs.all()))
        self._slots = [part.slots(self._multiple) for part in parts]
        numels = [padded(slots[-1].stop, self._multiple) if slots else 0 for slots in self._slots]
        self._kept = [torch.zeros(numel, device=device) for numel in numels]
        self._addend = torch.empty(numels[link.rank], device=device)
        # CUDA multiplies by the reciprocal of a number of the host: other bits than the CPU's for three ranks or more.
        self._divisor = torch.full((), float(len(parts)), device=device)
        # Zeros at first, not empty: what padding holds should not be what the process had there before.
        self._memory = [torch.zeros(0, dtype=torch.uint8, device=device)] * 3
        self._laid_out: list[Sequence[Span]] | None = None  # exact parts

    @property
    def nbytes(self) -> int:
        return sum(kept.nbytes for kept in self._kept)

    @property
    def is_kept(self) -> bool:
        return any(bool(kept.any()) for kept in self._kept)

    def is_of(self, parameters: Sequence[Tensor], parts: Sequence[Part] | None = None) -> bool:
        """Tell whether it has the same parameters, and coded runs of the same lengths."""
        slots = self._slots if parts is None else [part.slots(self._multiple) for part in parts]
        return [*map(id, self.parameters)] == [*map(id, parameters)] and slots == self._slots

    def kept(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each coded parameter with its whole residual, flat, in units of this rank's gradient.

        An owner's residual is part of a mean; so many times as there are ranks, it is part of this rank's gradient.
        Where owners send something else than the mean, theirs is left out.
        """
        whole: dict[int, list[tuple[Run, Tensor]]] = {}
        for owner, part in enumerate(self.parts):
            factor = 1 if owner != self.rank else 0 if self.has_work else len(self.parts)
            for run, piece in zip(part.coded, self._views(self._kept[owner], owner), strict=True):
                whole.setdefault(id(run.parameter), []).append((run, piece * factor))
        for found in whole.values():
            residual = found[0][1].new_zeros(max(run.begin + len(piece) for run, piece in found))
            for run, piece in found:
                residual[run.begin : run.begin + len(piece)] = piece
            yield found[0][0].parameter, residual

    def scale(self, factor: float | Tensor) -> None:
        for kept in self._kept:
            kept.mul_(factor)

    def add_own(self, flat: Tensor, part: Part) -> None:
        """Add what this owner's messages to all have left out, where owners have work, to what it has made now."""
        if part.coded:
            torch._foreach_add_(_coded_places(flat, part), self._views(self._kept[self.rank], self.rank))

    # --- messages --------------------------------------------------------------------------------------------

    def encode(self, flat: Tensor, parts: Sequence[Part], link: Link) -> None:
        """Write the messages to the owners. On the hook's thread, when the last step's messages are decoded.

        Messages to owners are made of ``flat``, and owners' messages fill it; ``link`` carries this step's.
        """
        self._flat, self.parts, self._link = flat, parts, link
        self._lay_out()
        for owner, message in self._sent.items():
            pieces = _coded_places(flat, parts[owner])
            values = self._scratch.take(len(self._kept[owner]), flat.device)
            self._collect(pieces, owner, values, self._kept[owner])
            self._encode(values, owner, message, self._unused(pieces))
            _copy(_split(message.exact, parts[owner]), _places(flat, parts[owner].exact))
        self._collect_own(self._exact_addend)

    def _lay_out(self) -> None:
        """Give each message its place; the same as in the last step, if exact parts are."""
        wanted, rank, between = [part.exact for part in self.parts], self.rank, self._codecs.between
        if wanted == self._laid_out:
            return
        self._laid_out = wanted
        # Not made in each step: a device's other stream may still read the last one's.
        self._exact_addend = self._addend.new_empty(self.parts[rank].exact_numel)
        ranks = range(len(self.parts))
        others = [peer for peer in ranks if peer != rank]
        self._outgoing, self._sent = self._messages(0, {peer: (peer, between(rank, peer)) for peer in others})
        self._incoming, self._received = self._messages(
            1, {peer: (rank, between(rank, peer)) for peer in others}
        )
        self._gather, self._returned = self._messages(
            2, {owner: (owner, self._codecs.pull) for owner in ranks}
        )

    def _messages(self, place: int, made: dict[int, tuple[int, Codec]]) -> tuple[Sent, dict[int, _Message]]:
        """Return memory for messages, that of ``place`` again, and these by peer.

        ``made``: by peer, whose part the message is about, and what encodes it.
        """
        aligned = _ALIGNED_BY_COLLECTIVES if self.in_program_order else _ALIGNED
        sizes, memory = [0] * len(self.parts), self._memory[place]
        for peer, (owner, codec) in made.items():
            head = padded(4 * self.parts[owner].exact_numel, _ALIGNED)
            sizes[peer] = padded(head + codec.nbytes(len(self._kept[owner])), aligned)
        if self.in_program_order and len(made) == len(sizes):  # one all-gather has equal parts
            sizes = [max(sizes)] * len(sizes)
        if len(memory) < sum(sizes):
            memory = self._memory[place] = memory.new_zeros(sum(sizes))
        sent = Sent(memory[: sum(sizes)], sizes)
        places = parts(*sent)
        return sent, {
            peer: _Message(self.parts[owner].exact_numel, codec, len(self._kept[owner]), places[peer])
            for peer, (owner, codec) in made.items()
        }

    async def reduce_scatter(self, flat: Tensor, layout: Layout) -> Tensor:
        await self.all_to_all(*self._outgoing, *self._incoming)
        await self.compute()
        part, rank = self.parts[self.rank], self.rank
        values, exact = self._mean()
        if self.has_work:
            _copy(_coded_places(self._flat, part), self._views(values, rank))
            _copy(_places(self._flat, part.exact), _split(exact, part))
        else:
            self._returned[rank].exact.copy_(exact)
            self._encode_own(values)
        return parts(flat, layout)[rank]

    async def all_gather(self, flat: Tensor, layout: Layout) -> None:
        if self.has_work:
            self._collect_own(self._returned[self.rank].exact)
            self._encode_own(self._addend)
        await super().all_gather(*self._gather)
        for owner in range(self.size):
            if owner != self.rank:
                self._unload(owner)

    def sent_bytes(self, kind: str, flat: Tensor) -> tuple[int, int]:
        """See `Link`."""
        exact = flat.numel() * flat.itemsize * (self.size - 1) // self.size
        to_owners, to_all = len(self._outgoing.tensor), (self.size - 1) * self._gather.layout[self.rank]
        return to_owners if kind == "reduce_scatter" else to_all, exact

    def _encode_own(self, values: Tensor) -> None:
        """Write the message to all, and decode it into the bucket: all ranks have the same, the owner, too."""
        unused = self._unused(self._views(values, self.rank))
        self._encode(values.add_(self._kept[self.rank]), self.rank, self._returned[self.rank], unused)
        self._unload(self.rank)

    def _mean(self) -> tuple[Tensor, Tensor]:
        """Return the mean over the ranks of what is coded, and of what is exact."""
        # Two addends may change places, so the first two ranks add to their own.
        is_begun = self.rank <= 1
        own = self._addend
        values = own if is_begun else self._scratch.take(len(own), own.device).zero_()
        exact = torch.zeros_like(self._exact_addend)
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
        return values.div_(self._divisor), exact.div_(self._divisor)

    def _unload(self, owner: int) -> None:
        part, flat, message = self.parts[owner], self._flat, self._returned[owner]
        _copy(_places(flat, part.exact), _split(message.exact, part))
        if part.coded:
            message.decode(values := self._scratch.take(len(self._kept[owner]), flat.device))
            _copy(_coded_places(flat, part), self._views(values, owner))

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
        for piece, residual, place in zip(
            pieces, self._views(kept, owner), self._views(out, owner), strict=True
        ):
            torch.add(piece, residual, out=place)

    def _collect_own(self, exact: Tensor) -> None:
        """Keep what this rank owns aside, and write what travels exact of it to ``exact``."""
        part = self.parts[self.rank]
        self._collect(_coded_places(self._flat, part), self.rank, self._addend)
        _copy(_split(exact, part), _places(self._flat, part.exact))

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


def _places(values: Tensor, spans: Sequence[Span]) -> list[Tensor]:
    return [values[start:stop] for start, stop in spans]


def _coded_places(flat: Tensor, part: Part) -> list[Tensor]:
    return _places(flat, [run.span for run in part.coded])


def _copy(to: Sequence[Tensor], of: Sequence[Tensor]) -> None:
    if to:
        torch._foreach_copy_(list(to), list(of))


def _split(exact: Tensor, part: Part) -> list[Tensor]:
    return [*exact.split_with_sizes([stop - start for start, stop in part.exact])] if part.exact else []


class DrainedLink(LinkAround):
    """A link for the exact step of a bucket whose owners have work: their residuals go with what they make."""

    def __init__(self, link: Link, coded: CodedLink, part: Part) -> None:
        super().__init__(link)
        self._coded, self._part = coded, part

    async def all_gather(self, flat: Tensor, layout: Layout) -> None:
        self._coded.add_own(flat, self._part)
        await super().all_gather(flat, layout)

"""One bucket's messages: what a rank encodes, what an owner sums and encodes again, what all decode.

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
from typing import Final, NamedTuple

import torch

from crossover_ddp._ddp.contents import Sharded
from crossover_ddp._ddp.layout import Layout

from .choice import Codecs
from .codec import Codec, PieceWriter
from .cut import OwnedSpan, Part, padded
from .half import Whole
from .scratch import MessageMemory, Scratch

_WHOLE: Final = Codecs(Whole(), Whole())
_ALIGNED: Final = 16
# Shares of NCCL's collectives that begin elsewhere are slow.
_ALIGNED_BY_COLLECTIVES: Final = 128
# Elements of a segment, on average, from which one operation for each costs less than another pass over memory.
_LARGE: Final = 1 << 16


class Buffers(NamedTuple):
    """What the messages of one step are about.

    Args:
        flat: messages to owners are made of it, and owners' messages fill it.
        parts: its parts, by owner.
    """

    flat: torch.Tensor
    parts: Sequence[Part]


class _Message:
    """Exact values in float32, then the codec's bytes."""

    def __init__(self, part: Part, codec: Codec, multiple: int, memory: torch.Tensor) -> None:
        head = padded(4 * part.exact_numel, _ALIGNED)
        self.codec = codec
        # Once: to look whether an object has a protocol's methods takes tens of microseconds.
        self.writer = codec if isinstance(codec, PieceWriter) else None
        self.exact = memory[: 4 * part.exact_numel].view(torch.float32)
        self.coded = memory[head : head + codec.nbytes(part.coded_numel(multiple))]

    @staticmethod
    def size(part: Part, codec: Codec, multiple: int, aligned: int) -> int:
        """Return the bytes of a message."""
        coded = codec.nbytes(part.coded_numel(multiple))
        return padded(padded(4 * part.exact_numel, _ALIGNED) + coded, aligned)


class CodedBucket:
    """The messages of one bucket, step after step, and what they leave behind, see [Note: residuals].

    Args:
        codecs: for both halves.
        parameters: of the bucket.
        parts: what is coded, by owner; exact parts may be others in each step.
        rank: of this process.
        device: of the gradients.
        has_work: owners send something else than the mean.
        leaves_unused: a parameter whose gradients are all zero may have none.
        by_collectives: messages travel by a backend's own collectives.
        scratch: memory for a moment, of all buckets; default: the bucket's own.
    """

    def __init__(
        self,
        codecs: Codecs,
        parameters: Sequence[torch.Tensor],
        parts: Sequence[Part],
        rank: int,
        device: torch.device,
        *,
        has_work: bool = False,
        leaves_unused: bool = False,
        by_collectives: bool = False,
        scratch: Scratch | None = None,
    ) -> None:
        self.parameters = list(parameters)
        self.rank = rank
        self._codecs, self.parts = codecs, tuple(parts)
        self.has_work, self._leaves_unused = has_work, leaves_unused
        self._by_collectives = by_collectives
        self._multiple = math.lcm(*(codec.multiple for codec in codecs.all()))
        self._slots = [part.slots(self._multiple) for part in parts]
        numels = [part.coded_numel(self._multiple) for part in parts]
        self._kept = [torch.zeros(numel, device=device) for numel in numels]
        self._addend = torch.empty(numels[rank], device=device)
        # CUDA multiplies by the reciprocal of a number of the host: other bits than the CPU's for three ranks or more.
        self._divisor = torch.full((), float(len(parts)), device=device)
        self._scratch = Scratch() if scratch is None else scratch
        self._memory = [MessageMemory(device) for _ in range(3)]
        self._laid_out: object = None

    @property
    def nbytes(self) -> int:
        """Bytes of the residuals."""
        return sum(kept.nbytes for kept in self._kept)

    @property
    def is_kept(self) -> bool:
        """Whether any residual is not zero."""
        return any([bool(kept.any()) for kept in self._kept])

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends in a step, in both halves."""
        back = self.gather.layout
        return self.outgoing.layout.numel + back.numel - back.part((self.rank + 1) % len(self.parts)).numel

    def is_of(self, parameters: Sequence[torch.Tensor], parts: Sequence[Part] | None = None) -> bool:
        """Tell whether it has the same parameters, and coded segments of the same lengths."""
        known, lengths = map(id, self.parameters), [part.lengths for part in self.parts]
        return [*known] == [*map(id, parameters)] and (
            parts is None or lengths == [part.lengths for part in parts]
        )

    def kept(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each coded parameter with its whole residual, flat, in units of this rank's gradient.

        An owner's residual is part of a mean; so many times as there are ranks, it is part of this rank's gradient.
        Where owners send something else than the mean, theirs is left out.
        """
        whole: dict[int, list[tuple[OwnedSpan, torch.Tensor]]] = {}
        for owner, part in enumerate(self.parts):
            is_own, pieces = owner == self.rank, self._views(self._kept[owner], owner)
            factor = (0 if self.has_work else len(self.parts)) if is_own else 1
            for segment, piece in zip(part.coded, pieces, strict=True):
                whole.setdefault(segment.parameter, []).append((segment, piece * factor))
        for number, found in whole.items():
            residual = found[0][1].new_zeros(max(each.begin + each.span.numel for each, _ in found))
            for segment, piece in found:
                residual[segment.begin : segment.begin + segment.span.numel] = piece
            yield self.parameters[number], residual

    def scale(self, factor: float) -> None:
        """Multiply all residuals."""
        for kept in self._kept:
            kept.mul_(factor)

    # --- messages --------------------------------------------------------------------------------------------

    def encode(self, buffers: Buffers, *, whole: bool = False) -> None:
        """Write the messages to the owners. On the hook's thread, when the last step's messages are decoded.

        ``whole``: all messages of this step, in both halves, hold all that is kept, in float32.
        """
        self._buffers = buffers
        self._lay_out(whole=whole)
        flat = buffers.flat
        for owner, message in self._sent.items():
            part = buffers.parts[owner]
            pieces = _places(flat, part.coded)
            values = self._scratch.take(len(self._kept[owner]), flat.device)
            self._collect(pieces, owner, values, self._kept[owner])
            self._encode(values, owner, message, self._unused(pieces))
            _collect_exact(flat, part, message.exact)
        own = buffers.parts[self.rank]
        self._collect(_places(flat, own.coded), self.rank, self._addend)
        _collect_exact(flat, own, self._exact_addend)

    def _lay_out(self, *, whole: bool) -> None:
        """Give each message its place; the same as in the last step, if parts are."""
        buffers = self._buffers
        wanted = buffers.parts, whole
        if wanted == self._laid_out:
            return
        self._laid_out = wanted
        codecs, own = _WHOLE if whole else self._codecs, buffers.parts[self.rank]
        # Not made in each step: a device's other stream may still read the last one's.
        self._exact_addend = torch.empty(own.exact_numel, device=self._addend.device)
        others = [rank for rank in range(len(self.parts)) if rank != self.rank]
        out = {owner: (buffers.parts[owner], codecs.between(self.rank, owner)) for owner in others}
        into = {source: (own, codecs.between(self.rank, source)) for source in others}
        back = {owner: (part, codecs.pull) for owner, part in enumerate(buffers.parts)}
        (self.outgoing, self._sent), (self.incoming, self._received), (self.gather, self._returned) = [
            self._messages(each, None if whole else memory)
            for each, memory in zip((out, into, back), self._memory, strict=True)
        ]

    def _messages(
        self, made: dict[int, tuple[Part, Codec]], memory: MessageMemory | None
    ) -> tuple[Sharded, dict[int, _Message]]:
        """Return memory for messages, and these by rank; the large ones of a whole step are not kept."""
        aligned = _ALIGNED_BY_COLLECTIVES if self._by_collectives else _ALIGNED
        sizes = {rank: _Message.size(*each, self._multiple, aligned) for rank, each in made.items()}
        if self._by_collectives and len(sizes) == len(self.parts):  # one all-gather has equal parts
            sizes = dict.fromkeys(sizes, max(sizes.values()))
        layout = Layout.of_lengths([sizes.get(rank, 0) for rank in range(len(self.parts))])
        taken = MessageMemory(self._addend.device) if memory is None else memory
        sharded = Sharded(taken.take(layout.numel), layout)
        return sharded, {
            rank: _Message(*each, self._multiple, sharded.part(rank)) for rank, each in made.items()
        }

    def add(self) -> None:
        """Add what came: for the owner's work, or for the message to all, which is written."""
        buffers, rank = self._buffers, self.rank
        values, exact = self._mean()
        if self.has_work:
            part = buffers.parts[rank]
            _copy(_places(buffers.flat, part.coded), self._views(values, rank))
            _copy(_places(buffers.flat, part.exact), _split(exact, part))
        else:
            self._returned[rank].exact.copy_(exact)
            self._encode_own(values)

    def write(self) -> None:
        """Write the message to all of what the owner has made of the mean."""
        buffers, rank = self._buffers, self.rank
        part = buffers.parts[rank]
        self._collect(_places(buffers.flat, part.coded), rank, self._addend)
        _collect_exact(buffers.flat, part, self._returned[rank].exact)
        self._encode_own(self._addend)

    def _encode_own(self, values: torch.Tensor) -> None:
        """Write the message to all, and decode it into the bucket: all ranks have the same, the owner, too."""
        unused = self._unused(self._views(values, self.rank))
        self._encode(values.add_(self._kept[self.rank]), self.rank, self._returned[self.rank], unused)
        self._unload(self.rank)

    def _mean(self) -> tuple[torch.Tensor, torch.Tensor]:
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

    def unload(self) -> None:
        """Decode the other owners' messages into the bucket."""
        for owner in range(len(self.parts)):
            if owner != self.rank:
                self._unload(owner)

    def _unload(self, owner: int) -> None:
        part, flat, message = self._buffers.parts[owner], self._buffers.flat, self._returned[owner]
        _copy(_places(flat, part.exact), _split(message.exact, part))
        pieces, numel = _places(flat, part.coded), len(self._kept[owner])
        if not pieces:
            return
        if message.writer is not None and numel >= _LARGE * len(pieces) and flat.dtype == torch.float32:
            message.writer.write_decoded(message.coded, pieces, [slot.start for slot in self._slots[owner]])
            return
        values = self._scratch.take(numel, flat.device)
        if message.writer is not None:
            message.writer.write_decoded(message.coded, [values], [0])
        else:
            message.codec.add_decoded(message.coded, values.zero_())
        _copy(pieces, self._views(values, owner))

    # --- values of one owner's part, padded --------------------------------------------------------------------

    def _views(self, values: torch.Tensor, owner: int) -> list[torch.Tensor]:
        return [values[slot.start : slot.stop] for slot in self._slots[owner]]

    def _collect(
        self, pieces: Sequence[torch.Tensor], owner: int, out: torch.Tensor, kept: torch.Tensor | None = None
    ) -> None:
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

    def _unused(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return for each gradient whether it is all zero, if that matters."""
        return [each.any().logical_not() for each in gradients] if self._leaves_unused else []

    def _encode(
        self, values: torch.Tensor, owner: int, message: _Message, unused: Sequence[torch.Tensor]
    ) -> None:
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
        for piece, old, is_unused in zip(
            self._views(kept, owner), self._views(before, owner), unused, strict=False
        ):
            torch.where(is_unused, old, piece, out=piece)


def _places(flat: torch.Tensor, segments: Sequence[OwnedSpan]) -> list[torch.Tensor]:
    return [flat[segment.span.start : segment.span.stop] for segment in segments]


def _copy(to: Sequence[torch.Tensor], of: Sequence[torch.Tensor]) -> None:
    if to:
        torch._foreach_copy_(list(to), list(of))


def _split(exact: torch.Tensor, part: Part) -> list[torch.Tensor]:
    return [*exact.split_with_sizes([each.span.numel for each in part.exact])] if part.exact else []


def _collect_exact(flat: torch.Tensor, part: Part, out: torch.Tensor) -> None:
    _copy(_split(out, part), _places(flat, part.exact))

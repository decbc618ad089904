"""One bucket's messages: what a rank encodes, what an owner sums and encodes again, what all decode.

[Note: residuals] A rank keeps what its messages to owners do not hold (the *push residual*, in units of its gradient),
an owner what its message to all does not hold (the *owner's residual*, in units of the mean). After each step, for each
element: what all ranks apply = mean of gradients + mean of old push residuals + old owner's residual − the same sum of
the new ones. An owner does not send to itself: its own addend enters the sum exact.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from crossover_ddp._exchange.layout import Layout
from crossover_ddp._exchange.transfer import Sharded

from .codec import Codec
from .cut import OwnedSpan, Part, cut
from .message import CodedMessage, total, views


class Codecs(NamedTuple):
    """What encodes to owners, and what owners encode with."""

    push: Codec
    pull: Codec


class _Stream:
    """One way that a codec sends again and again: its residual, its memory, the room of its next message."""

    def __init__(self, codec: Codec, part: Part) -> None:
        self.codec, self.part = codec, part
        self.residual = torch.zeros(part.coded_numel)
        self.room = codec.room(part.lengths)
        self._memory: Any = None

    def encode(self, values: torch.Tensor, used: Sequence[bool], message: CodedMessage) -> None:
        """Write values plus residual, and keep the rest; what is not used waits with its residual. Changes ``values``.

        A parameter that is used nowhere keeps its gradient of None, so what travelled for it would be lost.
        """
        part, next_room, finite = self.part, self.room, True
        if part.coded:
            values.add_(self.residual)
            idle = [
                (piece, kept, kept.clone())
                for use, piece, kept in zip(
                    used, views(values, part.lengths), views(self.residual, part.lengths), strict=True
                )
                if not use
            ]
            for piece, _, _ in idle:
                piece.zero_()
            encoded = self.codec.encode(values, part.lengths, message.coded, self.residual, self._memory)
            for _, kept, before in idle:
                kept.copy_(before)
            finite, self._memory = encoded.finite, encoded.memory
            next_room = self.codec.room(part.lengths, encoded.wanted) if finite else self.room
            message.used.copy_(torch.tensor(used, dtype=torch.uint8))
        message.seal(finite=finite, next_room=next_room)
        self.room = next_room


class CodedBucket:
    """The messages of one bucket, step after step, and the residuals that stay behind.

    Args:
        codecs: for both halves.
        parameters: of the bucket.
        layout: who owns which part of the bucket's flat buffer.
        rank: of this process.
    """

    def __init__(self, codecs: Codecs, parameters: Sequence[torch.Tensor], layout: Layout, rank: int) -> None:
        self.parameters = list(parameters)
        self.rank = rank
        self._codecs = codecs
        self._others = [other for other in range(layout.parts) if other != rank]
        self._numels = [numel_of(parameter) for parameter in parameters]
        self.parts = cut(self._numels, [parameter.dim() for parameter in parameters], layout)
        self._own = self.parts[rank]
        self._push = [_Stream(codecs.push, part) for part in self.parts]
        self._pull = _Stream(codecs.pull, self._own)
        # What others will send: their headers say so.
        self._incoming_rooms = dict.fromkeys(self._others, codecs.push.room(self._own.lengths))
        self._pull_rooms = [codecs.pull.room(part.lengths) for part in self.parts]
        self._is_own_kept = False
        self.outgoing: dict[int, torch.Tensor] = {}
        self.incoming: dict[int, torch.Tensor] = {}
        self.gather = Sharded(torch.empty(0, dtype=torch.uint8), Layout.equal(0, layout.parts))

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank has sent for the last step, in both halves."""
        pulled = self.gather.layout.numel - self.gather.layout.part((self.rank + 1) % len(self.parts)).numel
        return sum(map(len, self.outgoing.values())) + pulled

    # --- messages, see `Messages` in `_exchange/direct_way.py` ------------------------------------------------

    def encode(self, flat: torch.Tensor) -> None:
        """Write the messages to the owners. On the hook's thread."""
        self._flat = flat
        used = self._used(flat)
        self._messages = {}
        for owner in self._others:
            part, stream = self.parts[owner], self._push[owner]
            message = self._messages[owner] = CodedMessage(part, stream.room)
            _collect(flat, part.exact, message.exact)
            values = _collect(flat, part.coded, torch.empty(part.coded_numel))
            stream.encode(values, [used[segment.parameter] for segment in part.coded], message)
        self.outgoing = {owner: message.bytes for owner, message in self._messages.items()}
        self._own_used = [used[segment.parameter] for segment in self._own.coded]
        self._addend = self._own_addend(flat)
        self._exact_addend = _collect(flat, self._own.exact, torch.empty(self._own.exact_numel))
        self._received = {
            source: CodedMessage(self._own, room) for source, room in self._incoming_rooms.items()
        }
        self.incoming = {source: message.bytes for source, message in self._received.items()}
        sizes = [total(part, room) for part, room in zip(self.parts, self._pull_rooms, strict=True)]
        layout = Layout.of_lengths(sizes)
        self.gather = Sharded(torch.empty(layout.numel, dtype=torch.uint8), layout)

    def _own_addend(self, flat: torch.Tensor) -> torch.Tensor:
        """Return what this rank adds to its own part; it has a residual there only after a change of buckets."""
        own, lengths = self._push[self.rank].residual, self._own.lengths
        addend = _collect(flat, self._own.coded, torch.empty(own.numel()))
        if self._is_own_kept:
            pieces = zip(self._own_used, views(addend, lengths), views(own, lengths), strict=True)
            for piece, kept in [(piece, kept) for use, piece, kept in pieces if use]:
                piece.add_(kept)
                kept.zero_()
            self._is_own_kept = bool(own.any())
        return addend

    def step(self) -> None:
        """Add what came in the order of ranks, and write the message to all. On a worker."""
        world_size = len(self.parts)
        own, lengths = self._own, self._own.lengths
        values, exact = torch.zeros(own.coded_numel), torch.zeros(own.exact_numel)
        used, is_finite = list(self._own_used), True
        for rank in range(world_size):
            if rank == self.rank:
                values.add_(self._addend)
                exact.add_(self._exact_addend)
                continue
            message = self._received[rank]
            finite, self._incoming_rooms[rank] = message.opened()
            is_finite = is_finite and finite
            exact.add_(message.exact)
            if finite and own.coded:
                self._codecs.push.add_decoded(message.coded, lengths, values)
                used = [
                    mine or bool(theirs) for mine, theirs in zip(used, message.used.tolist(), strict=True)
                ]
        out = CodedMessage(own, self._pull_rooms[self.rank], self._piece(self.rank))
        out.exact.copy_(exact.div_(world_size))
        if is_finite:
            self._pull.encode(values.div_(world_size), used, out)
        else:
            out.seal(finite=False, next_room=self._pull.room)

    def unload(self) -> None:
        """Decode all owners' messages into the bucket. On a worker."""
        rooms = list(self._pull_rooms)
        for owner, part in enumerate(self.parts):
            message = CodedMessage(part, rooms[owner], self._piece(owner))
            finite, self._pull_rooms[owner] = message.opened()
            values = torch.zeros(part.coded_numel) if finite else torch.full((part.coded_numel,), torch.nan)
            if finite and part.coded:
                self._codecs.pull.add_decoded(message.coded, part.lengths, values)
            _spread(values, part.coded, self._flat)
            _spread(message.exact, part.exact, self._flat)

    def _piece(self, owner: int) -> torch.Tensor:
        span = self.gather.layout.part(owner)
        return self.gather.tensor[span.start : span.stop]

    def _used(self, flat: torch.Tensor) -> list[bool]:
        """Tell which parameters have a gradient that is not all zero."""
        pieces = views(flat, self._numels)
        # Most gradients' first elements are not zero, and then nobody need look further.
        firsts = torch.stack([piece[0] for piece in pieces]).tolist()
        return [bool(first != 0) or bool(piece.any()) for first, piece in zip(firsts, pieces, strict=True)]

    # --- residuals -------------------------------------------------------------------------------------------

    def kept(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each coded parameter with its whole residual, flat, in units of this rank's gradient.

        An owner's residual is part of a mean; so many times as there are ranks, it is part of this rank's gradient.
        """
        whole: dict[int, torch.Tensor] = {}
        for segment, push in self._pieces(self._push):
            numel = self._numels[segment.parameter]
            residual = whole.setdefault(segment.parameter, torch.zeros(numel))
            residual[segment.begin : segment.begin + push.numel()] = push
        for segment, pull in zip(self._own.coded, views(self._pull.residual, self._own.lengths), strict=True):
            place = whole[segment.parameter][segment.begin : segment.begin + pull.numel()]
            place.add_(pull, alpha=len(self.parts))
        for number, residual in whole.items():
            yield self.parameters[number], residual

    def keep(self, parameter: int, residual: torch.Tensor) -> None:
        """Begin with ``residual`` for the bucket's parameter of this number, in place of what there is."""
        self._is_own_kept = True
        for segment, push in self._pieces(self._push):
            if segment.parameter == parameter:
                push.copy_(residual[segment.begin : segment.begin + push.numel()])

    def scale(self, factor: float) -> None:
        """Multiply all residuals."""
        for stream in (*self._push, self._pull):
            stream.residual.mul_(factor)

    def drop(self) -> None:
        """Forget all residuals."""
        self.scale(0.0)

    @property
    def nbytes(self) -> int:
        """Bytes of the residuals."""
        return sum(stream.residual.nbytes for stream in (*self._push, self._pull))

    def _pieces(self, streams: Sequence[_Stream]) -> Iterator[tuple[OwnedSpan, torch.Tensor]]:
        for stream in streams:
            yield from zip(stream.part.coded, views(stream.residual, stream.part.lengths), strict=True)


def numel_of(parameter: torch.Tensor) -> int:
    """Return the real numbers of a gradient: DDP's buckets hold complex ones as pairs."""
    return parameter.numel() * (2 if parameter.is_complex() else 1)


def _collect(flat: torch.Tensor, segments: Sequence[OwnedSpan], out: torch.Tensor) -> torch.Tensor:
    """Copy segments of ``flat`` one behind the other."""
    if segments:
        pieces = [flat[segment.span.start : segment.span.stop] for segment in segments]
        if flat.dtype == out.dtype:
            torch.cat(pieces, out=out)
        else:
            out.copy_(torch.cat(pieces))
    return out


def _spread(values: torch.Tensor, segments: Sequence[OwnedSpan], flat: torch.Tensor) -> None:
    """Copy back what `_collect` has collected."""
    if segments:
        places = [flat[segment.span.start : segment.span.stop] for segment in segments]
        pieces = views(values, [segment.span.numel for segment in segments])
        torch._foreach_copy_(places, pieces)

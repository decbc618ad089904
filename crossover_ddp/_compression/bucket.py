"""One bucket's messages: what a rank encodes, what an owner sums and encodes again, what all decode."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from crossover_ddp._exchange.layout import Layout
from crossover_ddp._exchange.transfer import Sharded

from .choice import Codecs
from .codec import Codec, PieceWriter
from .cut import Part
from .message import CodedMessage, total, views
from .residuals import BucketResiduals, Stream, collect, spread
from .scratch import MessageMemory, Scratch
from .whole import Whole

_WHOLE = Whole()


class Buffers(NamedTuple):
    """What the messages of one step are about.

    Args:
        scatter: flat; messages to owners are made of it.
        push: its parts, by owner.
        gather: flat; owners' messages fill it.
        pull: its parts, by owner; what is coded is of the same lengths as in ``push``.
        step: the owner's work: makes its part of ``gather`` of its part of ``scatter``, which holds the mean; None: the
            mean is what comes back, and both buffers are one.
    """

    scatter: torch.Tensor
    push: Sequence[Part]
    gather: torch.Tensor
    pull: Sequence[Part]
    step: Callable[[], None] | None = None


class _MessageStream(Stream):
    """A stream whose messages differ in size: its codec's memory, and the room of its next message."""

    def __init__(self, codec: Codec, part: Part) -> None:
        super().__init__(codec, part)
        self.room = codec.room(part.lengths)
        self._memory: Any = None

    def encode(
        self, values: torch.Tensor, used: Sequence[bool], message: CodedMessage, *, whole: bool
    ) -> None:
        """Write the values, and keep the rest; what is not used waits with its residual. Changes ``values``.

        A parameter that is used nowhere keeps its gradient of None, so what travelled for it would be lost.

        Args:
            values: of the coded segments, plus the residual.
            used: for each of them, whether its parameter is in use.
            message: to be written and sealed.
            whole: write all of it, in float32.
        """
        part, next_room, finite = self.part, self.room, True
        if part.coded:
            idle = [
                (piece, kept, kept.clone())
                for use, piece, kept in zip(
                    used, views(values, part.lengths), views(self.residual, part.lengths), strict=True
                )
                if not use
            ]
            for piece, _, _ in idle:
                piece.zero_()
            codec, memory = (_WHOLE, None) if whole else (self.codec, self._memory)
            encoded = codec.encode(values, part.lengths, message.coded, self.residual, memory)
            for _, kept, before in idle:
                kept.copy_(before)
            finite = encoded.finite
            if not whole:
                self._memory = encoded.memory
                next_room = self.codec.room(part.lengths, encoded.wanted) if finite else self.room
            message.used.fill_(1)
            for number in [number for number, use in enumerate(used) if not use]:
                message.used[number] = 0
        message.seal(finite=finite, next_room=next_room)
        self.room = next_room


class CodedBucket(BucketResiduals):
    """The messages of one bucket, step after step, and the residuals that stay behind.

    Args:
        codecs: for both halves.
        parameters: of the bucket.
        numels: of their gradients.
        parts: what is coded, by owner; exact parts may be others in each step.
        rank: of this process.
        gives_mean: whether owners send the mean, and not what they make of it.
        scratch: memory for a moment, of all buckets; default: the bucket's own.
    """

    def __init__(
        self,
        codecs: Codecs,
        parameters: Sequence[torch.Tensor],
        numels: Sequence[int],
        parts: Sequence[Part],
        rank: int,
        *,
        gives_mean: bool = True,
        scratch: Scratch | None = None,
    ) -> None:
        self._push = [_MessageStream(codecs.between(rank, owner), part) for owner, part in enumerate(parts)]
        self._pull = _MessageStream(codecs.pull, parts[rank])
        super().__init__(parameters, numels, parts, rank, self._push, self._pull, gives_mean=gives_mean)
        self._codecs = codecs
        # Once: to look whether an object has a protocol's methods takes tens of microseconds.
        self._writer = codecs.pull if isinstance(codecs.pull, PieceWriter) else None
        self._others = [other for other in range(len(parts)) if other != rank]
        # What others will send: their headers say so.
        self._incoming_rooms = {
            other: codecs.between(rank, other).room(self._own.lengths) for other in self._others
        }
        self._pull_rooms = [codecs.pull.room(part.lengths) for part in self.parts]
        self._is_whole = False
        self._scratch = Scratch() if scratch is None else scratch
        self._to, self._from = ([MessageMemory() for _ in parts] for _ in range(2))
        self._gathered, self._addend = MessageMemory(), torch.empty(self._own.coded_numel)
        self.outgoing: dict[int, torch.Tensor] = {}
        self.incoming: dict[int, torch.Tensor] = {}
        self.gather = Sharded(torch.empty(0, dtype=torch.uint8), Layout.equal(0, len(parts)))

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank has sent for the last step, in both halves."""
        pulled = self.gather.layout.numel - self.gather.layout.part((self.rank + 1) % len(self.parts)).numel
        return sum(map(len, self.outgoing.values())) + pulled

    # --- messages, see `Messages` in `_exchange/direct_way.py` ------------------------------------------------

    def encode(self, buffers: Buffers, *, whole: bool = False) -> None:
        """Write the messages to the owners. On the hook's thread, when the last step's messages are decoded.

        ``whole``: all messages of this step, in both halves, hold all that is kept, in float32.
        """
        self._buffers, self._is_whole, self._is_own_unloaded = buffers, whole, False
        flat, used = buffers.scatter, self._used(buffers)
        self._messages = {}
        for owner in self._others:
            part, stream = buffers.push[owner], self._push[owner]
            message = self._messages[owner] = self._message(part, stream.room, self._to[owner])
            collect(flat, part.exact, message.exact)
            values = stream.sum(flat, part.coded, self._scratch.take(part.coded_numel))
            stream.encode(values, [used[segment.parameter] for segment in part.coded], message, whole=whole)
        self.outgoing = {owner: message.bytes for owner, message in self._messages.items()}
        own = buffers.push[self.rank]
        self._own_used = [used[segment.parameter] for segment in own.coded]
        self._collect_addend(flat)
        self._exact_addend = collect(flat, own.exact, torch.empty(own.exact_numel))
        self._received = {
            source: self._message(own, room, self._from[source])
            for source, room in self._incoming_rooms.items()
        }
        self.incoming = {source: message.bytes for source, message in self._received.items()}
        self._sent_rooms = [
            self._room(room, part) for room, part in zip(self._pull_rooms, buffers.pull, strict=True)
        ]
        sizes = [total(part, room) for part, room in zip(buffers.pull, self._sent_rooms, strict=True)]
        layout = Layout.of_lengths(sizes)
        self.gather = Sharded(self._bytes(layout.numel, self._gathered), layout)

    def _message(self, part: Part, room: int, kept: MessageMemory) -> CodedMessage:
        room = self._room(room, part)
        return CodedMessage(part, room, self._bytes(total(part, room), kept))

    def _bytes(self, size: int, kept: MessageMemory) -> torch.Tensor:
        """Return memory for a message, see [Note: used again]; the large ones of a whole step are not kept."""
        return torch.zeros(size, dtype=torch.uint8) if self._is_whole else kept.take(size)

    def _room(self, room: int, part: Part) -> int:
        return _WHOLE.room(part.lengths) if self._is_whole else room

    def _collect_addend(self, flat: torch.Tensor) -> None:
        """Take what this rank adds to its own part; it has a residual there only after a change of buckets."""
        own, part = self._push[self.rank].residual, self._buffers.push[self.rank]
        addend = collect(flat, part.coded, self._addend)
        if self._is_own_kept:
            pieces = zip(self._own_used, views(addend, part.lengths), views(own, part.lengths), strict=True)
            for piece, kept in [(piece, kept) for use, piece, kept in pieces if use]:
                piece.add_(kept)
                kept.zero_()
            self._is_own_kept = bool(own.any())

    def step(self) -> None:
        """Add what came in the order of ranks, and write the message to all. On a worker."""
        part, gathered = self._buffers.push[self.rank], self._buffers.pull[self.rank]
        values, exact, used, is_finite = self._sums()
        world_size = len(self.parts)
        values.div_(world_size)
        exact.div_(world_size)
        if self._buffers.step is not None:
            spread(values if is_finite else values.fill_(torch.nan), part.coded, self._buffers.scatter)
            spread(exact, part.exact, self._buffers.scatter)
            self._buffers.step()
            is_finite = True  # what it has made may be
            collect(self._buffers.gather, gathered.coded, values)
            exact = collect(self._buffers.gather, gathered.exact, torch.empty(gathered.exact_numel))
        out = CodedMessage(gathered, self._sent_rooms[self.rank], self._piece(self.rank))
        out.exact.copy_(exact)
        if is_finite:
            values.add_(self._pull.residual)
            self._pull.encode(values, used, out, whole=self._is_whole)
        else:
            out.seal(finite=False, next_room=self._pull.room)

    def _sums(self) -> tuple[torch.Tensor, torch.Tensor, list[bool], bool]:
        """Return the sums of what is coded and of what is exact, which parameters are in use, and if all is finite."""
        part = self._buffers.push[self.rank]
        # Two addends may change places, so the first two ranks add to their own.
        is_begun = self.rank <= 1
        values = self._addend if is_begun else self._scratch.take(part.coded_numel).zero_()
        exact = torch.zeros(part.exact_numel)
        used, is_finite = list(self._own_used), True
        for rank in range(len(self.parts)):
            if rank == self.rank:
                exact.add_(self._exact_addend)
                if not is_begun:
                    values.add_(self._addend)
                continue
            message = self._received[rank]
            finite, self._incoming_rooms[rank] = message.opened()
            is_finite = is_finite and finite
            exact.add_(message.exact)
            if finite and part.coded:
                codec: Codec = _WHOLE if self._is_whole else self._codecs.between(self.rank, rank)
                codec.add_decoded(message.coded, part.lengths, values)
                used = [
                    mine or bool(theirs) for mine, theirs in zip(used, message.used.tolist(), strict=True)
                ]
        return values, exact, used, is_finite

    def unload_own(self) -> None:
        """Decode this owner's message into the bucket. On a worker."""
        self._unload(self.rank)
        self._is_own_unloaded = True

    def unload(self) -> None:
        """Decode all owners' messages into the bucket. On a worker."""
        for owner in range(len(self.parts)):
            if owner != self.rank or not self._is_own_unloaded:
                self._unload(owner)

    def _unload(self, owner: int) -> None:
        part, flat = self._buffers.pull[owner], self._buffers.gather
        message = CodedMessage(part, self._sent_rooms[owner], self._piece(owner))
        finite, self._pull_rooms[owner] = message.opened()
        spread(message.exact, part.exact, flat)
        pieces = [flat[segment.span.start : segment.span.stop] for segment in part.coded]
        if not finite:
            for piece in pieces:
                piece.fill_(torch.nan)
        elif self._writer is not None and not self._is_whole:
            self._writer.write_decoded(message.coded, part.lengths, pieces)
        elif pieces:
            codec: Codec = _WHOLE if self._is_whole else self._codecs.pull
            values = self._scratch.take(part.coded_numel).zero_()
            codec.add_decoded(message.coded, part.lengths, values)
            spread(values, part.coded, flat)

    def _piece(self, owner: int) -> torch.Tensor:
        span = self.gather.layout.part(owner)
        return self.gather.tensor[span.start : span.stop]

    def _used(self, buffers: Buffers) -> list[bool]:
        """Tell which coded parameters have a gradient that is not all zero."""
        segments = [segment for part in buffers.push for segment in part.coded]
        used = [False] * len(self.parameters)
        if not segments:
            return used
        pieces = [buffers.scatter[segment.span.start : segment.span.stop] for segment in segments]
        # Most gradients' first elements are not zero, and then nobody need look further.
        firsts = torch.stack([piece[0] for piece in pieces]).tolist()
        for segment, first, piece in zip(segments, firsts, pieces, strict=True):
            number = segment.parameter
            used[number] = used[number] or bool(first != 0) or bool(piece.any())
        return used

"""One bucket's messages where they travel by a backend's own collectives: on NCCL, by `all_to_all_single`.

[Note: without a look] Collectives and what is computed between them are launched by the hook's thread, in the program's
order, while the device is still at earlier work. So nothing here reads a value on the host: all messages have one size,
what is not finite shows as NaN, and headers say nothing. The arithmetic is that of `CodedBucket`, so bits are, too. A
parameter without a gradient would need such a look; see `Compression`.
"""

from collections.abc import Sequence
from typing import Final

import torch

from crossover_ddp._exchange.layout import Layout
from crossover_ddp._exchange.transfer import Sharded

from .bucket import Buffers
from .choice import Codecs, PerPair
from .codec import DeviceCodec, PieceWriter
from .cut import Part
from .message import CodedMessage, total
from .residuals import BucketResiduals, Stream, collect, spread

# Shares of NCCL's collectives that begin elsewhere are slow.
_ALIGNMENT_BYTES: Final = 128


class DeviceBucket(BucketResiduals):
    """The messages of one bucket, step after step, and the residuals that stay behind.

    Args:
        codecs: for both halves; both are `DeviceCodec`.
        parameters: of the bucket.
        numels: of their gradients.
        parts: what is coded, by owner.
        rank: of this process.
        device: of the gradients.
    """

    def __init__(
        self,
        codecs: Codecs,
        parameters: Sequence[torch.Tensor],
        numels: Sequence[int],
        parts: Sequence[Part],
        rank: int,
        device: torch.device,
    ) -> None:
        assert not isinstance(codecs.push, PerPair)  # see `can_encode_on_device`
        push_codec = codecs.push
        push = [Stream(push_codec, part, device) for part in parts]
        pull = Stream(codecs.pull, parts[rank], device)
        super().__init__(parameters, numels, parts, rank, push, pull)
        self._push_codec, self._pull_codec = push_codec, codecs.pull
        self._push_rooms, self._pull_rooms = (
            [codec.room(part.lengths) for part in parts] for codec in (push_codec, codecs.pull)
        )
        push_size, pull_size = (
            _aligned(max(total(part, room) for part, room in zip(parts, rooms, strict=True)))
            for rooms in (self._push_rooms, self._pull_rooms)
        )
        # A rank is sent messages about its own part only, all in the place of the longest.
        world_size = len(parts)
        self.outgoing, self.incoming = (
            torch.zeros(world_size * push_size, dtype=torch.uint8, device=device) for _ in range(2)
        )
        gathered = torch.zeros(world_size * pull_size, dtype=torch.uint8, device=device)
        self.gather = Sharded(gathered, Layout.equal(gathered.numel(), world_size))
        self._addend = torch.empty(self._own.coded_numel, device=device)
        self._exact_addend = torch.empty(self._own.exact_numel, device=device)
        # CUDA multiplies by the reciprocal of a number of the host: other bits than the CPU's for three ranks or more.
        self._divisor = torch.full((), float(world_size), device=device)
        self._is_own_unloaded = False
        self.sent_bytes = 0
        """Bytes that this rank has sent for the last step, in both halves."""
        self._step_bytes = (world_size - 1) * (push_size + pull_size)

    # --- messages, see `DeviceMessages` ----------------------------------------------------------------------

    def encode(self, buffers: Buffers) -> None:
        """Write the messages to the owners. On the hook's thread and its stream."""
        self._buffers, self._is_own_unloaded, flat = buffers, False, buffers.scatter
        for owner, stream in enumerate(self._push_streams):
            if owner == self.rank:
                continue
            message = self._message(self.outgoing, owner, owner, self._push_rooms)
            collect(flat, stream.part.exact, message.exact)
            _encode(stream, stream.sum(flat, stream.part.coded, _like(stream.residual)), message)
        collect(flat, self._own.coded, self._addend)
        collect(flat, self._own.exact, self._exact_addend)
        if self._is_own_kept:
            own = self._push_streams[self.rank].residual
            self._addend.add_(own)
            own.zero_()
            self._is_own_kept = False
        self.sent_bytes = self._step_bytes

    def step(self) -> None:
        """Add what came in the order of ranks, and write the message to all. On the hook's thread, another stream."""
        world_size, codec = len(self.parts), self._push_codec
        # Two addends may change places, so the first two ranks add to their own.
        is_begun = self.rank <= 1
        values = self._addend if is_begun else torch.zeros_like(self._addend)
        exact = torch.zeros_like(self._exact_addend)
        for rank in range(world_size):
            if rank == self.rank:
                exact.add_(self._exact_addend)
                if not is_begun:
                    values.add_(self._addend)
                continue
            message = self._message(self.incoming, rank, self.rank, self._push_rooms)
            exact.add_(message.exact)
            if self._own.coded:
                codec.add_decoded(message.coded, self._own.lengths, values)
        out = self._message(self.gather.tensor, self.rank, self.rank, self._pull_rooms)
        out.exact.copy_(exact.div_(self._divisor))
        _encode(self._pull_stream, values.div_(self._divisor).add_(self._pull_stream.residual), out)

    def unload_own(self) -> None:
        """Decode this owner's message into the bucket."""
        self._unload(self.rank)
        self._is_own_unloaded = True

    def unload(self) -> None:
        """Decode all owners' messages into the bucket."""
        for owner in range(len(self.parts)):
            if owner != self.rank or not self._is_own_unloaded:
                self._unload(owner)

    def _unload(self, owner: int) -> None:
        part, flat, codec = self.parts[owner], self._buffers.gather, self._pull_codec
        message = self._message(self.gather.tensor, owner, owner, self._pull_rooms)
        spread(message.exact, part.exact, flat)
        if not part.coded:
            return
        if isinstance(codec, PieceWriter):
            pieces = [flat[segment.span.start : segment.span.stop] for segment in part.coded]
            codec.write_decoded(message.coded, part.lengths, pieces)
        else:
            values = torch.zeros(part.coded_numel, device=flat.device)
            codec.add_decoded(message.coded, part.lengths, values)
            spread(values, part.coded, flat)

    def _message(self, memory: torch.Tensor, place: int, owner: int, rooms: Sequence[int]) -> CodedMessage:
        """Return the message in a place of some memory about an owner's part."""
        part, room, size = self.parts[owner], rooms[owner], len(memory) // len(self.parts)
        begin = place * size
        return CodedMessage(part, room, memory[begin : begin + total(part, room)])


def can_encode_on_device(codecs: Codecs) -> bool:
    """Return whether both codecs can; a `PerPair` cannot, whose messages differ in size."""
    return all(isinstance(codec, DeviceCodec) for codec in codecs)


def _encode(stream: Stream, values: torch.Tensor, message: CodedMessage) -> None:
    if stream.part.coded:
        assert isinstance(stream.codec, DeviceCodec)
        stream.codec.encode_on_device(values, stream.part.lengths, message.coded, stream.residual)


def _like(residual: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(residual)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES

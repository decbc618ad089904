"""What a codec costs and saves on this machine, tried on a made-up gradient."""

import time
from typing import Final

import torch

from crossover_ddp._exchange.layout import Layout
from crossover_ddp._planning import EXACT, CodecCost

from .bucket import Buffers, CodedBucket
from .choice import CodecChoice, Codecs, check_size, codecs_of
from .cut import cut

_NUMEL: Final = 1 << 19
_MATRIX: Final = 2
_ROUNDS: Final = 5
_WARM_UP: Final = 2


def measure_codec(codec: CodecChoice | None, world_size: int, numel: int = _NUMEL) -> CodecCost:
    """Return the cost of ``codec`` for a rank of ``world_size``, in processor time of this thread.

    One parameter of ``numel`` elements (default: two megabytes), which have a Laplace distribution, goes through all
    that a bucket goes through but the wire. Takes some ten milliseconds. Not collective.
    """
    if codec is None or world_size < 2:
        return EXACT
    codecs = codecs_of(codec)
    check_size(codecs.push, world_size)
    trial = _CodecTrial(codecs, world_size, numel)
    taken = [trial.round() for _ in range(_WARM_UP + _ROUNDS)][_WARM_UP:]
    hook_s, worker_s = (min(each) for each in zip(*taken, strict=True))
    nbytes = trial.values.nbytes
    return CodecCost(trial.rate, hook_s / nbytes, worker_s / nbytes)


class _CodecTrial:
    """A rank whose gradient is the same for all owners, so that its own messages stand for those of the others."""

    def __init__(self, codecs: Codecs, world_size: int, numel: int) -> None:
        share = numel // world_size
        numel = share * world_size
        parts = cut([numel], [_MATRIX], Layout.equal(numel, world_size))
        generator = torch.Generator().manual_seed(0)
        positive, negative = (torch.empty(share).exponential_(generator=generator) for _ in range(2))
        self.values = (positive - negative).repeat(world_size)
        self._flat = torch.empty(numel)
        self._rank = CodedBucket(codecs, [torch.empty(numel, device="meta")], [numel], parts, 0)
        self._buffers = Buffers(self._flat, parts, self._flat, parts)

    def round(self) -> tuple[float, float]:
        """Take one step; return the processor seconds on the hook's thread, and those on workers."""
        rank = self._rank
        self._flat.copy_(self.values)
        begin_s = time.thread_time()
        rank.encode(self._buffers)
        encoded_s = time.thread_time()
        for source, message in rank.incoming.items():
            message.copy_(rank.outgoing[source])
        received_s = time.thread_time()
        rank.step()
        stepped_s = time.thread_time()
        piece = rank.gather.layout.part(0).numel
        for owner in range(1, len(rank.parts)):
            rank.gather.tensor[owner * piece : (owner + 1) * piece] = rank.gather.tensor[:piece]
        gathered_s = time.thread_time()
        rank.unload()
        return encoded_s - begin_s, time.thread_time() - gathered_s + stepped_s - received_s

    @property
    def rate(self) -> float:
        """Bytes of the last step over those of an exact exchange."""
        world_size = len(self._rank.parts)
        return self._rank.sent_bytes * world_size / (2 * self.values.nbytes * (world_size - 1))

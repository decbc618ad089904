"""The two halves of an all-reduce of one flat buffer, in place: reduce-scatter (sum) and all-gather.

Two ways, one for each kind of backend:

* :class:`Ring`, for gloo, over point-to-point messages. gloo's own ``reduce_scatter_tensor`` is an
  all-reduce inside, so it would cost 1.7 times the time and, for more than two ranks, twice the bytes.
* :class:`NativeHalves`, for backends with a real reduce-scatter (NCCL and others).

[Note: the ring] Ranks stand in a circle and every rank sends only to its right neighbour. In the
reduce-scatter part p starts at rank p + 1 and travels W - 1 links, gaining one rank's addend at each
stop, until it ends at its owner p. In the all-gather it starts at p and travels W - 1 links, ending at
p - 1. So each link carries every part but one in either half: (W - 1)/W of the buffer if the parts are equal, the
least possible. Uneven parts cost more: where one owner has everything, all links but one carry the whole buffer,
which takes W/(W - 1) of the time, twice as long with two ranks. Parts move in chunks: a chunk is passed on as soon
as it is added, while the next one is still being received.
"""

import contextlib
import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist

from .layout import Layout, Span

# [Note: tags] gloo matches messages by an int32 tag. Ours have bit 30 set, far from what users count up
# from 0, then the channel (one per engine on a group), the sequence number of the bucket, the half, and
# the part: messages of different buckets, halves and parts overtake each other, those of one part do not.
_PRIVATE_TAG: Final = 1 << 30
_SEQUENCE_BITS: Final = 12
_PART_BITS: Final = 13
MAX_RING_RANKS: Final = 1 << _PART_BITS

# Measured, see docs/measurements.md: a part in two chunks keeps the link busy to the end of a bucket;
# below the lower bound the cost per message shows, above the upper one nothing is gained.
_CHUNKS_PER_PART: Final = 2
_MIN_CHUNK_BYTES: Final = 128 * 1024
_MAX_CHUNK_BYTES: Final = 4 * 1024 * 1024
# Receives posted ahead in the reduce-scatter: gloo sends nothing before the receiver has posted.
_WINDOW: Final = 3

# Torch 2.14 gave them new names, and warns of the old ones.
_REDUCE_SCATTER: Final = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_ALL_GATHER: Final = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def ring_tag(channel: int, sequence: int, *, gather: bool, part: int) -> int:
    """Build the tag of one part of one bucket in one half, see [Note: tags]."""
    sequence %= 1 << _SEQUENCE_BITS
    key = ((channel << _SEQUENCE_BITS | sequence) << 1 | int(gather)) << _PART_BITS | part
    return _PRIVATE_TAG | key


def chunk_numel(layout: Layout, itemsize: int) -> int:
    """Choose the chunk of a transfer; the same on all ranks since it depends on the layout alone."""
    share_bytes = layout.numel * itemsize // (layout.parts * _CHUNKS_PER_PART)
    return max(1, min(max(share_bytes, _MIN_CHUNK_BYTES), _MAX_CHUNK_BYTES) // itemsize)


@functools.lru_cache(maxsize=1024)
def _chunks(layout: Layout, part: int, itemsize: int, chunk_bytes: int | None) -> tuple[Span, ...]:
    numel = chunk_numel(layout, itemsize) if chunk_bytes is None else chunk_bytes // itemsize
    return tuple([*layout.part(part).chunks(max(1, numel))])


class _ScratchPool:
    """Keeps the memory that chunks are received into, so that it is not mapped anew for every bucket."""

    def __init__(self) -> None:
        self._free: dict[torch.dtype, list[torch.Tensor]] = {}

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        free = self._free.setdefault(dtype, [])
        if free and free[-1].numel() >= numel:
            return free.pop()
        free.clear()
        return torch.empty(numel, dtype=dtype)

    def give_back(self, scratch: torch.Tensor) -> None:
        self._free.setdefault(scratch.dtype, []).append(scratch)


class HostBuffer:
    """A flat buffer in host memory, as a ring sees it.

    A subclass may stand for a device buffer whose data come and go by asynchronous copies.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def piece(self, span: Span) -> torch.Tensor:
        """Return the elements of ``span``, not a copy."""
        return self.tensor[span.start : span.stop]

    def ready(self, part: Span) -> None:
        """Block until this rank's addends of ``part`` are in ``tensor``."""

    def landed(self, span: Span) -> None:
        """Note that ``tensor`` holds the final values of ``span``."""

    def step(self, part: Span, owner_step: Callable[[torch.Tensor], None]) -> None:
        """Let ``owner_step`` change the owned ``part`` in place."""
        owner_step(self.piece(part))

    def release(self) -> None:
        """Note that the ring is through with this buffer."""


@dataclass(frozen=True)
class Ring:
    """The circle of ranks of a gloo group, and how messages are cut.

    Args:
        group: a process group whose backend for CPU tensors is gloo; held weakly, so that whoever keeps
            this object does not keep the group alive.
        channel: number that sets the tags of this ring apart from other rings on the same group.
        chunk_bytes: size of a chunk; None chooses it by the layout.
        window: number of receives posted ahead in the reduce-scatter.
    """

    group: "weakref.ref[dist.ProcessGroup]"
    rank: int
    size: int
    channel: int = 0
    chunk_bytes: int | None = None
    window: int = _WINDOW
    pool: _ScratchPool = field(default_factory=_ScratchPool, repr=False, compare=False)

    @classmethod
    def over(
        cls,
        group: dist.ProcessGroup,
        *,
        channel: int = 0,
        chunk_bytes: int | None = None,
        window: int = _WINDOW,
    ) -> "Ring":
        """Arrange the ranks of ``group`` in a circle. Not collective, but all ranks must use the same arguments."""
        if group.size() > MAX_RING_RANKS:
            raise ValueError(
                f"expected world size <= {MAX_RING_RANKS}, got size={group.size()}; use another backend"
            )
        return cls(weakref.ref(group), group.rank(), group.size(), channel, chunk_bytes, window)

    def reduce_scatter(
        self,
        buffer: HostBuffer,
        layout: Layout,
        sequence: int,
        on_owned: Callable[[Span], None] | None = None,
    ) -> "RingReduceScatter":
        """Sum ``buffer`` over the ranks into each part's owner; the other parts hold partial sums afterwards.

        ``on_owned`` is called with each chunk of the own part when its sum is complete.
        """
        return RingReduceScatter(self, buffer, layout, sequence, on_owned)

    def all_gather(self, buffer: HostBuffer, layout: Layout, sequence: int) -> "RingAllGather":
        """Copy each owner's part to all ranks."""
        return RingAllGather(self, buffer, layout, sequence)

    def chunks(self, part: int, layout: Layout, dtype: torch.dtype) -> tuple[Span, ...]:
        """Cut a part as all ranks do."""
        return _chunks(layout, part, dtype.itemsize, self.chunk_bytes)

    def send(self, piece: torch.Tensor, tag: int) -> dist.Work:
        """Begin to send to the right."""
        return self._group().send([piece], (self.rank + 1) % self.size, tag)

    def receive(self, piece: torch.Tensor, tag: int) -> dist.Work:
        """Begin to receive from the left."""
        return self._group().recv([piece], (self.rank - 1) % self.size, tag)

    def interrupt(self) -> None:
        """Make every wait on the group's connections fail at once; nothing can be sent on them afterwards.

        gloo cannot cancel a wait, but a wait that runs out of time closes all connections of its group.
        """
        group = self.group()
        if group is not None and self.size > 1:
            with contextlib.suppress(RuntimeError, ValueError):
                work = group.recv([torch.empty(1)], (self.rank - 1) % self.size, _PRIVATE_TAG - 1)
                work.wait(timedelta(milliseconds=1))

    def _group(self) -> dist.ProcessGroup:
        group = self.group()
        if group is None:
            raise RuntimeError("the process group was destroyed while an exchange was under way")
        return group


class _RingHalf:
    """What both halves share: where messages go, and the sends that are under way."""

    def __init__(
        self, ring: Ring, buffer: HostBuffer, layout: Layout, sequence: int, *, gather: bool
    ) -> None:
        if layout.parts != ring.size or layout.numel != buffer.tensor.numel():
            raise ValueError(
                f"expected a layout of {ring.size} parts and {buffer.tensor.numel()} elements, "
                f"got lengths={layout.lengths}; cut the buffer by the world size"
            )
        self._ring = ring
        self._buffer = buffer
        self._layout = layout
        self._sends: list[dist.Work] = []
        self._tag = functools.partial(ring_tag, ring.channel, sequence, gather=gather)

    def _chunks(self, part: int) -> tuple[Span, ...]:
        return self._ring.chunks(part, self._layout, self._buffer.tensor.dtype)

    def _send(self, part: int, span: Span) -> None:
        self._sends.append(self._ring.send(self._buffer.piece(span), self._tag(part=part)))

    def drain(self) -> None:
        """Block until everything sent has left the buffer, so that it may be written again."""
        for work in self._sends:
            work.wait()
        self._sends.clear()


class RingReduceScatter(_RingHalf):
    """A reduce-scatter under way, see [Note: the ring]. One thread calls ``start``, ``wait`` and ``drain``."""

    def __init__(
        self,
        ring: Ring,
        buffer: HostBuffer,
        layout: Layout,
        sequence: int,
        on_owned: Callable[[Span], None] | None,
    ) -> None:
        super().__init__(ring, buffer, layout, sequence, gather=False)
        self._on_owned = on_owned
        steps = [(ring.rank - 2 - step) % ring.size for step in range(ring.size - 1)]
        self._to_post = deque((part, span) for part in steps for span in self._chunks(part))
        self._posted: deque[tuple[int, Span, torch.Tensor, dist.Work]] = deque()

    def start(self) -> None:
        """Post the first receives and send the part that begins its transfer here."""
        longest = max((span.numel for _, span in self._to_post), default=0)
        count = min(self._ring.window, len(self._to_post))
        self._scratch = self._ring.pool.take(count * longest, self._buffer.tensor.dtype)
        for place in range(count):
            self._post(self._scratch[place * longest : (place + 1) * longest])
        if self._ring.size > 1:
            first = (self._ring.rank - 1) % self._ring.size
            self._buffer.ready(self._layout.part(first))
            for span in self._chunks(first):
                self._send(first, span)

    def wait(self) -> None:
        """Block until the own part is complete. Raises what gloo raises, at the latest after its timeout."""
        current = -1
        while self._posted:
            part, span, scratch, work = self._posted.popleft()
            work.wait()
            if part != current:
                self._buffer.ready(self._layout.part(part))
                current = part
            self._buffer.piece(span).add_(scratch[: span.numel])
            # Posted before anything is sent: the peer hears of it by a message that queues behind our data.
            self._post(scratch)
            self._pass_on(part, span)
        if self._ring.size == 1:
            self._own_alone()
        # Not after a failure: a receive may still be posted there.
        self._ring.pool.give_back(self._scratch)

    def _post(self, scratch: torch.Tensor) -> None:
        if self._to_post:
            part, span = self._to_post.popleft()
            work = self._ring.receive(scratch[: span.numel], self._tag(part=part))
            self._posted.append((part, span, scratch, work))

    def _pass_on(self, part: int, span: Span) -> None:
        if part != self._ring.rank:
            self._send(part, span)
        elif self._on_owned is not None:
            self._on_owned(span)

    def _own_alone(self) -> None:
        self._buffer.ready(self._layout.part(0))
        if self._on_owned is not None:
            for span in self._chunks(0):
                self._on_owned(span)


class RingAllGather(_RingHalf):
    """An all-gather under way, see [Note: the ring].

    Receives go straight into place and are all posted by ``start``. That is safe even before this rank's
    reduce-scatter of the same buffer ends: a part comes back only after its owner has received this
    rank's addends, so the place has been read.
    """

    def __init__(self, ring: Ring, buffer: HostBuffer, layout: Layout, sequence: int) -> None:
        super().__init__(ring, buffer, layout, sequence, gather=True)
        self._steps: list[tuple[int, list[tuple[Span, dist.Work]]]] = []

    def start(self) -> None:
        """Post all receives."""
        ring = self._ring
        for step in range(ring.size - 1):
            part = (ring.rank - 1 - step) % ring.size
            tag = self._tag(part=part)
            works = [(span, ring.receive(self._buffer.piece(span), tag)) for span in self._chunks(part)]
            self._steps.append((part, works))

    def offer(self, span: Span) -> None:
        """Send one chunk of the own part, in order; its values are final."""
        self._buffer.landed(span)
        if self._ring.size > 1:
            self._send(self._ring.rank, span)

    def offer_all(self) -> None:
        """Send the own part."""
        for span in self._chunks(self._ring.rank):
            self.offer(span)

    def wait(self) -> None:
        """Block until all parts are in place. The own part must have been offered before."""
        right = (self._ring.rank + 1) % self._ring.size
        for part, works in self._steps:
            # What nobody waits for is awaited last chunk first: chunks arrive in order, so that the
            # thread wakes up once instead of once per chunk.
            last_stop = part == right
            for span, work in reversed(works) if last_stop else works:
                work.wait()
                self._buffer.landed(span)
                if not last_stop:
                    self._send(part, span)
        self._steps.clear()


class NativeHalves:
    """Reduce-scatter and all-gather by the backend's own collectives.

    All calls are made by the thread that runs the hook, so that their order on the group, among themselves
    and against the model's own collectives, is the program's and therefore the same on all ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group_ref = weakref.ref(group)
        self._rank = group.rank()

    def reduce_scatter(self, buffer: torch.Tensor, layout: Layout) -> list[dist.Work]:
        """Sum ``buffer`` over the ranks into each part's owner; the other parts are undefined afterwards."""
        if not layout.is_equal:
            return [self._reduce(buffer, part, owner) for owner, part in _filled(layout)]
        works = []
        if layout.main_numel:
            main, own = self._main(buffer, layout)
            works.append(_started(_REDUCE_SCATTER(own, main, group=self._group(), async_op=True)))
        if layout.tail().numel:
            works.append(self._reduce(buffer, layout.tail(), layout.parts - 1))
        return works

    def all_gather(self, buffer: torch.Tensor, layout: Layout) -> list[dist.Work]:
        """Copy each owner's part to all ranks."""
        if not layout.is_equal:
            return [self._broadcast(buffer, part, owner) for owner, part in _filled(layout)]
        works = []
        if layout.main_numel:
            main, own = self._main(buffer, layout)
            works.append(_started(_ALL_GATHER(main, own, group=self._group(), async_op=True)))
        if layout.tail().numel:
            works.append(self._broadcast(buffer, layout.tail(), layout.parts - 1))
        return works

    def all_to_all(self, incoming: torch.Tensor, of: Layout, outgoing: torch.Tensor, to: Layout) -> dist.Work:
        """Send each rank its part of ``outgoing``, and receive a part of ``incoming`` from each."""
        return _started(
            dist.all_to_all_single(
                incoming, outgoing, list(of.lengths), list(to.lengths), group=self._group(), async_op=True
            )
        )

    def _main(self, buffer: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
        share = layout.main_numel // layout.parts
        own = buffer[self._rank * share : (self._rank + 1) * share]
        return buffer[: layout.main_numel], own

    def _reduce(self, buffer: torch.Tensor, part: Span, owner: int) -> dist.Work:
        piece = buffer[part.start : part.stop]
        return _started(dist.reduce(piece, group=self._group(), async_op=True, group_dst=owner))

    def _broadcast(self, buffer: torch.Tensor, part: Span, owner: int) -> dist.Work:
        piece = buffer[part.start : part.stop]
        return _started(dist.broadcast(piece, group=self._group(), async_op=True, group_src=owner))

    def _group(self) -> dist.ProcessGroup:
        group = self._group_ref()
        if group is None:
            raise RuntimeError("the process group was destroyed while an exchange was under way")
        return group


def _filled(layout: Layout) -> Iterator[tuple[int, Span]]:
    parts = ((owner, layout.part(owner)) for owner in range(layout.parts))
    return ((owner, part) for owner, part in parts if part.numel)


def _started(work: dist.Work | None) -> dist.Work:
    if work is None:
        raise RuntimeError("this process is not a rank of the process group")
    return work

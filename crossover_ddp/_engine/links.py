"""Links: the collectives of one journey, over flat tensors, with one interface for all networks.

A network creates links for the tensors of one device. This module has the network for a single
rank, and the one that exchanges CPU tensors as gloo messages. `device` has the network for a
backend's own collectives (NCCL), and the one for device tensors that travel over gloo.

[Note: straight to the owner] Every shard goes to its owner in one hop. The owner adds all addends
as a balanced tree over ranks, and sends the result to all ranks in one hop. A rank sends (W - 1)/W
of the tensor in either half, which is the minimum. No rank forwards data that it receives. So sends
are handed to gloo as soon as their values are final, and our threads only wait and add.

[Note: which first] gloo sends nothing before it knows that the peer has posted a receive. This
notice queues behind data that is already being sent, and until it arrives the other direction is
idle. That speaks for posting receives first. But while one of our threads writes, gloo's thread
spins on arriving data, on the same core if a rank has only one. That speaks for sending first. So
short sends come first. Whether a send is short is judged by the fastest rate at which a megabyte
has arrived, because the burst allowance of a link lets less than a megabyte pass at once.
docs/measurements.md has the measurements.

[Note: around a ring] If one rank owns most of a large tensor, W - 1 copies of its shard would leave
through its cable. Such a layout travels around a ring instead, where each rank adds and forwards. A
shard's sum begins at the owner's right neighbour and ends at the owner.

[Note: who waits where] A blocked thread can block peers. A journey's first collective is posted
when the journey starts, in the same order on all ranks, so it waits on the reducing thread. A
journey's first gather can be posted whatever later gathers do, so it waits on the gathering thread.
A later exchange or gather, or a rank that forwards around a ring, has a thread of its own and waits
only for the same collective on other ranks.

[Note: memory for sums] Data that arrives to be added needs memory: W - 1 times the shard on its
owner. So it is received piece by piece, in the order of journeys, and at most a few megabytes ahead
of the addition. This cannot deadlock: no sum waits for a later sum, and around a ring no hop waits
for a later hop.

[Note: two addends] Two addends have the same sum, whichever rank adds them. So if nothing happens
between the halves, two ranks leave both halves to gloo's all-reduce, whose own thread sends and
adds. That sends as many bytes but takes less processor time. gloo distinguishes collectives by their
order, so only collectives that are posted on the thread that starts journeys can do this. A codec's
link runs the two halves separately.
"""

import contextlib
import itertools
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Final, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from crossover_ddp.errors import UnsupportedConfigurationError

from .journeys import JourneyThread, Place, living, nothing, stop_all

Received = TypeVar("Received")
Layout = Sequence[int]
"""The number of elements in each rank's part of a flat tensor, in rank order."""
Halfway = Callable[[], None]

# gloo's tags are int32 numbers. Bit 30 is ours, far from tags that users count up from 0. The
# channel and the number of the collective follow.
_PRIVATE_TAG: Final = 1 << 30
_CHANNEL_BITS: Final = 4
_NUMBER_BITS: Final = 30 - _CHANNEL_BITS
_STAGES: Final = 8  # the maximum number of collectives on one link
# Measured: with two pieces per shard the link stays busy while one of them is added. Shorter pieces
# cost more, and longer ones gain nothing.
_PIECES: Final = 2
_MIN_PIECE_BYTES: Final = 1 << 20
_MAX_PIECE_BYTES: Final = 4 << 20
_MIN_ADDEND_BYTES: Final = 512 << 10  # however many ranks there are
_ROW_BYTES: Final = 4 << 20
_AHEAD_BYTES: Final = 8 << 20
_AHEAD_ROWS: Final = 2
_BURST_BYTES: Final = 1 << 20
_SHORT_S: Final = 2e-3  # sends shorter than this are posted before receives
# Around a ring each hop waits for a piece, and a later journey's sends must not delay forwarded
# pieces.
_RING_PIECES: Final = 16
_MIN_RING_PIECE_BYTES: Final = 128 << 10
_RING_AHEAD_BYTES: Final = 1 << 20
_MIN_RING_BYTES: Final = 4 << 20
_UNEVEN: Final = 1.2  # ratio of the largest shard to the mean shard


class Link:
    """The collectives of one journey over the ranks of a process group.

    The base class is a link of a single rank. All methods are collective: all ranks make the same
    calls in the same order, on links that were created in the same order. Work that the journey
    issues later may use a result. On a device the result need not be there yet when the call
    returns.
    """

    rank: int
    size: int
    # Whether all ranks must issue all collectives in the same order, on the thread that starts
    # journeys (NCCL).
    in_program_order = False
    _sent_bytes = 0

    async def reduce_scatter(self, flat: Tensor, layout: Layout) -> Tensor:
        """Average ``flat`` over the ranks, each shard on its owner, and return this rank's shard.

        The shard is a view of ``flat``; the other shards are undefined afterwards. Values are
        divided before they are added, so that half precision does not overflow.
        """
        return flat

    async def all_gather(self, flat: Tensor, layout: Layout) -> None:
        """Copy each shard from its owner to all ranks, in place."""

    async def all_reduce(self, flat: Tensor, layout: Layout, halfway: Halfway = nothing) -> None:
        """Average ``flat`` on all ranks, with the same bits as `reduce_scatter` and `all_gather`.

        Call it only as a journey's first collective. ``halfway`` is called between the two halves,
        or at the end where both are one message.
        """
        await self.reduce_scatter(flat, layout)
        halfway()
        await self.all_gather(flat, layout)

    async def all_to_all(self, outgoing: Tensor, to: Layout, incoming: Tensor, of: Layout) -> None:
        """Send each rank its part of ``outgoing``, and receive each rank's part of ``incoming``."""

    async def compute(self) -> None:
        """Resume on a thread where an owner may compute for a long time."""

    async def settle(self) -> None:
        """Resume on a thread that may block. The journey must issue no collective afterwards."""

    @property
    def exact(self) -> "Link":
        """The same link without a codec, for tensors that must arrive as they are."""
        return self

    def sent(self) -> int:
        """Return the number of bytes that this rank has sent since the previous call."""
        sent = self._sent_bytes
        self._sent_bytes = 0
        return sent


def parts(flat: Tensor, layout: Layout) -> list[Tensor]:
    """Return each rank's part of ``flat`` as a view."""
    return list(flat.split(list(layout)))


def all_finite(values: Tensor) -> bool | Tensor:
    """Return whether all values are finite.

    For a device tensor the result is a tensor too, so that the host does not wait for the device.
    """
    if values.device.type != "cpu":
        return torch.isfinite(values).all()
    # isfinite takes 8 ms for a million elements, so try the sum first. The sum of finite values may
    # overflow, so it only decides if it is finite.
    return math.isfinite(values.sum()) or bool(torch.isfinite(values).all())


class LinkAround(Link):
    """A link that forwards its calls to another link.

    It does not forward `all_reduce`, which calls the two halves instead, so that a subclass sees
    them.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self.rank = link.rank
        self.size = link.size
        self.in_program_order = link.in_program_order

    async def reduce_scatter(self, flat: Tensor, layout: Layout) -> Tensor:
        return await self._link.reduce_scatter(flat, layout)

    async def all_gather(self, flat: Tensor, layout: Layout) -> None:
        await self._link.all_gather(flat, layout)

    async def all_to_all(self, outgoing: Tensor, to: Layout, incoming: Tensor, of: Layout) -> None:
        await self._link.all_to_all(outgoing, to, incoming, of)

    async def compute(self) -> None:
        await self._link.compute()

    async def settle(self) -> None:
        await self._link.settle()

    def sent(self) -> int:
        return self._link.sent()


class Alone(Link):
    """The network of a single rank, for tensors on ``place``. It is its own link.

    The rank's own values are the mean.
    """

    rank = 0
    size = 1
    # Equal shards should begin at multiples of this.
    alignment_bytes = 1

    def __init__(self, place: Place) -> None:
        self.place = place
        self._settling = JourneyThread("crossover-settle", place.adopt_thread)

    def link(self, *, divides: bool = True) -> Link:
        """Return the link for the next journey. All ranks must create links in the same order.

        ``divides=False`` makes its `Link.reduce_scatter` return the sum instead of the mean.
        """
        return self

    def interrupt(self) -> None:
        """Make every wait of this rank fail, and the peers' waits for it, if the backend can."""

    def close(self, timeout_s: float) -> bool:
        """Stop the threads after their queued work, and return whether they ended in time.

        It is safe to call it more than once.
        """
        return all([self.place.close(timeout_s), stop_all([self._settling], timeout_s)])

    async def settle(self) -> None:
        await self._settling


# --- gloo ---

# Numbers that distinguish the messages of a group's networks. Ranks take them in the same order.
_channels: "weakref.WeakKeyDictionary[dist.ProcessGroup, set[int]]" = weakref.WeakKeyDictionary()
_taking = threading.Lock()


class Gloo:
    """A network that sends messages over gloo.

    It has the connections of a process group, threads, and memory. It holds the group by a weak
    reference.

    Args:
        group: the process group.
        place: the device that journeys compute on.
        whole: for a network of some ranks, which `among` returns: the network of all ranks.
        ranks: the ranks of the group that exchange tensors here, in ascending order. The network
            numbers them from 0. Default: all ranks.
    """

    in_program_order = False
    alignment_bytes = 1
    # Its number among the networks of the group, and the numbers of its links.
    _channel: int
    _numbers: Iterator[int]

    def __init__(
        self,
        group: dist.ProcessGroup,
        place: Place,
        whole: "Gloo | None" = None,
        ranks: Sequence[int] | None = None,
    ) -> None:
        self.group = weakref.ref(group)
        self.place = place
        self.ranks = range(group.size()) if ranks is None else ranks
        self.rank = self.ranks.index(group.rank())
        self.size = len(self.ranks)
        # Whether it has all ranks of the group. Otherwise its links return sums.
        self.is_whole = whole is None
        self.others = [(self.rank + step) % self.size for step in range(1, self.size)]
        self.reducing = JourneyThread("crossover-reduce", place.adopt_thread)
        self.computing = JourneyThread("crossover-compute", place.adopt_thread)
        self.gathering = JourneyThread("crossover-gather", place.adopt_thread)
        self.settling = JourneyThread("crossover-settle", place.adopt_thread)
        self.sums = _Sums(self)
        self.bytes_per_s = 0.0  # the fastest rate at which data has arrived so far
        self._arrived_bytes = 0
        self._arrived_s = 0.0
        self._relays: list[JourneyThread] = []
        self._idle_relays: list[JourneyThread] = []
        self._lock = threading.Lock()
        self._is_closed = False
        self._channels = set[int]()
        if whole is not None:
            self._channel = whole._channel
            self._numbers = whole._numbers
            return
        self._channels = _channels.setdefault(group, set())
        with _taking:
            if not (free := {*range(1 << _CHANNEL_BITS)} - self._channels):
                raise UnsupportedConfigurationError(
                    f"expected at most {len(self._channels)} exchanges at a time on one process "
                    "group, got one more; close() states that are no longer in use"
                )
            self._channel = min(free)
            self._channels.add(self._channel)
        self._numbers = itertools.count()

    def among(self, ranks: Sequence[int]) -> "Gloo":
        """Return a network of some of the ranks, of which this rank is one.

        It adds without dividing. Messages of both networks are numbered in one sequence.
        """
        return type(self)(living(self.group), self.place, self, ranks)

    def arrived(self, nbytes: int, since_s: float) -> None:
        """Count ``nbytes`` of data, which have arrived since ``since_s``, for the fastest rate."""
        with self._lock:
            self._arrived_bytes += nbytes
            self._arrived_s += time.monotonic() - since_s + 1e-9
            if self._arrived_bytes >= _BURST_BYTES:
                self.bytes_per_s = max(self.bytes_per_s, self._arrived_bytes / self._arrived_s)
                self._arrived_bytes = 0
                self._arrived_s = 0.0

    def link(self, *, divides: bool = True) -> Link:
        return GlooLink(self, divides=divides and self.is_whole, may_leave_sums=self.is_whole)

    def next_number(self) -> int:
        """Return the number of the next link."""
        return next(self._numbers)

    def tag(self, number: int) -> int:
        return _PRIVATE_TAG | self._channel << _NUMBER_BITS | number % (1 << _NUMBER_BITS)

    def receive(self, piece: Tensor, rank: int, tag: int) -> dist.Work:
        return living(self.group).recv([piece], self.ranks[rank], tag)

    def interrupt(self) -> None:
        """Close all connections.

        gloo cannot cancel a wait, but a wait that times out closes all connections of its group. A
        receive from a rank whose connection is already closed fails at once, so the next rank is
        tried.
        """
        for rank in self.others:
            with contextlib.suppress(RuntimeError, ValueError):
                self.receive(torch.empty(1), rank, _PRIVATE_TAG - 1).wait(timedelta(milliseconds=1))

    def close(self, timeout_s: float) -> bool:
        with self._lock:
            if not self._is_closed:
                self._channels.discard(self._channel)  # no message is under way any more
            self._is_closed = True
        workers = [self.reducing, *self._relays, self.computing, self.gathering, self.settling]
        return stop_all(workers, timeout_s)

    def relay(self) -> JourneyThread:
        """Lend a thread for one collective, see [Note: who waits where]."""
        with self._lock:
            if self._is_closed:
                return self.gathering  # it ends last, and refuses the job
            if not self._idle_relays:
                self._relays.append(JourneyThread("crossover-relay", self.place.adopt_thread))
                return self._relays[-1]
            return self._idle_relays.pop()

    def give_back(self, relay: JourneyThread) -> None:
        """Take back a thread from `relay`. The rest of the journey must not block on it."""
        with self._lock:
            if relay in self._relays:
                self._idle_relays.append(relay)


class GlooLink(Link):
    """A link over gloo, see [Note: straight to the owner] and [Note: around a ring].

    Args:
        net: the network.
        divides: whether `reduce_scatter` returns the mean. Otherwise it returns the sum.
        may_leave_sums: whether `all_reduce` is called where journeys start; see [Note: two addends].
    """

    def __init__(self, net: Gloo, *, divides: bool, may_leave_sums: bool) -> None:
        number = net.next_number()
        self._net = net
        self._divides = divides
        self._may_leave_sums = may_leave_sums
        self._has_gathered = False
        self.rank = net.rank
        self.size = net.size
        self._tags = map(net.tag, range(_STAGES * number, _STAGES * (number + 1)))

    def _send(self, piece: Tensor, rank: int, tag: int) -> dist.Work:
        self._sent_bytes += piece.numel() * piece.itemsize
        return living(self._net.group).send([piece], self._net.ranks[rank], tag)

    def _both(
        self, outgoing: Sequence[tuple[Tensor, int]], tag: int, receive: Callable[[], Received]
    ) -> tuple[list[dist.Work], Received]:
        """Post sends and receives in the better order, see [Note: which first]."""
        is_short = sum([piece.nbytes for piece, _ in outgoing]) < _SHORT_S * self._net.bytes_per_s
        received = None if is_short else receive()
        sent = [self._send(piece, rank, tag) for piece, rank in outgoing]
        return sent, receive() if received is None else received

    async def reduce_scatter(self, flat: Tensor, layout: Layout) -> Tensor:
        net = self._net
        tag = next(self._tags)
        shards = parts(flat, layout)
        if self._divides:
            flat.div_(self.size)
        right = net.others[0]
        left = net.others[-1]
        if goes_around(layout, flat.itemsize):
            ahead_bytes = _RING_AHEAD_BYTES
            sources = [left]
            # The shards that this rank adds to, in the order in which they come by. Its own is
            # last.
            added = [*net.others[-2::-1], self.rank]
            outgoing = [(piece, right) for piece in _ring_pieces(shards[left])]
            sums = [(part, piece) for part in added for piece in _ring_pieces(shards[part])]
        else:
            ahead_bytes = _AHEAD_BYTES
            sources = net.others
            most_bytes = max(_MIN_ADDEND_BYTES, _ROW_BYTES // (self.size - 1))
            outgoing = []
            for owner in net.others:
                outgoing += [(piece, owner) for piece in _pieces(shards[owner], most_bytes)]
            sums = [(self.rank, piece) for piece in _pieces(shards[self.rank], most_bytes)]
        addends = [piece for _, piece in sums]
        since_s = time.monotonic()

        def receive() -> Iterator[_Row]:
            return net.sums.post(addends, sources, tag, ahead_bytes)

        leaving, rows = self._both(outgoing, tag, receive)
        await net.reducing
        for (part, piece), row in zip(sums, rows, strict=True):
            for work in row.arriving:
                work.wait()
            tree_sum(row.addends, piece)
            if part != self.rank:
                leaving.append(self._send(piece, right, tag))
            net.sums.done(row)
        net.arrived(shards[self.rank].nbytes, since_s)
        for work in leaving:
            work.wait()
        return shards[self.rank]

    async def all_gather(self, flat: Tensor, layout: Layout) -> None:
        """Copy each shard from its owner to all ranks, in one hop or around a ring."""
        if goes_around(layout, flat.itemsize):
            await self._gather_around(flat, layout)
        else:
            await self._gather_straight(flat, layout)

    async def _gather_straight(self, flat: Tensor, layout: Layout) -> None:
        net = self._net
        tag = next(self._tags)
        shards = parts(flat, layout)
        outgoing = [(piece, rank) for piece in _pieces(shards[self.rank]) for rank in net.others]

        def receive() -> list[dist.Work]:
            return [
                net.receive(piece, owner, tag)
                for owner in net.others
                for piece in _pieces(shards[owner])
            ]

        leaving, arriving = self._both(outgoing, tag, receive)
        thread = net.relay() if self._has_gathered else net.gathering
        self._has_gathered = True
        await thread
        for work in reversed(arriving + leaving):  # waiting for the last first saves wake-ups
            work.wait()
        net.give_back(thread)

    async def _gather_around(self, flat: Tensor, layout: Layout) -> None:
        net = self._net
        tag = next(self._tags)
        shards = parts(flat, layout)
        right = net.others[0]
        left = net.others[-1]
        incoming = [
            (owner, piece) for owner in net.others[::-1] for piece in _ring_pieces(shards[owner])
        ]
        outgoing = [(piece, right) for piece in _ring_pieces(shards[self.rank])]

        def receive() -> list[dist.Work]:
            return [net.receive(piece, left, tag) for _, piece in incoming]

        leaving, arriving = self._both(outgoing, tag, receive)
        self._has_gathered = True
        thread = net.relay()
        await thread
        for (owner, piece), work in zip(incoming, arriving, strict=True):
            work.wait()
            if owner != right:  # the right neighbour has its own shard
                leaving.append(self._send(piece, right, tag))
        for work in reversed(leaving):
            work.wait()
        net.give_back(thread)

    async def all_reduce(self, flat: Tensor, layout: Layout, halfway: Halfway = nothing) -> None:
        """Average ``flat`` on all ranks, see [Note: two addends]."""
        net = self._net
        if self.size > 2 or not self._may_leave_sums:
            return await super().all_reduce(flat, layout, halfway)
        self._sent_bytes += flat.nbytes
        summing = living(net.group).allreduce([flat.div_(2) if self._divides else flat])
        await net.reducing
        summing.wait()
        halfway()

    async def all_to_all(self, outgoing: Tensor, to: Layout, incoming: Tensor, of: Layout) -> None:
        net = self._net
        tag = next(self._tags)
        leaving = parts(outgoing, to)
        coming = parts(incoming, of)
        pieces = [(piece, rank) for rank in net.others for piece in _pieces(leaving[rank])]
        since_s = time.monotonic()

        def receive() -> list[dist.Work]:
            return [
                net.receive(piece, rank, tag)
                for rank in net.others
                for piece in _pieces(coming[rank])
            ]

        sent, received = self._both(pieces, tag, receive)
        thread = net.relay() if tag % _STAGES else net.reducing
        await thread
        for work in received + sent:
            work.wait()
        net.give_back(thread)
        net.arrived(coming[net.others[0]].nbytes, since_s)

    async def compute(self) -> None:
        await self._net.computing

    async def settle(self) -> None:
        """Resume on one thread for all journeys.

        With several threads, a journey could wait for the turn of a later step.
        """
        await self._net.settling


class _Row(NamedTuple):
    """The addends of one piece of a shard, which this rank adds."""

    addends: Sequence[Tensor]  # in rank order
    arriving: Sequence[dist.Work]
    memory: Tensor  # holds all addends except this rank's own


class _Sums:
    """Posts the receives for all sums, see [Note: memory for sums]."""

    def __init__(self, net: Gloo) -> None:
        # A weak reference: threads hold rows that are under way, and must not keep the exchange of
        # a destroyed group alive.
        self._net = weakref.ref(net)
        self._lock = threading.Lock()
        # For each piece: the piece, its sources, its tag, the number of bytes that may be received
        # ahead, and the queue that its row goes to.
        self._waiting: deque[tuple[Tensor, Sequence[int], int, int, deque[_Row]]] = deque()
        self._posted: deque[int] = deque()  # the size of each row in bytes
        self._free: list[Tensor] = []

    def post(
        self, pieces: Sequence[Tensor], sources: Sequence[int], tag: int, ahead_bytes: int
    ) -> Iterator[_Row]:
        """Receive the addends for ``pieces`` as early as memory allows, and yield a row for each.

        Call `done` on each row in turn.
        """
        rows: deque[_Row] = deque()
        with self._lock:
            self._waiting.extend((piece, sources, tag, ahead_bytes, rows) for piece in pieces)
            self._post_some()
        return (rows.popleft() for _ in pieces)

    def done(self, row: _Row) -> None:
        with self._lock:
            self._free.append(row.memory)
            self._posted.popleft()
            self._post_some()

    def _post_some(self) -> None:
        net = self._net()
        while self._waiting and net is not None:
            own, sources, tag, ahead_bytes, rows = self._waiting[0]
            nbytes = own.nbytes * len(sources)
            if len(self._posted) >= _AHEAD_ROWS and sum(self._posted) + nbytes > ahead_bytes:
                return
            self._waiting.popleft()
            self._posted.append(nbytes)
            memory = self._borrow(nbytes)
            addends = dict(
                zip(sources, memory[:nbytes].view(own.dtype).split(own.numel()), strict=True)
            )
            arriving = [net.receive(piece, rank, tag) for rank, piece in addends.items()]
            addends[net.rank] = own
            rows.append(_Row([addends[rank] for rank in sorted(addends)], arriving, memory))

    def _borrow(self, nbytes: int) -> Tensor:
        while self._free:  # pieces that are too small are dropped
            if (memory := self._free.pop()).numel() >= nbytes:
                return memory
        return torch.empty(-(-nbytes // 64) * 64, dtype=torch.uint8)


def tree_sum(addends: Sequence[Tensor], out: Tensor) -> None:
    """Add tensors as a balanced tree over ranks, ((0 + 1) + (2 + 3)) + ….

    So the result has the same bits, whichever rank adds.

    Args:
        addends: at least two tensors, in rank order. They are overwritten.
        out: one of the addends; it receives the sum.
    """
    while len(addends) > 2:
        sums = [
            torch.add(addends[index], addends[index + 1], out=addends[index])
            for index in range(0, len(addends) - 1, 2)
        ]
        rest = addends[2 * len(sums) :]  # the last addend if there is an odd number of them
        addends = [*sums, *rest]
    torch.add(*addends, out=out)


def goes_around(layout: Layout, itemsize: int) -> bool:
    """Return whether a tensor with this layout should travel around a ring. Pure.

    A ring must relieve the busiest cable enough to pay for its hops, see docs/measurements.md.
    """
    numel = sum(layout)
    is_uneven = max(layout) * len(layout) > _UNEVEN * numel
    return len(layout) > 2 and is_uneven and numel * itemsize >= _MIN_RING_BYTES


def _pieces(part: Tensor, most_bytes: int = _MAX_PIECE_BYTES) -> Sequence[Tensor]:
    return _cut(part, _PIECES, _MIN_PIECE_BYTES, most_bytes)


def _ring_pieces(part: Tensor) -> Sequence[Tensor]:
    return _cut(part, _RING_PIECES, _MIN_RING_PIECE_BYTES, _RING_AHEAD_BYTES)


def _cut(part: Tensor, count: int, least_bytes: int, most_bytes: int) -> Sequence[Tensor]:
    nbytes = part.numel() * part.itemsize
    piece_bytes = min(max(nbytes // count, least_bytes), most_bytes)
    numel = max(1, piece_bytes // part.itemsize)
    if part.numel() > numel:
        return list(part.split(numel))
    return (part,) if part.numel() else ()  # split() would take a while

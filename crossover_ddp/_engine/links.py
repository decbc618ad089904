"""How the ranks of one process group exchange flat tensors: a few collectives, the same whatever carries them.

A link is the ranks for one journey; a network makes links. Here are those of one rank, and of CPU tensors over gloo, by
messages; `device` has those of a backend's own collectives, and of a device's tensors.

[Note: straight to the owner] Every part goes to its owner in one hop, who adds all addends of it as a tree over ranks,
and sends the result to all in one hop. A rank sends (W - 1)/W of the tensor in either half, the least possible. Nobody
passes on what it receives, so sends are handed to gloo as soon as their values are final, and no thread of ours has
anything to do but to wait and to add.

[Note: which first] gloo sends nothing before it hears that the other rank receives. That is told behind what is being
sent already, and until then the other direction is idle. But while a thread of ours writes, gloo's spins on what
arrives, on the same core if a rank has one. So sends come before receives where they are short, by the fastest rate
of a megabyte: less may pass in a link's burst. Measured: docs/measurements.md.

[Note: around a ring] Where one rank owns most of a large tensor its cable would carry W - 1 copies of that. Such a
layout goes from left to right, each rank adding or passing on; a part's sum begins behind its owner and ends there.

[Note: who waits where] A thread that waits keeps others waiting, on other ranks, too. A journey's first collective is
posted when it starts, in one order on all ranks: it waits on the reducing thread. Whether its first gather is posted
depends on no gather behind it: it waits on the gathering thread. A later exchange or gather, and who passes on around
a ring, has a thread to itself and waits for its like only.

[Note: memory for sums] What arrives to be added needs memory, with an owner W - 1 times its part. So it is received
piece by piece, in the order of journeys, at most some megabytes ahead of what is added. That cannot lock up: nothing
in a sum waits for a later one, nor around a ring for a later hop.

[Note: two addends] Two addends have one sum, whoever adds them. So where nothing happens between the halves two ranks
leave both to gloo, whose own thread sends and adds: as many bytes, and less of the processor. gloo tells collectives
apart by their order, so this is for what is posted on the thread that starts journeys. A codec's link goes by halves.
"""

import contextlib
import functools
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

from .journeys import Place, Station, living, stop_all

Received = TypeVar("Received")
Layout = Sequence[int]
"""Number of elements of each rank's part of a flat tensor, in rank order."""
Halfway = Callable[[], None]

# gloo's tags are an int32: bit 30 is ours, far from what users count up from 0; then channel and number of collective.
_PRIVATE_TAG: Final = 1 << 30
_CHANNEL_BITS: Final = 4
_NUMBER_BITS: Final = 30 - _CHANNEL_BITS
_STAGES: Final = 8  # collectives of one link, at most
# Measured: two pieces of a part keep the link busy while one is added; shorter ones cost, longer ones gain nothing.
_PIECES: Final = 2
_MIN_PIECE_BYTES: Final = 1 << 20
_MAX_PIECE_BYTES: Final = 4 << 20
_MIN_ADDEND_BYTES: Final = 512 << 10  # of as many ranks as there may be
_ROW_BYTES: Final = 4 << 20
_AHEAD_BYTES: Final = 8 << 20
_AHEAD_ROWS: Final = 2
_BURST_BYTES: Final = 1 << 20
_SHORT_S: Final = 2e-3  # what takes less on the wire is sent before receives are posted
# Around a ring, where each hop waits for a piece; and what a later journey sends must not hold up what is passed on.
_RING_PIECES: Final = 16
_MIN_RING_PIECE_BYTES: Final = 128 << 10
_RING_AHEAD_BYTES: Final = 1 << 20
_MIN_RING_BYTES: Final = 4 << 20
_UNEVEN: Final = 1.2  # the largest part over the mean


def nothing_halfway() -> None:
    """Do nothing between the halves."""


class Link:
    """The ranks of one process group, for the collectives of one journey. This one is of a rank that is alone.

    Collective: all ranks make the same calls in the same order, on links that were drawn in the same order. What comes
    back is for work that is issued where the journey is; on a device it need not be there yet.

    ``in_program_order``: all ranks must issue all collectives in one order, on the thread that starts journeys.
    """

    rank: int
    size: int
    in_program_order: bool
    _sent_bytes = 0

    async def reduce_scatter(self, flat: Tensor, layout: Layout) -> Tensor:
        """Average ``flat`` over the ranks into each part's owner; return the own part, in place.

        It is divided before it is added, so that half precision does not overflow. What stands in the other parts
        afterwards is nobody's.
        """
        return flat

    async def all_gather(self, flat: Tensor, layout: Layout) -> None:
        """Copy each owner's part to all."""

    async def all_reduce(
        self, flat: Tensor, layout: Layout, halfway: Halfway = nothing_halfway
    ) -> None:
        """`reduce_scatter` followed by `all_gather`, bit for bit. Only as a journey's first collective.

        ``halfway`` is called in between, or at the end where both are one message.
        """
        await self.reduce_scatter(flat, layout)
        halfway()
        await self.all_gather(flat, layout)

    async def all_to_all(self, outgoing: Tensor, to: Layout, incoming: Tensor, of: Layout) -> None:
        """Send each other rank its part of ``outgoing``, and receive its part of ``incoming`` from each."""

    async def compute(self) -> None:
        """Go on where an owner may compute for long."""

    async def settle(self) -> None:
        """Go on where a journey may block for somebody else; it issues nothing afterwards."""

    def sent(self) -> int:
        """Return how many bytes this rank has sent since this was called before, those of its parts of sums."""
        sent, self._sent_bytes = self._sent_bytes, 0
        return sent


def parts(flat: Tensor, layout: Layout) -> list[Tensor]:
    """Return each rank's part of ``flat``, not copies."""
    return list(flat.split(list(layout)))


def all_finite(values: Tensor) -> bool | Tensor:
    """Tell whether no value is infinite or NaN; of a device's values by a tensor, so that the host need not wait."""
    if values.device.type != "cpu":
        return torch.isfinite(values).all()
    # isfinite takes 8 ms for a million elements. Of finite ones the sum may overflow: a second look decides.
    return math.isfinite(values.sum()) or bool(torch.isfinite(values).all())


class LinkAround(Link):
    """A link around a link, which does all that a subclass leaves to it, but for `all_reduce`, which goes by halves."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.rank, self.size, self.in_program_order = link.rank, link.size, link.in_program_order

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
    """One rank, whose own values are the mean: a network, which makes links for tensors of ``place``, and its own link.

    ``alignment_bytes``: where an equal part should begin.
    """

    rank, size, alignment_bytes, in_program_order = 0, 1, 1, False

    def __init__(self, place: Place) -> None:
        self.place = place
        self._settling = Station("crossover-settle", place.adopt_thread)

    def link(self) -> Link:
        """Return the next journey's; all ranks make them in the same order."""
        return self

    def interrupt(self) -> None:
        """End every wait of this rank with an error, and of those that wait for it, if that can be done."""

    def close(self, timeout_s: float) -> bool:
        """End the threads after what they have; return whether they did in time. May be called again."""
        return all([self.place.close(timeout_s), stop_all([self._settling], timeout_s)])

    async def settle(self) -> None:
        await self._settling


# --- gloo ---

# Numbers that set the messages of a group's networks apart; ranks take them in the same order.
_channels: "weakref.WeakKeyDictionary[dist.ProcessGroup, set[int]]" = weakref.WeakKeyDictionary()
_taking = threading.Lock()


class Gloo:
    """The connections of a group, which is held weakly, threads, and memory for sums.

    ``place``: of the tensors that journeys compute with. ``divides``: whether what it adds has yet to be divided, as on
    CPUs; a device's tensors come divided, on a thread of their own.
    """

    alignment_bytes, divides = 1, True

    def __init__(self, group: dist.ProcessGroup, place: Place) -> None:
        self.group, self.place = weakref.ref(group), place
        self.rank, self.size = group.rank(), group.size()
        self.others = [(self.rank + step) % self.size for step in range(1, self.size)]
        self.reducing = Station("crossover-reduce", place.adopt_thread)
        self.computing = Station("crossover-compute", place.adopt_thread)
        self.gathering = Station("crossover-gather", place.adopt_thread)
        self.settling = Station("crossover-settle", place.adopt_thread)
        self.sums = _Sums(self)
        self.bytes_per_s = 0.0  # at most, of what has arrived
        self._arrived_bytes, self._arrived_s = 0, 0.0
        self._relays: list[Station] = []
        self._idle_relays: list[Station] = []
        self._channels = _channels.setdefault(group, set())
        with _taking:
            if not (free := {*range(1 << _CHANNEL_BITS)} - self._channels):
                raise UnsupportedConfigurationError(
                    f"expected at most {len(self._channels)} exchanges at a time on one process group, got one more; "
                    "close() states that are no longer in use"
                )
            self._channel: int = min(free)
            self._channels.add(self._channel)
        self._numbers = itertools.count()
        self._lock, self._is_closed = threading.Lock(), False

    def arrived(self, nbytes: int, since_s: float) -> None:
        with self._lock:
            self._arrived_bytes += nbytes
            self._arrived_s += time.monotonic() - since_s + 1e-9
            if self._arrived_bytes >= _BURST_BYTES:
                self.bytes_per_s = max(self.bytes_per_s, self._arrived_bytes / self._arrived_s)
                self._arrived_bytes, self._arrived_s = 0, 0.0

    def link(self) -> Link:
        return _GlooLink(self, next(self._numbers))

    def tag(self, number: int) -> int:
        return _PRIVATE_TAG | self._channel << _NUMBER_BITS | number % (1 << _NUMBER_BITS)

    def receive(self, piece: Tensor, rank: int, tag: int) -> dist.Work:
        return living(self.group).recv([piece], rank, tag)

    def interrupt(self) -> None:
        """Close all connections.

        gloo cannot cancel a wait, but one that runs out of time closes all connections of its group. Of a rank whose
        connection is closed already nothing is waited for, so another one is tried.
        """
        for rank in self.others:
            with contextlib.suppress(RuntimeError, ValueError):
                self.receive(torch.empty(1), rank, _PRIVATE_TAG - 1).wait(timedelta(milliseconds=1))

    def close(self, timeout_s: float) -> bool:
        with self._lock:
            if not self._is_closed:
                self._channels.discard(self._channel)  # none of its messages is under way
            self._is_closed = True
        workers = [self.reducing, *self._relays, self.computing, self.gathering, self.settling]
        return stop_all(workers, timeout_s)

    def relay(self) -> Station:
        """Lend a thread for one collective, see [Note: who waits where]."""
        with self._lock:
            if self._is_closed:
                return self.gathering  # which ends after all that lend, and says so
            if not self._idle_relays:
                self._relays.append(Station("crossover-relay", self.place.adopt_thread))
                return self._relays[-1]
            return self._idle_relays.pop()

    def give_back(self, relay: Station) -> None:
        """Let another collective have the thread, if it was lent; the rest of this journey waits for nobody there."""
        with self._lock:
            if relay in self._relays:
                self._idle_relays.append(relay)


class _GlooLink(Link):
    """One journey's messages, see [Note: straight to the owner] and [Note: around a ring]."""

    in_program_order = False

    def __init__(self, net: Gloo, number: int) -> None:
        self._net, self._has_gathered = net, False
        self.rank, self.size = net.rank, net.size
        self._tags = map(net.tag, range(_STAGES * number, _STAGES * (number + 1)))

    def _send(self, piece: Tensor, rank: int, tag: int) -> dist.Work:
        self._sent_bytes += piece.numel() * piece.itemsize
        return living(self._net.group).send([piece], rank, tag)

    def _both(
        self, outgoing: Sequence[tuple[Tensor, int]], tag: int, receive: Callable[[], Received]
    ) -> tuple[list[dist.Work], Received]:
        """Send pieces to ranks, and call ``receive``, see [Note: which first]."""
        is_short = sum([piece.nbytes for piece, _ in outgoing]) < _SHORT_S * self._net.bytes_per_s
        received = None if is_short else receive()
        sent = [self._send(piece, rank, tag) for piece, rank in outgoing]
        return sent, receive() if received is None else received

    async def reduce_scatter(self, flat: Tensor, layout: Layout) -> Tensor:
        net, tag, cut = self._net, next(self._tags), parts(flat, layout)
        if net.divides:
            flat.div_(self.size)
        right, left = net.others[0], net.others[-1]
        cut_up: Callable[[Tensor], Sequence[Tensor]] = _ring_pieces
        if goes_around(layout, flat.itemsize):
            sources, ahead_bytes = [left], _RING_AHEAD_BYTES
            added, first = [*net.others[-2::-1], self.rank], [(left, right)]
        else:
            most_bytes = max(_MIN_ADDEND_BYTES, _ROW_BYTES // (self.size - 1))
            cut_up = functools.partial(_pieces, most_bytes=most_bytes)
            sources, ahead_bytes = net.others, _AHEAD_BYTES
            added, first = [self.rank], [(owner, owner) for owner in net.others]
        sums = [(part, piece) for part in added for piece in cut_up(cut[part])]
        outgoing = [(piece, to) for part, to in first for piece in cut_up(cut[part])]
        addends, since_s = [piece for _, piece in sums], time.monotonic()
        leaving, rows = self._both(
            outgoing, tag, lambda: net.sums.post(addends, sources, tag, ahead_bytes)
        )
        await net.reducing
        for (part, piece), row in zip(sums, rows, strict=True):
            for work in row.arriving:
                work.wait()
            tree_sum(row.addends, piece)
            if part != self.rank:
                leaving.append(self._send(piece, right, tag))
            net.sums.done(row)
        net.arrived(cut[self.rank].nbytes, since_s)
        for work in leaving:
            work.wait()
        return cut[self.rank]

    async def all_gather(self, flat: Tensor, layout: Layout) -> None:
        """Copy each owner's part to all, in one hop or around a ring."""
        net, tag, cut = self._net, next(self._tags), parts(flat, layout)
        around, right, left = goes_around(layout, flat.itemsize), net.others[0], net.others[-1]
        cut_up, targets = (_ring_pieces, [right]) if around else (_pieces, net.others)
        due = [
            (part, piece)
            for part in net.others[:: -1 if around else 1]
            for piece in cut_up(cut[part])
        ]
        out = [(piece, rank) for piece in cut_up(cut[self.rank]) for rank in targets]
        leaving, arriving = self._both(
            out, tag, lambda: [net.receive(p, left if around else o, tag) for o, p in due]
        )
        thread, self._has_gathered = (
            net.relay() if around or self._has_gathered else net.gathering,
            True,
        )
        await thread
        if around:
            for (part, piece), work in zip(due, arriving, strict=True):
                work.wait()
                if part != right:
                    leaving.append(self._send(piece, right, tag))
            arriving = []
        for work in reversed(arriving + leaving):  # the last one first: fewer wake-ups
            work.wait()
        net.give_back(thread)

    async def all_reduce(
        self, flat: Tensor, layout: Layout, halfway: Halfway = nothing_halfway
    ) -> None:
        """See [Note: two addends]."""
        net = self._net
        if self.size > 2 or not net.divides:  # divided tensors are posted by a device's thread
            return await super().all_reduce(flat, layout, halfway)
        self._sent_bytes += flat.nbytes
        summing = living(net.group).allreduce([flat.div_(2)])
        await net.reducing
        summing.wait()
        halfway()

    async def all_to_all(self, outgoing: Tensor, to: Layout, incoming: Tensor, of: Layout) -> None:
        net, tag, leaving, coming = (
            self._net,
            next(self._tags),
            parts(outgoing, to),
            parts(incoming, of),
        )
        going, due = (
            [(p, rank) for rank in net.others for p in _pieces(each[rank])]
            for each in (leaving, coming)
        )
        since_s = time.monotonic()
        sent, received = self._both(going, tag, lambda: [net.receive(*each, tag) for each in due])
        thread = net.relay() if tag % _STAGES else net.reducing
        await thread
        for work in received + sent:
            work.wait()
        net.give_back(thread)
        net.arrived(coming[net.others[0]].nbytes, since_s)

    async def compute(self) -> None:
        await self._net.computing

    async def settle(self) -> None:
        """Go on on one thread for all, or a journey would wait for a later step's turn."""
        await self._net.settling


class _Row(NamedTuple):
    """One piece of a part, of this rank and of those from which it comes to be added here.

    ``addends``: in the order of ranks. ``memory``: of all of them but the own one.
    """

    addends: Sequence[Tensor]
    arriving: Sequence[dist.Work]
    memory: Tensor


class _Sums:
    """The receives of all sums, see [Note: memory for sums]."""

    def __init__(self, net: Gloo) -> None:
        # Weakly: threads hold what is under way, and must not keep the exchange of a group that has gone.
        self._net = weakref.ref(net)
        self._lock = threading.Lock()
        # By piece: from where, its tag, bytes ahead, and where its row goes.
        self._waiting: deque[tuple[Tensor, Sequence[int], int, int, deque[_Row]]] = deque()
        self._posted: deque[int] = deque()  # bytes of each row
        self._free: list[Tensor] = []

    def post(
        self, pieces: Sequence[Tensor], sources: Sequence[int], tag: int, ahead_bytes: int
    ) -> Iterator[_Row]:
        """Receive addends of ``pieces`` as early as memory allows; the rows must be `done` one by one."""
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
        while self._free:  # what is too small is let go
            if (memory := self._free.pop()).numel() >= nbytes:
                return memory
        return torch.empty(-(-nbytes // 64) * 64, dtype=torch.uint8)


def tree_sum(addends: Sequence[Tensor], out: Tensor) -> None:
    """Add as a balanced tree over ranks, ((0 + 1) + (2 + 3)) + …, whoever does it; writes into the addends.

    ``addends``: in the order of ranks, two or more. ``out``: one of them.
    """
    while len(addends) > 2:
        pairs = [
            torch.add(left, right, out=left)
            for left, right in zip(*[iter(addends)] * 2, strict=False)
        ]
        addends = [*pairs, *addends[2 * len(pairs) :]]
    torch.add(*addends, out=out)


def goes_around(layout: Layout, itemsize: int) -> bool:
    """Tell whether a ring spares the busiest cable enough to pay for its hops, see docs/measurements.md. Pure."""
    numel = sum(layout)
    is_uneven = max(layout) * len(layout) > _UNEVEN * numel
    return len(layout) > 2 and is_uneven and numel * itemsize >= _MIN_RING_BYTES


def _pieces(part: Tensor, most_bytes: int = _MAX_PIECE_BYTES) -> Sequence[Tensor]:
    return _cut(part, _PIECES, _MIN_PIECE_BYTES, most_bytes)


def _ring_pieces(part: Tensor) -> Sequence[Tensor]:
    return _cut(part, _RING_PIECES, _MIN_RING_PIECE_BYTES, _RING_AHEAD_BYTES)


def _cut(part: Tensor, count: int, least_bytes: int, most_bytes: int) -> Sequence[Tensor]:
    numel = max(
        1, min(max(part.numel() * part.itemsize // count, least_bytes), most_bytes) // part.itemsize
    )
    return (
        part.split(numel) if part.numel() > numel else (part,) * bool(part.numel())
    )  # to split takes a while

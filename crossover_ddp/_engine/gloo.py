"""CPU tensors over gloo, by messages.

[Note: straight to the owner] Every part goes to its owner in one hop, who adds all addends of it as a tree over ranks,
and sends the result to all in one hop. A rank sends (W - 1)/W of the tensor in either half, the least possible. Nobody
passes on what it receives, so sends are handed to gloo as soon as their values are final, and threads only ever wait
for arrivals.

[Note: memory for sums] An owner needs W - 1 times its part for what arrives. So its receives are posted piece by piece,
in the order of journeys, which is the same on all ranks, and at most some megabytes ahead of what is added. That cannot
lock up: nothing in a sum waits for a later one.

[Note: two addends] Two addends have one sum. So where nothing happens between the halves two ranks use gloo's own
all-reduce, which needs one wake-up of a thread of ours instead of two, and no messages from Python.
"""

import contextlib
import functools
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .endings import stop_workers
from .journeys import Station
from .links import CHANNEL_BITS, Channels, Layout, Link, in_halves, parts
from .places import Place

# gloo matches messages by an int32 tag: bit 30 is ours, far from what users count up from 0; then the channel, and the
# number of the collective.
_PRIVATE_TAG: Final = 1 << 30
_NUMBER_BITS: Final = 30 - CHANNEL_BITS
_STAGES: Final = 8  # collectives of one link, at most
# Measured, see docs/measurements.md: two pieces of a part keep the link busy while the first one is added; below the
# lower bound the cost per message shows, above the upper one nothing is gained.
_PIECES: Final = 2
_MIN_PIECE_BYTES: Final = 1 << 20
_MAX_PIECE_BYTES: Final = 4 << 20
_MIN_ADDEND_BYTES: Final = 512 << 10  # of as many ranks as there may be
_ROW_BYTES: Final = 4 << 20
_AHEAD_BYTES: Final = 8 << 20
_AHEAD_ROWS: Final = 2
_ADDED_ALIKE: Final = (torch.float32, torch.float64)  # gloo's arithmetic in half precision is its own


class Gloo:
    """The connections of a group, threads, and memory for sums.

    Args:
        group: has gloo for CPU tensors; held weakly.
        place: of the tensors that journeys compute with, if others bring them here.
        divides: whether what it adds has yet to be divided.
    """

    alignment_bytes = 1

    def __init__(self, group: dist.ProcessGroup, place: Place, *, divides: bool = True) -> None:
        self._group, self.place, self.divides = weakref.ref(group), place, divides
        self.rank, self.size = group.rank(), group.size()
        self.others = [(self.rank + step) % self.size for step in range(1, self.size)]
        self.reducing = Station("crossover-reduce", place.adopt_thread)
        self.computing = Station("crossover-compute", place.adopt_thread)
        self.gathering = Station("crossover-gather", place.adopt_thread)
        self.settling = Station("crossover-settle", place.adopt_thread)
        self.sums = _Sums(self)
        self._channel = Channels.take(group)
        self._numbers = itertools.count()
        self._is_closed = False

    def link(self) -> Link:
        """See `links.Network`."""
        return _GlooLink(self, next(self._numbers))

    def tag(self, number: int) -> int:
        """Return the tag of one collective's messages."""
        return _PRIVATE_TAG | self._channel << _NUMBER_BITS | number % (1 << _NUMBER_BITS)

    def addends(self, part: Tensor) -> Sequence[Tensor]:
        """Cut what is added by its owner, see [Note: memory for sums]."""
        return _pieces(part, max(_MIN_ADDEND_BYTES, _ROW_BYTES // (self.size - 1)))

    def send(self, piece: Tensor, rank: int, tag: int) -> dist.Work:
        """Begin to send."""
        return self._alive().send([piece], rank, tag)

    def all_reduce(self, flat: Tensor) -> dist.Work:
        """Begin to add up."""
        return self._alive().allreduce([flat])

    def receive(self, piece: Tensor, rank: int, tag: int) -> dist.Work:
        """Begin to receive."""
        return self._alive().recv([piece], rank, tag)

    def interrupt(self) -> None:
        """See `links.Network`.

        gloo cannot cancel a wait, but one that runs out of time closes all connections of its group.
        """
        with contextlib.suppress(RuntimeError, ValueError):
            self.receive(torch.empty(1), self.others[0], _PRIVATE_TAG - 1).wait(timedelta(milliseconds=1))

    def close(self, timeout_s: float) -> bool:
        """See `links.Network`."""
        if not self._is_closed:
            self._is_closed = True
            Channels.give_back(self._group(), self._channel)
        return stop_workers([self.reducing, self.computing, self.gathering, self.settling], timeout_s)

    def _alive(self) -> dist.ProcessGroup:
        if (group := self._group()) is None:
            raise RuntimeError("the process group was destroyed while an exchange was under way")
        return group


class _GlooLink:
    """One journey's messages, see [Note: straight to the owner]."""

    in_program_order = False

    def __init__(self, net: Gloo, number: int) -> None:
        self._net = net
        self.rank, self.size = net.rank, net.size
        self._tags = map(net.tag, range(_STAGES * number, _STAGES * (number + 1)))

    async def reduce_scatter(self, flat: Tensor, layout: Layout) -> Tensor:
        """See `links.Link`."""
        net, tag, cut = self._net, next(self._tags), parts(flat, layout)
        if net.divides:
            flat.div_(self.size)
        own = cut[self.rank]
        rows = net.sums.post(own, tag)
        leaving = [net.send(piece, owner, tag) for owner in net.others for piece in net.addends(cut[owner])]
        await net.reducing
        for row in rows:
            for work in row.arriving:
                work.wait()
            tree_sum([row.addends[rank] for rank in range(self.size)], row.addends[self.rank])
            net.sums.done(row)
        for work in leaving:
            work.wait()
        return own

    async def all_gather(self, flat: Tensor, layout: Layout) -> None:
        """See `links.Link`.

        Receives may be posted before all addends of ``flat`` have left: a part comes back only after its owner has
        received them.
        """
        net, tag, cut = self._net, next(self._tags), parts(flat, layout)
        works = [net.receive(piece, owner, tag) for owner in net.others for piece in _pieces(cut[owner])]
        works += [net.send(piece, rank, tag) for piece in _pieces(cut[self.rank]) for rank in net.others]
        await net.gathering
        for work in reversed(works):  # the last one first: fewer wake-ups
            work.wait()

    async def all_reduce(self, flat: Tensor, layout: Layout) -> None:
        """See `links.Link`, and [Note: two addends]."""
        net = self._net
        if self.size > 2 or flat.dtype not in _ADDED_ALIKE:
            await in_halves(self, flat, layout)
            return
        work = net.all_reduce(flat.div_(self.size) if net.divides else flat)
        await net.gathering
        work.wait()

    async def all_to_all(self, outgoing: Tensor, to: Layout, incoming: Tensor, of: Layout) -> None:
        """See `links.Link`."""
        net, tag, leaving, coming = self._net, next(self._tags), parts(outgoing, to), parts(incoming, of)
        works = [net.receive(piece, rank, tag) for rank in net.others for piece in _pieces(coming[rank])]
        works += [net.send(piece, rank, tag) for rank in net.others for piece in _pieces(leaving[rank])]
        await net.reducing
        for work in works:
            work.wait()

    async def compute(self) -> None:
        """See `links.Link`."""
        await self._net.computing

    async def settle(self) -> None:
        """See `links.Link`: one thread for all, or a journey would wait for a later step's turn."""
        await self._net.settling


class _Row(NamedTuple):
    """One piece of every rank's addend of a part, on its way to the owner.

    ``addends``: by rank. ``memory``: of all of them but the own one.
    """

    addends: Mapping[int, Tensor]
    arriving: Sequence[dist.Work]
    memory: Tensor


class _Sums:
    """The receives of all sums, see [Note: memory for sums]."""

    def __init__(self, net: Gloo) -> None:
        # Weakly: threads hold what is under way, and must not keep the exchange of a group that has gone.
        self._net = weakref.ref(net)
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Tensor, int, deque[_Row]]] = deque()
        self._posted: deque[int] = deque()  # bytes of each row
        self._free: list[Tensor] = []

    def post(self, own: Tensor, tag: int) -> Iterator[_Row]:
        """Receive the others' addends of ``own`` as early as memory allows; the rows must be `done` one by one."""
        rows: deque[_Row] = deque()
        net = self._net()
        pieces = () if net is None else net.addends(own)
        with self._lock:
            self._waiting.extend((piece, tag, rows) for piece in pieces)
            self._post_some()
        return (rows.popleft() for _ in pieces)

    def done(self, row: _Row) -> None:
        """Take a row's memory back."""
        with self._lock:
            self._free.append(row.memory)
            self._posted.popleft()
            self._post_some()

    def _post_some(self) -> None:
        net = self._net()
        while self._waiting and net is not None:
            own, tag, rows = self._waiting[0]
            nbytes = own.nbytes * len(net.others)
            if len(self._posted) >= _AHEAD_ROWS and sum(self._posted) + nbytes > _AHEAD_BYTES:
                return
            self._waiting.popleft()
            self._posted.append(nbytes)
            memory = self._borrow(nbytes)
            addends = dict(zip(net.others, memory[:nbytes].view(own.dtype).split(own.numel()), strict=True))
            arriving = [net.receive(piece, rank, tag) for rank, piece in addends.items()]
            rows.append(_Row({**addends, net.rank: own}, arriving, memory))

    def _borrow(self, nbytes: int) -> Tensor:
        while self._free:  # what is too small is let go
            if (memory := self._free.pop()).numel() >= nbytes:
                return memory
        return torch.empty(-(-nbytes // 64) * 64, dtype=torch.uint8)


def tree_sum(addends: Sequence[Tensor], out: Tensor) -> None:
    """Add as a balanced tree over ranks, ((0 + 1) + (2 + 3)) + …, whoever does it; writes into the addends.

    Args:
        addends: in the order of ranks, two or more.
        out: one of them.
    """
    while len(addends) > 2:
        pairs = [torch.add(left, right, out=left) for left, right in zip(*[iter(addends)] * 2, strict=False)]
        addends = [*pairs, *addends[2 * len(pairs) :]]
    torch.add(*addends, out=out)


def _pieces(part: Tensor, most_bytes: int = _MAX_PIECE_BYTES) -> Sequence[Tensor]:
    return part.split(_piece_numel(part.numel(), part.itemsize, most_bytes)) if part.numel() else ()


@functools.cache
def _piece_numel(numel: int, itemsize: int, most_bytes: int) -> int:
    nbytes = min(max(numel * itemsize // _PIECES, _MIN_PIECE_BYTES), most_bytes)
    return max(1, nbytes // itemsize)

"""One centre for all ranks of a host, in private shared memory, written without a lock.

[Note: no lock] Ranks add to the centre at the same time. An aligned float32 is read and written as a whole, so nothing
is torn. Two additions to one element at the very same moment may lose one of them; ranks begin at different places, so
that this is rare (measured in docs/averaging.md). After EA-wild (HPC Asia 2020) and Hogwild (arXiv 1106.5730).

[Note: no name] The memory is a file without a name, which the host's first rank makes and the others open through that
process: whatever happens to them later, nothing is left behind, and no other user can open it. A host is a machine and
a network name space on it, which the nodes of an emulated cluster do not share.
"""

import contextlib
import hashlib
import mmap
import os
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import torch

from crossover_ddp._engine.exchange import Exchange
from crossover_ddp._system.machine import machine
from crossover_ddp.errors import SegmentError

_ALIGNMENT: Final = 64
_CHUNKS: Final = 64
_SMALLEST_CHUNK: Final = 1 << 8
_LARGEST_CHUNK: Final = 1 << 16
_NET_NAMESPACE: Final = "/proc/self/ns/net"


class Hosts(NamedTuple):
    """Who shares a host with whom.

    ``leaders``: the first rank of each host, in the order of ranks. ``mates``: the ranks of this one.
    """

    leaders: list[int]
    mates: list[int]


class SharedCentre:
    """The vectors of the centre as this rank sees them.

    Args:
        memory: shared by the host's ranks.
        sizes: a vector for each block, as long as it and of the centre's dtype.
    """

    def __init__(self, memory: mmap.mmap, sizes: Sequence[torch.Tensor]) -> None:
        self.vectors = []
        start = 0
        for size in sizes:
            vector = torch.empty(0, dtype=size.dtype)
            if size.numel():
                vector = torch.frombuffer(memory, dtype=size.dtype, count=size.numel(), offset=start)
            self.vectors.append(vector)
            start += _room(size)

    def pull(self, place: int, pieces: Sequence[torch.Tensor], moving_rate: float, first: float) -> None:
        """Pull parameters and centre together, see [Note: elastic pull] in ``centre.py`` and [Note: no lock].

        Args:
            place: of the block.
            pieces: the parameters' own memory, in the order of the vector.
            moving_rate: α.
            first: where to begin, as a share of the vector; ranks of a host begin at different places.
        """
        vector = self.vectors[place]
        for start, values in chunks_from(first, pieces):
            centre = vector[start : start + values.numel()]
            delta = torch.sub(values.to(centre.device, centre.dtype), centre).mul_(moving_rate)
            values.sub_(delta.to(values.device, values.dtype))
            centre.add_(delta)


def chunks_from(first: float, pieces: Sequence[torch.Tensor]) -> list[tuple[int, torch.Tensor]]:
    """Cut pieces of a vector into chunks, each with its place in it; begin behind a share ``first`` of its elements.

    Chunks are small beside the vector, so that ranks which begin at the same moment stay apart: where two of them added
    to the same chunk at the same speed, a fifth of the additions was lost.
    """
    numel = sum(piece.numel() for piece in pieces)
    size = max(_SMALLEST_CHUNK, min(_LARGEST_CHUNK, numel // _CHUNKS))
    chunks, start = [], 0
    for piece in pieces:
        for chunk in piece.split(size):
            chunks.append((start, chunk))
            start += chunk.numel()
    begin = next((place for place, (start, _) in enumerate(chunks) if start >= first * numel), 0)
    return [*chunks[begin:], *chunks[:begin]]


def share(exchange: Exchange, start: Sequence[torch.Tensor]) -> tuple[SharedCentre, Hosts]:
    """Make one centre for each host, which begins with ``start``, and open it on all its ranks. **Collective**.

    On failure: ``SegmentError`` on all ranks, if it fails on one of them.
    """
    key = int.from_bytes(hashlib.sha256(_host().encode()).digest()[:6], "little")
    hosts = [int(of_rank) for (of_rank,) in exchange.gather_numbers([key], torch.device("cpu"))]
    leaders = [rank for rank, of_rank in enumerate(hosts) if hosts.index(of_rank) == rank]
    leader, size_bytes = hosts.index(key), max(_ALIGNMENT, sum(map(_room, start)))
    found: list[SharedCentre] = []
    with contextlib.ExitStack() as files:

        def make() -> list[float]:
            fd = os.memfd_create("crossover-centre")
            files.callback(os.close, fd)
            os.posix_fallocate(fd, 0, size_bytes)  # too little memory shows here, not in a later write
            return [os.getpid(), fd, os.fstat(fd).st_ino]

        def open_it() -> list[float]:
            fd = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
            files.callback(os.close, fd)
            if os.fstat(fd).st_ino != inode:
                raise OSError(f"process {process} is another one in the leader's container")
            found.append(SharedCentre(mmap.mmap(fd, size_bytes), start))
            if exchange.rank == leader:
                for vector, values in zip(found[0].vectors, start, strict=True):
                    vector.copy_(values)
            return [0.0] * 3

        made = _on_all_ranks(exchange, make if exchange.rank == leader else lambda: [0.0] * 3)
        process, number, inode = made[leader]
        _on_all_ranks(exchange, open_it)
    return found[0], Hosts(leaders, [rank for rank, of_rank in enumerate(hosts) if of_rank == key])


def _on_all_ranks(exchange: Exchange, act: Callable[[], Sequence[float]]) -> list[list[int]]:
    """Return what ``act`` returns on each rank, three numbers; raise on all if it raises on one. **Collective**."""
    error, numbers = None, [0.0] * 3
    try:
        numbers = list(act())
    except OSError as caught:  # all ranks learn of it
        error = caught
    table = exchange.gather_numbers([float(error is not None), *numbers], torch.device("cpu"))
    failed = [rank for rank, (problem, *_) in enumerate(table) if problem]
    if failed:
        raise SegmentError(
            f"expected a shared centre on every host, got none on ranks {failed}: {error or 'see there'}; use "
            "mode='async'"
        ) from error
    return [[int(each) for each in row[1:]] for row in table]


def _host() -> str:
    try:
        return f"{machine()} {os.readlink(_NET_NAMESPACE)}"
    except OSError:  # no /proc
        return machine()


def _room(size: torch.Tensor) -> int:
    return -(-size.nbytes // _ALIGNMENT) * _ALIGNMENT

"""One centre for all ranks of a host, in private shared memory, written without a lock.

[Note: no lock] Ranks add to the centre at the same time. An aligned float32 is read and written as a whole, so nothing
is torn. Two additions to one element at the very same moment may lose one of them; ranks begin at different places, so
that this is rare (measured in docs/averaging.md). After EA-wild (HPC Asia 2020) and Hogwild (arXiv 1106.5730).

[Note: no name stays] The file belongs to this user alone, in the directory of the turns' segments, with their rules.
Its name is gone as soon as all ranks have opened it: whatever happens to them later, nothing is left behind. A host is
a machine and a network name space on it, which the nodes of an emulated cluster do not share.
"""

import contextlib
import hashlib
import mmap
import os
import secrets
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import torch

from crossover_ddp._engine.exchange import Exchange
from crossover_ddp._system.machine import machine
from crossover_ddp._system.shared_memory import SHARED_MEMORY, check_owned, open_directory, segment_directory
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

    def add(self, place: int, delta: torch.Tensor) -> None:
        """Add to the centre of a block."""
        self.vectors[place].add_(delta)


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
    table = exchange.gather_numbers([key, secrets.randbits(48)], torch.device("cpu"))
    leaders = [rank for rank, (of_rank, _) in enumerate(table) if _first(table, of_rank) == rank]
    leader = _first(table, key)
    mates = [rank for rank, (of_rank, _) in enumerate(table) if of_rank == key]
    name = f"centre-{int(table[leader][1]):012x}"
    attempt = _Attempted(exchange)
    with contextlib.ExitStack() as undo:
        if exchange.rank == leader:
            attempt.run(lambda: _make(name, start, undo))
        attempt.agree()
        if exchange.rank != leader:
            attempt.run(lambda: _open(name, os.O_RDWR, start))
        attempt.agree()
    assert attempt.centre is not None
    return attempt.centre, Hosts(leaders, mates)


class _Attempted:
    """Either all ranks have their centre, or all raise."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._error: Exception | None = None
        self.centre: SharedCentre | None = None

    def run(self, action: Callable[[], SharedCentre]) -> None:
        try:
            self.centre = action()
        except Exception as error:  # all ranks learn of it
            self._error = error

    def agree(self) -> None:
        table = self._exchange.gather_numbers([float(self._error is not None)], torch.device("cpu"))
        failed = [rank for rank, (problem,) in enumerate(table) if problem]
        if failed:
            raise SegmentError(
                f"expected a shared centre on every host, got none on ranks {failed}: "
                f"{self._error or 'see there'}; use mode='async'"
            ) from self._error


def _first(table: Sequence[Sequence[float]], key: float) -> int:
    return next(rank for rank, numbers in enumerate(table) if numbers[0] == key)


def _host() -> str:
    try:
        return f"{machine()} {os.readlink(_NET_NAMESPACE)}"
    except OSError:  # no /proc
        return machine()


def _room(size: torch.Tensor) -> int:
    return -(-size.nbytes // _ALIGNMENT) * _ALIGNMENT


def _make(name: str, start: Sequence[torch.Tensor], undo: contextlib.ExitStack) -> SharedCentre:
    directory = segment_directory(SHARED_MEMORY)
    with contextlib.suppress(FileExistsError):
        os.mkdir(directory, 0o700)
    undo.callback(_remove, directory, name)
    centre = _open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, start)
    for vector, values in zip(centre.vectors, start, strict=True):
        vector.copy_(values)
    return centre


def _open(name: str, flags: int, sizes: Sequence[torch.Tensor]) -> SharedCentre:
    size_bytes = max(_ALIGNMENT, sum(map(_room, sizes)))
    directory = open_directory(SHARED_MEMORY)
    try:
        fd = os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=directory)
    finally:
        os.close(directory)
    try:
        check_owned(fd, name)
        if flags & os.O_CREAT:
            os.posix_fallocate(fd, 0, size_bytes)  # a full file system shows here, not in a later write
        return SharedCentre(mmap.mmap(fd, size_bytes), sizes)
    finally:
        os.close(fd)


def _remove(directory: str, name: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(directory, name))
    with contextlib.suppress(OSError):
        os.rmdir(directory)  # only if nobody else has anything in it

"""One centre for all ranks of a host, in private shared memory, written without a lock.

[Note: no lock] Ranks add to the centre at the same time. An aligned float32 is read and written as a whole, so nothing
is torn. Two additions to one element at the very same moment may lose one of them; ranks begin at different places, so
that this is rare (measured in docs/averaging.md). After EA-wild (HPC Asia 2020) and Hogwild (arXiv 1106.5730).

[Note: no name] The memory is a file without a name, which the host's first rank makes and the others open through that
process: whatever happens to them later, nothing is left behind, and no other user can open it. A host is a machine and
a network name space on it, which the nodes of an emulated cluster do not share.
"""

import contextlib
import mmap
import os
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

import torch
import torch.distributed as dist

from crossover_ddp._engine.states import told_by_all
from crossover_ddp._system.machine import machine
from crossover_ddp.errors import SegmentError

_ALIGNMENT: Final = 64
_CHUNKS: Final = 64
_SMALLEST_CHUNK: Final = 1 << 8
_LARGEST_CHUNK: Final = 1 << 16
_NET_NAMESPACE: Final = "/proc/self/ns/net"


def pull_shared(
    centre: torch.Tensor, pieces: Sequence[torch.Tensor], moving_rate: float, first: float
) -> None:
    """Pull parameters and centre together, see [Note: elastic pull] in ``centre.py`` and [Note: no lock].

    ``pieces`` are the parameters' own memory, in the order of the centre; ``first``: see `chunks_from`.
    """
    for start, values in chunks_from(first, pieces):
        there = centre[start : start + values.numel()]
        delta = torch.sub(values.to(there.device, there.dtype), there).mul_(moving_rate)
        values.sub_(delta.to(values.device, values.dtype))
        there.add_(delta)


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


def share(
    group: dist.ProcessGroup, start: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[int], list[int]]:
    """Make one centre for each host, which begins with ``start``, and open it on all its ranks. **Collective**.

    Returns:
        This host's, the first rank of each host, in the order of ranks, and this host's ranks.

    On failure: ``SegmentError`` on all ranks, if it fails on one of them.
    """
    size_bytes, rank = max(_ALIGNMENT, sum(map(_room, start))), group.rank()
    vectors: list[torch.Tensor] = []
    problem: OSError | None = None
    with contextlib.ExitStack() as files:
        try:
            own = os.memfd_create("crossover-centre")  # no memory yet
            files.callback(os.close, own)
            made = os.getpid(), own, os.fstat(own).st_ino
        except OSError as error:
            made, problem = (0, 0, 0), error
        told = told_by_all(group, (_host(), *made))
        hosts = [host for host, *_ in told]
        leader = hosts.index(hosts[rank])
        _, process, number, inode = told[leader]
        try:
            fd = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
            files.callback(os.close, fd)
            if os.fstat(fd).st_ino != inode:
                raise OSError(f"process {process} is another one in the leader's container")
            os.posix_fallocate(fd, 0, size_bytes)  # too little memory shows here, not in a later write
            vectors, problem = _vectors(mmap.mmap(fd, size_bytes), start), None
        except OSError as error:  # all ranks learn of it
            problem = problem or error
        if rank == leader:
            for vector, values in zip(vectors, start, strict=problem is None):
                vector.copy_(values)
        failed = [
            other for other, has_failed in enumerate(told_by_all(group, problem is not None)) if has_failed
        ]
    if failed:
        raise SegmentError(
            f"expected a shared centre on every host, got none on ranks {failed}: {problem or 'see there'}; use "
            "mode='async'"
        ) from problem
    leaders = [first for first, host in enumerate(hosts) if hosts.index(host) == first]
    return vectors, leaders, [mate for mate, host in enumerate(hosts) if host == hosts[rank]]


def _vectors(memory: mmap.mmap, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return vectors in ``memory``, one behind the other."""
    starts = accumulate(map(_room, like), initial=0)
    return [
        torch.frombuffer(memory, dtype=each.dtype, count=each.numel(), offset=start) if each.numel() else each
        for start, each in zip(starts, like, strict=False)
    ]


def _host() -> str:
    try:
        return f"{machine()} {os.readlink(_NET_NAMESPACE)}"
    except OSError:  # no /proc
        return machine()


def _room(size: torch.Tensor) -> int:
    return -(-size.nbytes // _ALIGNMENT) * _ALIGNMENT

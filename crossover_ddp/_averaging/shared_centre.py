"""One centre for all ranks of a host, in private shared memory, written without a lock.

[Note: no lock] Ranks add to the centre at the same time. An aligned float32 is read and written as a whole, so nothing
is torn. Of two additions to one element at the very same moment one may be lost; ranks begin at different places, so
that this is rare (measured in docs/averaging.md). After EA-wild (HPC Asia 2020) and Hogwild (arXiv 1106.5730).

[Note: no name] The memory is a file without a name, of the host's first rank; the others open it through that process:
nothing is ever left behind, and no other user can open it. A host is a machine and a network name space on it, which
the nodes of an emulated cluster do not share.
"""

import contextlib
import mmap
import os
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

import torch
import torch.distributed as dist

from crossover_ddp._ddp.groups import told_by_all
from crossover_ddp._system.machine import machine
from crossover_ddp.errors import SegmentError

_ALIGNMENT: Final = 64
_CHUNKS: Final = 64
_SMALLEST_CHUNK: Final = 1 << 8
_LARGEST_CHUNK: Final = 1 << 16


def pull_shared(
    centre: torch.Tensor, pieces: Sequence[torch.Tensor], moving_rate: float, first: float
) -> None:
    """Pull the centre and ``pieces``, the parameters' memory, together, see [Note: elastic pull], [Note: no lock]."""
    for start, values in chunks_from(first, pieces):
        there = centre[start : start + values.numel()]
        delta = torch.sub(values.to(there.device, there.dtype), there).mul_(moving_rate)
        values.sub_(delta.to(values.device, values.dtype))
        there.add_(delta)


def chunks_from(first: float, pieces: Sequence[torch.Tensor]) -> list[tuple[int, torch.Tensor]]:
    """Cut pieces of a vector into chunks, each with its place in it; begin behind a share ``first`` of its elements.

    Chunks are small, so that ranks which begin at the same moment stay apart: where two of them added to the same chunk
    at the same speed, a fifth of the additions was lost.
    """
    numel = sum(piece.numel() for piece in pieces)
    size = max(_SMALLEST_CHUNK, min(_LARGEST_CHUNK, numel // _CHUNKS))
    chunks = [chunk for piece in pieces for chunk in piece.split(size)]
    starts = [*accumulate([chunk.numel() for chunk in chunks], initial=0)]
    begin = bisect_left(starts, first * numel)
    placed = [*zip(starts, chunks, strict=False)]
    return placed[begin:] + placed[:begin]


def share(
    group: dist.ProcessGroup, start: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[int], list[int]]:
    """Make one centre for each host, which begins with ``start``, and open it on all its ranks. **Collective**.

    Returns this host's, the first rank of each host, in the order of ranks, and this host's ranks. ``SegmentError`` on
    all ranks, if it fails on one of them.
    """
    starts = [
        *accumulate((-(-each.nbytes // _ALIGNMENT) * _ALIGNMENT for each in start), initial=0)
    ]
    size_bytes, rank = max(_ALIGNMENT, starts[-1]), group.rank()
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
        leaders, leader = sorted(map(hosts.index, {*hosts})), hosts.index(hosts[rank])
        _, process, number, inode = told[leader]
        try:
            fd = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
            files.callback(os.close, fd)
            if os.fstat(fd).st_ino != inode:
                raise OSError(f"process {process} is another one in the leader's container")
            os.posix_fallocate(
                fd, 0, size_bytes
            )  # too little memory shows here, not in a later write
            memory = mmap.mmap(fd, size_bytes)
            for at, each in zip(starts, start, strict=False):
                vectors.append(
                    torch.frombuffer(memory, dtype=each.dtype, count=each.numel(), offset=at)
                )
                if rank == leader:
                    vectors[-1].copy_(each)
            problem = None
        except OSError as error:
            problem = problem or error
        failed = [
            each for each, fails in enumerate(told_by_all(group, problem is not None)) if fails
        ]
    if failed:
        raise SegmentError(
            f"expected a shared centre on every host, got none on ranks {failed}: {problem or 'see there'}; use "
            "mode='async'"
        ) from problem
    return vectors, leaders, [mate for mate, host in enumerate(hosts) if host == hosts[rank]]


def _host() -> str:
    try:
        return f"{machine()} {os.readlink('/proc/self/ns/net')}"
    except OSError:  # no /proc
        return machine()

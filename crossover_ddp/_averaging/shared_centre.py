"""A centre that all ranks of a host share in private memory and write to without a lock.

[Note: no lock] Ranks add to the centre at the same time. An aligned float32 is read and written as
a whole, so no value is torn. If two ranks add to the same element at the same moment, one addition
may be lost. This is rare because ranks begin at different elements (measured in docs/averaging.md).
The method follows EA-wild (HPC Asia 2020) and Hogwild (arXiv 1106.5730).

[Note: no name] The memory is an unnamed file. The first rank of the host creates it, and the other
ranks open it through that rank's process. So no file is ever left behind, and no other user can
open it. Here a host means one network namespace on one machine, so the nodes of an emulated cluster
count as different hosts.
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

from crossover_ddp._ddp.groups import gather_objects
from crossover_ddp._system.machine import machine
from crossover_ddp.errors import SegmentError

_ALIGNMENT: Final = 64
_CHUNKS: Final = 64
_SMALLEST_CHUNK: Final = 1 << 8
_LARGEST_CHUNK: Final = 1 << 16


def pull_shared(
    centre: torch.Tensor, pieces: Sequence[torch.Tensor], moving_rate: float, first: float
) -> None:
    """Pull the centre and the parameters towards each other.

    See [Note: elastic pull] and [Note: no lock].

    Args:
        centre: the centre of one block, in shared memory.
        pieces: flat views of the block's parameters.
        moving_rate: α.
        first: the position to begin at, as a fraction of the block.
    """
    for start, values in chunks_from(first, pieces):
        shared = centre[start : start + values.numel()]
        delta = torch.sub(values.to(shared.device, shared.dtype), shared).mul_(moving_rate)
        values.sub_(delta.to(values.device, values.dtype))
        shared.add_(delta)


def chunks_from(first: float, pieces: Sequence[torch.Tensor]) -> list[tuple[int, torch.Tensor]]:
    """Cut the pieces of a vector into chunks; return each chunk with its start in the vector.

    The list begins with the chunk at the fraction ``first`` of the vector, and wraps around. Chunks
    are small, so that ranks that begin at the same moment do not work on the same chunk. When two
    ranks added to the same chunk at the same speed, a fifth of the additions was lost.
    """
    numel = sum(piece.numel() for piece in pieces)
    size = max(_SMALLEST_CHUNK, min(_LARGEST_CHUNK, numel // _CHUNKS))
    chunks = [chunk for piece in pieces for chunk in piece.split(size)]
    starts = [*accumulate([chunk.numel() for chunk in chunks], initial=0)]
    begin = bisect_left(starts, first * numel)
    placed = [*zip(starts, chunks, strict=False)]
    return placed[begin:] + placed[:begin]


def share(
    group: dist.ProcessGroup, initial: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[int], list[int]]:
    """Create one centre for each host, and open it on all ranks of that host. **Collective**.

    Args:
        group: the ranks of all hosts.
        initial: the centre's initial values, one vector per block.

    Returns:
        This host's centre, one vector per block; the sorted first ranks of all hosts; and the ranks
        of this host.

    On failure: ``SegmentError`` on all ranks if any of them fails.
    """
    starts = [0]  # where each block starts, in bytes, and where the last one ends
    for vector in initial:
        starts.append(starts[-1] + -(-vector.nbytes // _ALIGNMENT) * _ALIGNMENT)
    size_bytes = max(_ALIGNMENT, starts[-1])  # mmap refuses 0 bytes
    rank = group.rank()
    vectors: list[torch.Tensor] = []
    problem: OSError | None = None
    with contextlib.ExitStack() as files:
        # Each rank creates a file. Only those of the hosts' first ranks are used.
        try:
            own = os.memfd_create("crossover-centre")  # uses no memory yet
            files.callback(os.close, own)
            made = os.getpid(), own, os.fstat(own).st_ino
        except OSError as error:
            made = 0, 0, 0
            problem = error
        by_rank = gather_objects(group, (_host(), *made))
        hosts = [host for host, *_ in by_rank]
        leaders = sorted({hosts.index(host) for host in hosts})
        leader = hosts.index(hosts[rank])
        _, process, number, inode = by_rank[leader]
        try:
            fd = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
            files.callback(os.close, fd)
            if os.fstat(fd).st_ino != inode:
                raise OSError(f"process {process} is another one in the leader's container")
            # This fails if there is too little memory. Without it, a later write would crash.
            os.posix_fallocate(fd, 0, size_bytes)
            memory = mmap.mmap(fd, size_bytes)
            for start, vector in zip(starts, initial, strict=False):
                shared = torch.frombuffer(
                    memory, dtype=vector.dtype, count=vector.numel(), offset=start
                )
                if rank == leader:
                    shared.copy_(vector)
                vectors.append(shared)
            problem = None
        except OSError as error:
            problem = problem or error
        failures = gather_objects(group, problem is not None)
        failed = [each for each, is_failure in enumerate(failures) if is_failure]
    if failed:
        raise SegmentError(
            f"expected a shared centre on every host, got none on ranks {failed}: "
            f"{problem or 'see there'}; use mode='async'"
        ) from problem
    return vectors, leaders, [mate for mate, host in enumerate(hosts) if host == hosts[rank]]


def _host() -> str:
    try:
        return f"{machine()} {os.readlink('/proc/self/ns/net')}"
    except OSError:  # no /proc
        return machine()

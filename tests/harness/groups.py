"""Groups of processes and of jobs: a process group of one, a group of siblings that no other test has."""

import contextlib
import os
import socket
import uuid
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp._system.shared_memory import SHARED_MEMORY


def new_group() -> str:
    """Return the name of a group of siblings that nobody else has; leaks of it are found."""
    return f"{os.environ['CROSSOVER_GROUP']}-{uuid.uuid4().hex[:8]}"


def files_of(group: str) -> list[Path]:
    """Return the files of a group, and of groups whose names begin so, in shared memory, of whatever user."""
    while True:
        try:
            return list(Path(SHARED_MEMORY).glob(f"crossover_ddp-*/{group}*"))
        except FileNotFoundError:  # another run has just removed a directory
            continue


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def share_the_gpu() -> None:
    """Let NCCL take this process for one of another host, with which it exchanges over sockets.

    It refuses ranks of one host that share a GPU.
    """
    os.environ["NCCL_HOSTID"] = str(os.getpid())


@contextlib.contextmanager
def single_process_group() -> Iterator[dist.ProcessGroup]:
    """Make a default process group of world size 1 for the time of the block; it takes milliseconds."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def join_over(rank: int, world_size: int, store: dist.Store | None = None) -> dist.Store:
    """Make the default group again, on a store that rank 0 serves or on the given one; returns the store."""
    if store is None:
        store = (
            None if rank else dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        )
        ports: list[Any] = [store and store.port]
        dist.broadcast_object_list(ports)
        store = store or dist.TCPStore("127.0.0.1", ports[0], is_master=False)
    dist.destroy_process_group()
    limit = timedelta(seconds=60.0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
    return store


def impatient_group(seconds: float) -> dist.ProcessGroup:
    """Make a process group of all ranks, whose time limit is so short that it may strike.

    Ranks come to it together: what DDP imports when it is first used may take one rank longer than another has patience
    for. **Collective**.
    """
    DistributedDataParallel(nn.Linear(1, 1))
    dist.barrier()
    return cast(dist.ProcessGroup, dist.new_group(timeout=timedelta(seconds=seconds)))

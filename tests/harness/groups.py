"""Process groups for tests, and names for groups of sibling jobs."""

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
    """Return an unused name for a group of sibling jobs. The leak check covers its files."""
    return f"{os.environ['CROSSOVER_GROUP']}-{uuid.uuid4().hex[:8]}"


def files_of(group: str) -> list[Path]:
    """Return all users' files in shared memory of the groups whose names begin with ``group``."""
    while True:
        try:
            return list(Path(SHARED_MEMORY).glob(f"crossover_ddp-*/{group}*"))
        except FileNotFoundError:  # another test run has just removed a directory
            continue


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def share_the_gpu() -> None:
    """Make NCCL believe that this process is on a host of its own, so that it uses sockets.

    NCCL refuses to run two ranks of one host on the same GPU.
    """
    os.environ["NCCL_HOSTID"] = str(os.getpid())


@contextlib.contextmanager
def single_process_group() -> Iterator[dist.ProcessGroup]:
    """Have a default process group of world size 1 during the block. It takes milliseconds."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def join_over(rank: int, world_size: int, store: dist.Store | None = None) -> dist.Store:
    """Make the default group again, on ``store`` or on one that rank 0 serves. Return the store."""
    if store is None:
        if rank == 0:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ports: list[Any] = [store and store.port]
        dist.broadcast_object_list(ports)
        store = store or dist.TCPStore("127.0.0.1", ports[0], is_master=False)
    dist.destroy_process_group()
    limit = timedelta(seconds=60.0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
    return store


def impatient_group(seconds: float) -> dist.ProcessGroup:
    """Make a process group of all ranks with a short timeout, for tests in which it expires.

    **Collective**. All ranks use DDP once before they make the group: DDP's first use imports
    modules, and this may take one rank longer than the timeout.
    """
    DistributedDataParallel(nn.Linear(1, 1))
    dist.barrier()
    return cast(dist.ProcessGroup, dist.new_group(timeout=timedelta(seconds=seconds)))

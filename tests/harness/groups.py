"""A process group of one, in this very process: most hook tests need no more."""

import contextlib
from collections.abc import Iterator

import torch.distributed as dist


@contextlib.contextmanager
def single_process_group(backend: str = "gloo") -> Iterator[dist.ProcessGroup]:
    """Make a default process group of world size 1 for the time of the block; it takes milliseconds."""
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()

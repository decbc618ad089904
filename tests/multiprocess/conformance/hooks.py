"""The hooks that must agree with plain DDP."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp.comm_hooks import (
    CrossoverState,
    crossover_hook,
    crossover_wrapper,
    reduce_scatter_all_gather_hook,
)

# Registers a hook for the time of the block, and leaves nothing behind.
Registration = Callable[[DistributedDataParallel], contextlib.AbstractContextManager[None]]


@dataclass(frozen=True)
class Row:
    """A hook, and how close to plain DDP it is.

    Args:
        register: a context manager that registers the hook on the model and cleans up after it.
        bitwise_world_sizes: with these many ranks results are identical; otherwise they are equal within
            ``tolerance``, and always identical on all ranks.
        tolerance: times the machine epsilon of the dtype, relative to the largest magnitude of a tensor.
        skip: names of cases that the hook does not support, with the reason.
    """

    register: Registration
    bitwise_world_sizes: tuple[int, ...] = (1, 2)
    tolerance: float = 128.0
    skip: dict[str, str] | None = None


@contextlib.contextmanager
def split(model: DistributedDataParallel) -> Iterator[None]:
    model.register_comm_hook(None, reduce_scatter_all_gather_hook)
    yield


@contextlib.contextmanager
def split_on_own_group(model: DistributedDataParallel) -> Iterator[None]:
    model.register_comm_hook(model.process_group, reduce_scatter_all_gather_hook)
    yield


@contextlib.contextmanager
def crossover(model: DistributedDataParallel) -> Iterator[None]:
    """All ranks of a test share one device here; a turn is the job's, so that changes nothing."""
    state = CrossoverState()
    model.register_comm_hook(state, crossover_hook)
    yield
    state.close()


@contextlib.contextmanager
def wrapped_all_reduce(model: DistributedDataParallel) -> Iterator[None]:
    state = CrossoverState()
    model.register_comm_hook(state, crossover_wrapper(allreduce_hook))
    yield
    state.close()


HOOKS: dict[str, Row] = {
    "split": Row(split),
    "split_on_own_group": Row(split_on_own_group),
    "crossover": Row(crossover),
    "wrapped_all_reduce": Row(wrapped_all_reduce),
}

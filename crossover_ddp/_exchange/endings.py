"""How an engine ends: with its process group, with the interpreter, although a bucket may be in flight."""

import contextlib
import functools
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Final

import torch.distributed as dist

from crossover_ddp._system.worker import Worker

from .collectives import Ring
from .gathers import GatherOrder

_END_TIMEOUT_S: Final = 0.5
_LAST_GATHERS_TIMEOUT_S: Final = 30.0
_LET_GO_S: Final = 0.1


def on_destruction(
    process_group: dist.ProcessGroup, end: Callable[[], None], *, at_exit: bool = True
) -> None:
    """Call ``end`` in ``destroy_process_group``, or else when the interpreter exits if ``at_exit``.

    A group object that a DDP model has used is never collected (torch 2.15), so its end cannot be seen. But
    torch's registry holds the only handle of the group's store, and drops it when the group is destroyed.
    """
    store_of = getattr(dist.distributed_c10d, "_get_process_group_store", None)
    with contextlib.suppress(KeyError, TypeError, ValueError):
        if store_of is not None:
            weakref.finalize(store_of(process_group), end).atexit = at_exit


def end_engine(workers: Sequence[Worker], ring: Ring, order: GatherOrder) -> None:
    """End all threads although a bucket may be in flight that no peer will ever answer.

    Deferred buckets get more time: this rank may leave right after the last step, while another one still reads
    its parameters and needs our parts of the gradients. A peer that is gone ends that wait at once.

    A thread that gloo lets go while the interpreter is being torn down would take the process with it
    ("terminate called without an active exception"), so the threads must be gone before.
    """
    if not stop_workers(workers, _LAST_GATHERS_TIMEOUT_S if order.busy else _END_TIMEOUT_S):
        order.abandon()
        ring.interrupt()
        stop_workers(workers, _END_TIMEOUT_S)


def let_collectives_go(process_group: dist.ProcessGroup) -> None:
    """Wait a moment after torch's own collectives, for a process that may end right behind them.

    gloo's threads let go of a collective a moment after it, and abort a process that ends by then
    (https://github.com/pytorch/pytorch/pull/179291). Nothing tells when they have; other backends need no wait.
    """
    if "gloo" in dist.get_backend(process_group):
        time.sleep(_LET_GO_S)


def stop_workers(workers: Sequence[Worker], timeout_s: float) -> bool:
    """End all threads after what they have; return whether each did in ``timeout_s`` seconds.

    A thread that takes longer still ends the next one when it ends itself.

    ``workers``: one that gives work to another comes before it.
    """
    _stop_in_order(workers)
    return all(worker.join(timeout_s) for worker in workers)


def _stop_in_order(workers: Sequence[Worker]) -> None:
    if workers:
        workers[0].stop(then=functools.partial(_stop_in_order, workers[1:]))

"""How threads end: with their process group, with the interpreter, although something may be in flight."""

import contextlib
import functools
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch.distributed as dist

from crossover_ddp._system.worker import Worker

_LET_GO_S: Final = 0.1


def on_destruction(
    process_group: dist.ProcessGroup, end: Callable[[], Any], *, at_exit: bool = True
) -> Callable[[], object]:
    """Call ``end`` in ``destroy_process_group``, or else when the interpreter exits if ``at_exit``.

    A group object that a DDP model has used is never collected (torch 2.15), so its end cannot be seen. But
    torch's registry holds the only handle of the group's store, and drops it when the group is destroyed.

    Returns:
        What takes that back.
    """
    store_of = getattr(dist.distributed_c10d, "_get_process_group_store", None)
    with contextlib.suppress(KeyError, TypeError, ValueError):
        if store_of is not None:
            finalizer = weakref.finalize(store_of(process_group), end)
            finalizer.atexit = at_exit
            return finalizer.detach
    return lambda: None


def let_collectives_go(process_group: dist.ProcessGroup) -> None:
    """Wait a moment after torch's own collectives, for a process that may end right behind them.

    gloo's threads let go of a collective a moment after it, and abort a process that ends by then
    (https://github.com/pytorch/pytorch/pull/179291). Nothing tells when they have; other backends need no wait.
    """
    if "gloo" in dist.get_backend(process_group):
        let_gloo_go()


def let_gloo_go() -> None:
    """See `let_collectives_go`; where the group may be gone by now."""
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

"""Lets the ranks of a job leave their default process group together, and removes its keys.

[Note: the life before] A process may destroy its default group and create another one. Torch gives
the keys in the store (the addresses of gloo's ranks, NCCL's id) the same names in both lives. The
store often outlives the group: torchrun holds it, or rank 0 does as long as a DDP model of the
previous life exists. If a rank begins its next life earlier than its peers do, it then reads an
address from the previous life, and connects to a rank that has closed. The difference is a matter
of milliseconds, and our threads take some of them to end. So all ranks wait for each other in
``destroy_process_group``, rank 0 removes the group's keys, and then they return.

If no model keeps rank 0's store, it ends a moment later. A rank that connects to it in this moment
loses its next group, so the other ranks give rank 0 a lead: they return when its store has ended,
or after `_LEAD_S`.

A rank that has waited for `_TOGETHER_S` leaves alone. Then rank 0 removes no key, since the ranks
that have left may already be creating their next group. A rank that leaves because of an exception
(``finally: destroy_process_group()``) does not wait, because another rank may be blocked in a
collective until this rank has gone. Our design.
"""

import contextlib
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Final

import torch.distributed as dist

from crossover_ddp._system.stores import innermost
from crossover_ddp._system.torch_private import process_group_store

_TOGETHER_S: Final = 10.0  # how long a rank waits for the others
_ANSWER_S: Final = 1.0  # if the store does not answer for this long, its process is stopped
_LEAD_S: Final = 0.3
# The interval at which the store is polled begins short and doubles.
_SHORTEST_POLL_S: Final = 5e-4
_LONGEST_POLL_S: Final = 2e-2
# Keys in the store. A rank is appended to _WAITS and _READ.
_LEAVING: Final = "crossover-leaving/"
_WAITS: Final = (
    f"{_LEAVING}waits/"  # _YES while the rank waits for rank 0, _GONE if it has given up
)
_READ: Final = f"{_LEAVING}read/"  # the rank has read _FREE, and will ask the store nothing more
_FREE: Final = f"{_LEAVING}free"  # set by rank 0: the others return when the store has ended
_YES: Final = "yes"
_GONE: Final = "gone"

# The stores whose ranks already leave together.
_known: "weakref.WeakSet[dist.Store]" = weakref.WeakSet()


def leave_together(group: dist.ProcessGroup) -> None:
    """Let the ranks leave together when ``group`` is destroyed.

    They leave after every finalizer of the store that is registered later. The call does nothing if
    ``group`` is not the default group or has only one rank, or if its store cannot list its keys.
    It is safe to call it more than once.

    **Collective**, but it waits for no other rank.
    """
    store = process_group_store(group)
    if store in _known or group is not dist.group.WORLD or group.size() == 1:
        return
    if not isinstance(innermost(store), dist.TCPStore) or not hasattr(store, "list_keys"):
        return
    _known.add(store)
    # Our own connection, which user code cannot block. It does not keep rank 0's server alive.
    own = store.clone()
    if group.rank() == 0:
        # All ranks have created this group, so they have left the previous life.
        _remove(own, _LEAVING)
    # Not at exit, since a process that ends creates no other group.
    weakref.finalize(store, _leave, own, group.rank(), group.size(), os.getpid()).atexit = False


def _leave(store: dist.Store, rank: int, size: int, pid: int) -> None:
    if os.getpid() != pid or sys.exc_info()[0] is not None:
        return
    # On a thread, since a call to the store blocks while the process that serves it is stopped.
    thread = threading.Thread(
        target=_take_part, args=(store, rank, size), name="crossover-leave", daemon=True
    )
    with contextlib.suppress(RuntimeError):  # the process cannot start another thread
        thread.start()
        thread.join(_TOGETHER_S + 2 * _ANSWER_S)


def _take_part(store: dist.Store, rank: int, size: int) -> None:
    with contextlib.suppress(RuntimeError, OSError):  # the store's process has ended
        if rank:
            _wait_for_rank_0(store, rank)
        else:
            _free_others(store, [*range(1, size)])


def _wait_for_rank_0(store: dist.Store, rank: int) -> None:
    server = innermost(store)
    assert isinstance(server, dist.TCPStore)
    with socket.create_connection((server.host, server.port), _ANSWER_S) as connection:
        store.set(f"{_WAITS}{rank}", _YES)
        if _wait_until_set(store, [_FREE], _TOGETHER_S):
            store.set(f"{_READ}{rank}", _YES)
            connection.settimeout(_LEAD_S)
            # The store sends nothing on this connection, so the call returns when the store ends.
            connection.recv(1)
        else:
            store.set(f"{_WAITS}{rank}", _GONE)


def _free_others(store: dist.Store, others: Sequence[int]) -> None:
    """Remove the group's keys if all other ranks wait, and let the waiting ranks return."""
    _wait_until_set(store, [f"{_WAITS}{rank}" for rank in others], _TOGETHER_S)
    come = [rank for rank in others if store.check([f"{_WAITS}{rank}"])]
    waiting = [rank for rank in come if store.get(f"{_WAITS}{rank}") == _YES.encode()]
    are_all = len(waiting) == len(others)
    if are_all:
        _remove(store)
    store.set(_FREE, _YES)
    # The store may end with this rank. A rank that asked it afterwards would print a traceback.
    if (
        waiting
        and _wait_until_set(store, [f"{_READ}{rank}" for rank in waiting], _ANSWER_S)
        and are_all
    ):
        _remove(store, _LEAVING)


def _wait_until_set(store: dist.Store, keys: Sequence[str], timeout_s: float) -> bool:
    """Wait until all keys are set or the timeout has passed, and return whether they are set.

    It polls the store, because ``store.wait`` prints a traceback when it times out.
    """
    deadline_s = time.monotonic() + timeout_s
    interval_s = _SHORTEST_POLL_S
    while not (found := store.check([*keys])) and time.monotonic() < deadline_s:
        time.sleep(interval_s)
        interval_s = min(2 * interval_s, _LONGEST_POLL_S)
    return found


def _remove(store: dist.Store, prefix: str = "") -> None:
    for key in store.list_keys():
        if key.startswith(prefix):
            store.delete_key(key)

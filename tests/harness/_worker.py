"""The rank's side: a process that runs tasks, one after the other, and reports each.

A report has only bytes and strings. So an exception that cannot be pickled, or whose class the
parent cannot import, arrives like any other.
"""

import contextlib
import faulthandler
import gc
import os
import pickle
import reprlib
import resource
import sys
import traceback
from collections.abc import Mapping
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ._preloaded import start_like_anybody
from .groups import share_the_gpu
from .leaks import Snapshot

# The parent ends a rank at its deadline. A rank whose parent is gone ends itself this much later.
ORPHAN_GRACE_S = 60.0


class Task(NamedTuple):
    """One call in one rank. The call is pickled apart, so that unpickling can fail in the rank."""

    call: bytes  # (function, args)
    rank: int
    world_size: int
    backend: str | None
    store: str
    environment: Mapping[str, str]
    timeout_s: float


class CleanUp(NamedTuple):
    """The order to destroy the process group. It comes once every rank has returned."""


class Report(NamedTuple):
    result: bytes = b""
    failure: str = ""


def serve(orders: "Connection[Any, Any]", output: str) -> None:
    """Run tasks until the parent closes the connection. All output goes to this rank's own file."""
    os.setpgid(0, 0)  # so that the parent can kill this rank's children with it
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Shows the stack of a crash, and of a hang that the parent ends with SIGABRT.
    faulthandler.enable(all_threads=True)
    torch.set_num_threads(1)
    start_like_anybody()
    orders.send(Report())
    with contextlib.suppress(EOFError):
        while True:
            _attend(orders, orders.recv())


def _attend(orders: "Connection[Any, Any]", task: Task) -> None:
    """Run a task and report its result; on the order to clean up, do so and report leaks."""
    os.environ.clear()
    os.environ.update(task.environment)
    if task.backend == "nccl" and torch.cuda.device_count() == 1:
        # For one rank as well: NCCL reads the variable once, and the next task may have more ranks.
        share_the_gpu()
    torch.manual_seed(0)
    before = Snapshot()
    # A thread that does not need the interpreter ends this process if the parent is gone.
    faulthandler.dump_traceback_later(task.timeout_s + ORPHAN_GRACE_S, exit=True)
    orders.send(_run(task))
    assert isinstance(orders.recv(), CleanUp)
    orders.send(_clean_up(before))
    faulthandler.cancel_dump_traceback_later()


def _run(task: Task) -> Report:
    try:
        function, args = pickle.loads(task.call)
        if task.backend is not None:
            store = dist.FileStore(task.store, task.world_size)
            # Longer than the harness's own timeout, so that a hang is reported with its stack.
            limit = timedelta(seconds=task.timeout_s + ORPHAN_GRACE_S)
            dist.init_process_group(
                task.backend,
                store=store,
                timeout=limit,
                rank=task.rank,
                world_size=task.world_size,
            )
        return Report(result=pickle.dumps(function(task.rank, task.world_size, *args)))
    except BaseException as error:
        return Report(failure=f"{traceback.format_exc()}{_names_of(error)}")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _names_of(error: BaseException) -> str:
    """List the local variables of a failed assertion, which pytest does not rewrite in a rank."""
    if not isinstance(error, AssertionError):
        return ""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return "".join(f"{name} = {reprlib.repr(value)}\n" for name, value in frame.f_locals.items())


def _clean_up(before: Snapshot) -> Report:
    try:
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()
        return Report(failure="".join(f"left behind: {leak}\n" for leak in before.leaks()))
    except BaseException:
        return Report(failure=f"could not clean up\n{traceback.format_exc()}")

"""The rank's side: a process that runs one task after another and reports each in plain strings.

Nothing but bytes and strings goes back, so that an exception which cannot be pickled, or whose class
the parent cannot import, arrives like any other.
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

# A rank outlives its deadline by this much only when nobody is left to end it.
ORPHAN_GRACE_S = 60.0


class Task(NamedTuple):
    """One call in one rank. The call is pickled by itself, so that a bad one is that rank's failure."""

    call: bytes  # (function, args)
    rank: int
    world_size: int
    backend: str | None
    store: str
    environment: Mapping[str, str]
    timeout_s: float


class CleanUp(NamedTuple):
    """The order to leave the process group, given when every rank has returned and no peer misses it."""


class Report(NamedTuple):
    result: bytes = b""
    failure: str = ""


def serve(orders: "Connection[Any, Any]", output: str) -> None:
    """Run tasks until the parent closes the connection; all output goes to this rank's own file."""
    os.setpgid(0, 0)  # whoever ends this rank ends its children as well
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable(
        all_threads=True
    )  # shows the stack of a crash, and of a hang ended by SIGABRT
    torch.set_num_threads(1)
    start_like_anybody()
    orders.send(Report())
    with contextlib.suppress(EOFError):
        while True:
            _attend(orders, orders.recv())


def _attend(orders: "Connection[Any, Any]", task: Task) -> None:
    """Run a task and report; then, when told to, clean up and report what has leaked."""
    os.environ.clear()
    os.environ.update(task.environment)
    if task.backend == "nccl" and torch.cuda.device_count() == 1:
        share_the_gpu()  # of one rank, too: NCCL reads this once, and the next task may have more
    torch.manual_seed(0)
    before = Snapshot()
    # Should the parent be gone by then, a thread that needs no interpreter ends this process.
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
            # Later than the harness's own timeout, so that a hang is reported with its stack.
            limit = timedelta(seconds=task.timeout_s + ORPHAN_GRACE_S)
            rank, size = task.rank, task.world_size
            dist.init_process_group(
                task.backend, store=store, timeout=limit, rank=rank, world_size=size
            )
        return Report(result=pickle.dumps(function(task.rank, task.world_size, *args)))
    except BaseException as error:
        return Report(failure=f"{traceback.format_exc()}{_names_of(error)}")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _names_of(error: BaseException) -> str:
    """Say what names stood for where an assertion has failed, which pytest does not explain in a rank."""
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

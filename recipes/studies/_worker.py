"""The rank's side of a study: told over stdin what to run next, it answers on stdout; see _ranks.py.

A process that stays alive runs every variant, so that variants can alternate within minutes, and the same
C, N and M hold for all of them. Each run starts from the same parameters, optimizer state and data order: the
losses of two variants can be compared bit for bit.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from _models import loss_of
from lab.meter import Reading, pinned_core

Order = dict[str, Any]


class WorkerJob:
    """A fresh copy of a training job; how it is made is for its worker to say."""

    model: nn.Module
    optimizer: Any
    batches: Iterator[Any]
    state: Any = None  # the hook's

    def step(self) -> torch.Tensor:
        """Train one step; the loss stays on the device, so that the host runs ahead where it can."""
        loss = self.backward()
        self.precondition()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def backward(self) -> torch.Tensor:
        inputs, targets = next(self.batches)
        loss = loss_of(self.model(inputs), targets)
        loss.backward()
        return loss

    def precondition(self) -> None:
        """Between backward and update."""

    def close(self) -> None:
        if self.state is not None:
            self.state.close()


class WorkerTurn(Protocol):
    """The mutex of a job, if it takes turns."""

    def acquire(self) -> object:
        """Take a turn."""

    def release(self) -> None:
        """Give it away."""


def serve(actions: dict[str, Callable[[Order], None]], backend: str = "gloo") -> None:
    """Join the other ranks and do as told, until told to quit."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dist.init_process_group(backend)
    say(event="up", pid=os.getpid())
    while (order := heard())["do"] != "quit":
        actions[order["do"]](order)
        gc.collect()
    dist.destroy_process_group()


def say(**message: Any) -> None:
    print(json.dumps(message), flush=True)


def heard() -> Order:
    line = sys.stdin.readline()
    message: Order = json.loads(line) if line else {"do": "quit"}
    return message


def measure(
    job: WorkerJob,
    steps: int,
    *,
    warm_up: int,
    swing: int = 0,
    mutex: Callable[[], WorkerTurn | None] = lambda: None,
    synchronize: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """Warm up, wait for the start signal, run the steps; return what a step took, and all losses.

    Args:
        job: to run.
        steps: to measure.
        warm_up: steps before the start signal.
        swing: steps after it that are not measured, so that the measured ones begin and end in full swing.
        mutex: of the job, once it has warmed up. It holds a turn only between the signal and the last step:
            nobody waits for a job that waits for its start.
        synchronize: waits for a device that runs behind the host.
    """
    losses = [job.step() for _ in range(warm_up)]
    turn = mutex()
    if synchronize is not None:
        synchronize()
    if turn is not None:
        turn.release()
    dist.barrier()
    say(event="ready")
    heard()
    if turn is not None:
        turn.acquire()
    losses += [job.step() for _ in range(swing)]
    core, ends_s = pinned_core(), []
    before = Reading.now(core)
    for _ in range(steps):
        losses.append(job.step())
        ends_s.append(time.monotonic())
    if turn is not None:
        turn.release()
    if synchronize is not None:
        synchronize()
        ends_s[-1] = time.monotonic()
    spent = Reading.now(core).since(before)
    return {
        "begin_s": before.at_s,
        "ends_s": ends_s,
        "step_s": (ends_s[-1] - before.at_s) / steps,
        **{name: None if total is None else total / steps for name, total in spent.items()},
        "losses": [float(loss) for loss in losses],
    }

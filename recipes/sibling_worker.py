"""One rank of one of two sibling jobs, told over stdin what to run next; `siblings.py` starts it.

A process that stays alive runs every variant (alone, side by side, taking turns), so that variants can alternate
within minutes and the same C, N and M hold for all of them. Each run starts from the same
parameters, optimizer state and data order: the losses of two variants can be compared bit for bit.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import _models
from _meter import core_busy_s, pinned_core, wire_bytes
from crossover_ddp.comm_hooks import CrossoverState, crossover_hook, reduce_scatter_all_gather_hook

WARM_UP_STEPS = 3  # DDP rebuilds its buckets after the first one


def say(**message: Any) -> None:
    print(json.dumps(message), flush=True)


def heard() -> dict[str, Any]:
    line = sys.stdin.readline()
    message: dict[str, Any] = json.loads(line) if line else {"do": "quit"}
    return message


class Run:
    """A fresh copy of the job under one hook."""

    def __init__(self, preset: str, seed: int, hook: str, work: int) -> None:
        chosen = _models.PRESETS[preset]
        network, batches, self.loss_of = _models.build(preset, seed)
        self.model = DistributedDataParallel(
            network, bucket_cap_mb=chosen.bucket_cap_mb, gradient_as_bucket_view=True
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=chosen.lr / 10, momentum=0.9)
        self.batches = batches(dist.get_rank(), dist.get_world_size())
        self.work = work
        self.state: CrossoverState | None = None
        if hook == "rsag":
            self.model.register_comm_hook(None, reduce_scatter_all_gather_hook)
        elif hook == "crossover":
            self.state = CrossoverState()
            self.model.register_comm_hook(self.state, crossover_hook)

    def step(self) -> float:
        """Train one step; ``work`` repeats the forward and backward passes, for a job of other speed."""
        for _ in range(self.work - 1):
            with self.model.no_sync():
                self._backward()
        loss = self._backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def _backward(self) -> torch.Tensor:
        inputs, targets = next(self.batches)
        loss: torch.Tensor = self.loss_of(self.model(inputs), targets)
        loss.backward()
        return loss.detach()

    def digest(self) -> str:
        summed = hashlib.sha256()
        for parameter in self.model.parameters():
            summed.update(parameter.detach().numpy().tobytes())
        return summed.hexdigest()

    def close(self) -> dict[str, Any] | None:
        if self.state is None:
            return None
        stats = self.state.stats()
        self.state.close()
        return stats


def run(order: dict[str, Any], args: argparse.Namespace) -> None:
    """Warm up, wait for the start signal, run the steps, report."""
    job = Run(args.preset, args.seed, order["hook"], order.get("work", 1))
    losses = [job.step() for _ in range(WARM_UP_STEPS)]
    if job.state is not None and job.state.mutex is not None:
        job.state.mutex.release()  # nobody waits for a job that waits for its start
    dist.barrier()
    say(event="ready")
    heard()
    if job.state is not None and job.state.mutex is not None:
        job.state.mutex.acquire()
    core = pinned_core()
    ends, begin_s = [], time.monotonic()
    cpu_s, busy_s, sent = time.process_time(), core_busy_s(core), wire_bytes()
    for _ in range(order["steps"]):
        losses.append(job.step())
        ends.append(time.monotonic())
    if job.state is not None and job.state.mutex is not None:
        job.state.mutex.release()
    busy_end_s, sent_end = core_busy_s(core), wire_bytes()
    say(
        event="done",
        begin_s=begin_s,
        ends_s=ends,
        cpu_s=time.process_time() - cpu_s,
        core_busy_s=None if busy_s is None or busy_end_s is None else busy_end_s - busy_s,
        wire_bytes=None if sent is None or sent_end is None else sent_end - sent,
        losses=losses,
        digest=job.digest(),
        stats=job.close(),
    )
    del job
    gc.collect()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", choices=sorted(_models.PRESETS), required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dist.init_process_group("gloo")
    say(event="up", pid=os.getpid())
    while (order := heard())["do"] != "quit":
        run(order, args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

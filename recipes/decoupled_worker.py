"""One rank of the decoupled benchmark, told over stdin what to run next; `decoupled.py` starts it.

Every way of training starts from the same parameters and data order, in a process that stays alive, so that the ways
can alternate and be compared step by step.
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import _models
from _meter import core_busy_s, pinned_core, wire_bytes
from crossover_ddp.comm_hooks import DecoupledState, decoupled_hook
from sibling_worker import heard, say

WARM_UP_STEPS = 5  # DDP rebuilds its buckets after the first; decoupled training defers from the third
SWING_STEPS = 2
PLANNING_STEPS = 12
FINEST = 48


class Run:
    """A fresh copy of the job, trained one way."""

    def __init__(self, preset: str, way: str, options: dict[str, Any]) -> None:
        chosen = _models.PRESETS[preset]
        network, batches, self.loss_of = _models.build(preset, 0)
        self.state: DecoupledState | None = None
        if way == "fsdp":
            self.model: nn.Module = sharded(network)
        else:
            self.model = DistributedDataParallel(network, gradient_as_bucket_view=True, **options)
        settings: dict[str, Any] = {"lr": chosen.lr / 10, "momentum": 0.9}
        if way == "zero":
            self.optimizer: torch.optim.Optimizer = ZeroRedundancyOptimizer(
                self.model.parameters(), torch.optim.SGD, **settings
            )
        else:
            self.optimizer = torch.optim.SGD(self.model.parameters(), **settings)
        if way == "decoupled":
            assert isinstance(self.model, DistributedDataParallel)
            self.state = DecoupledState(self.optimizer)
            self.model.register_comm_hook(self.state, decoupled_hook)
        self.batches: Iterator[Any] = batches(dist.get_rank(), dist.get_world_size())

    def step(self) -> float:
        inputs, targets = next(self.batches)
        loss: torch.Tensor = self.loss_of(self.model(inputs), targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def close(self) -> None:
        if self.state is not None:
            self.state.close()


def sharded(network: nn.Module) -> nn.Module:
    """Shard as FSDP2's users do: each block by itself, then what is left."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for child in network.children():
        for block in child if isinstance(child, nn.Sequential) else [child]:
            if any(True for _ in block.parameters()):
                fully_shard(block, mesh=mesh, reshard_after_forward=False)
    fully_shard(network, mesh=mesh, reshard_after_forward=False)
    return network


def run(order: dict[str, Any], preset: str) -> None:
    """Warm up, wait for the start signal, run the steps, report."""
    job = Run(preset, order["way"], order["options"])
    losses = [job.step() for _ in range(order.get("warm_up", WARM_UP_STEPS))]
    dist.barrier()
    say(event="ready")
    heard()
    # The measured steps begin and end in full swing, with as much still under way.
    losses += [job.step() for _ in range(SWING_STEPS)]
    core = pinned_core()
    begin_s, busy_s, sent = time.monotonic(), core_busy_s(core), wire_bytes()
    for _ in range(order["steps"]):
        losses.append(job.step())
    end_s, busy_end_s, sent_end = time.monotonic(), core_busy_s(core), wire_bytes()
    steps = order["steps"]
    say(
        event="done",
        step_s=(end_s - begin_s) / steps,
        core_busy_s=None if busy_s is None or busy_end_s is None else (busy_end_s - busy_s) / steps,
        wire_bytes=None if sent is None or sent_end is None else (sent_end - sent) / steps,
        losses=losses,
        deferring=job.state.deferring if job.state is not None else None,
        peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )
    job.close()
    del job
    gc.collect()


def plan(preset: str) -> None:
    """Record steps with the finest buckets and let the package choose."""
    network, _, _ = _models.build(preset, 0)
    size_bytes = sum(p.numel() * p.element_size() for p in network.parameters())
    job = Run(preset, "decoupled", {"bucket_cap_mb": size_bytes / FINEST / 2**20})
    assert job.state is not None
    for _ in range(PLANNING_STEPS):
        job.step()
    chosen = job.state.plan_buckets()
    say(
        event="plan",
        options=chosen.ddp_options(),
        cap_bytes=chosen.cap_bytes,
        buckets=chosen.buckets,
        step_s=chosen.step_s,
        limit_s=chosen.limit_s,
        size_bytes=size_bytes,
    )
    job.close()
    del job
    gc.collect()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", choices=sorted(_models.PRESETS), required=True)
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dist.init_process_group("gloo")
    say(event="up", pid=os.getpid())
    while (order := heard())["do"] != "quit":
        if order["do"] == "plan":
            plan(args.preset)
        else:
            run(order, args.preset)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

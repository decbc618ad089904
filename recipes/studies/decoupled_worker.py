"""One rank of the decoupled benchmark, trained one way after another; `decoupled.py` starts it."""

from __future__ import annotations

import argparse
import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import _models
from crossover_ddp.comm_hooks import DecoupledState, decoupled_hook
from studies._worker import Order, WorkerJob, measure, say, serve

WARM_UP_STEPS = 5  # DDP rebuilds its buckets after the first; decoupled training defers from the third
SWING_STEPS = 2
PLANNING_STEPS = 12
FINEST = 48


class DecoupledRun(WorkerJob):
    """A fresh copy of the job, trained one way."""

    def __init__(self, preset: str, way: str, options: dict[str, Any]) -> None:
        chosen = _models.PRESETS[preset]
        network, batches, _ = _models.build(preset, 0)
        if way == "fsdp":
            self.model = sharded(network)
        else:
            self.model = DistributedDataParallel(network, gradient_as_bucket_view=True, **options)
        settings: dict[str, Any] = {"lr": chosen.lr / 10, "momentum": 0.9}
        if way == "zero":
            self.optimizer = ZeroRedundancyOptimizer(self.model.parameters(), torch.optim.SGD, **settings)
        else:
            self.optimizer = torch.optim.SGD(self.model.parameters(), **settings)
        if way == "decoupled":
            assert isinstance(self.model, DistributedDataParallel)
            self.state = DecoupledState(self.optimizer)
            self.model.register_comm_hook(self.state, decoupled_hook)
        self.batches = batches(dist.get_rank(), dist.get_world_size())


def sharded(network: nn.Module) -> nn.Module:
    """Shard as FSDP2's users do: each block by itself, then what is left."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for child in network.children():
        for block in child if isinstance(child, nn.Sequential) else [child]:
            if any(True for _ in block.parameters()):
                fully_shard(block, mesh=mesh, reshard_after_forward=False)
    fully_shard(network, mesh=mesh, reshard_after_forward=False)
    return network


def run(preset: str, order: Order) -> None:
    job = DecoupledRun(preset, order["way"], order["options"])
    warm_up = order.get("warm_up", WARM_UP_STEPS)
    answer = measure(job, order["steps"], warm_up=warm_up, swing=SWING_STEPS)
    say(event="done", **answer, deferring=job.state.deferring if job.state is not None else None)
    job.close()


def plan(preset: str, order: Order) -> None:
    """Record steps with the finest buckets and let the package choose."""
    network, _, _ = _models.build(preset, 0)
    size_bytes = sum(p.numel() * p.element_size() for p in network.parameters())
    job = DecoupledRun(preset, "decoupled", {"bucket_cap_mb": size_bytes / FINEST / 2**20})
    for _ in range(PLANNING_STEPS):
        job.step()
    chosen = job.state.plan_buckets()
    say(
        event="plan",
        options=chosen.ddp_options(),
        cap_bytes=chosen.cap_bytes,
        buckets=chosen.buckets,
        step_s=chosen.step_s,
        size_bytes=size_bytes,
    )
    job.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", choices=sorted(_models.PRESETS), required=True)
    preset = parser.parse_args().preset
    serve({"run": functools.partial(run, preset), "plan": functools.partial(plan, preset)})


if __name__ == "__main__":
    main()

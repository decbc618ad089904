"""One rank of one of two sibling jobs; `siblings.py` and `siblings_gpu.py` start it and tell it what to run.

With ``--scale`` batches lie on the device beforehand, so that the device and not the data loader is what the jobs
share. The hook "compute" runs the same steps without any exchange, which measures C.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import os
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import _models
from crossover_ddp.comm_hooks import CrossoverState, crossover_hook, reduce_scatter_all_gather_hook
from lab.meter import fingerprint
from studies._worker import Order, WorkerJob, measure, say, serve

WARM_UP_STEPS = 3  # DDP rebuilds its buckets after the first one
PREPARED_BATCHES = 4


class SiblingRun(WorkerJob):
    """A fresh copy of the job under one hook; ``work`` repeats its passes, for a job of other speed."""

    model: DistributedDataParallel

    def __init__(self, args: argparse.Namespace, hook: str, work: int) -> None:
        preset = _models.PRESETS[args.preset]
        large = prepared(args.preset, args.seed, args.scale, args.device)
        network, batches, _ = _models.build(args.preset, args.seed)
        own = batches(dist.get_rank(), dist.get_world_size())
        self.batches = itertools.cycle(large) if large else own
        self.model = DistributedDataParallel(
            network.to(args.device), bucket_cap_mb=preset.bucket_cap_mb, gradient_as_bucket_view=True
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=preset.lr / 10, momentum=0.9)
        self.exchanges = hook != "compute"
        self.work = work
        if hook == "rsag":
            self.model.register_comm_hook(None, reduce_scatter_all_gather_hook)
        elif hook == "crossover":
            self.state = CrossoverState()
            self.model.register_comm_hook(self.state, crossover_hook)

    def backward(self) -> torch.Tensor:
        for left in reversed(range(self.work)):
            with contextlib.nullcontext() if self.exchanges and not left else self.model.no_sync():
                loss = super().backward()
        return loss


@functools.cache
def prepared(preset: str, seed: int, scale: int, device: str) -> list[Any]:
    """Put some large batches of the preset's own data on the device, once; none if they shall not be large."""
    _, batches, _ = _models.build(preset, seed)
    source = batches(dist.get_rank(), dist.get_world_size())
    found = []
    for _ in range(PREPARED_BATCHES if scale else 0):
        parts = [next(source) for _ in range(scale)]
        found.append(tuple(torch.cat(column).to(device) for column in zip(*parts, strict=True)))
    return found


def run(args: argparse.Namespace, order: Order) -> None:
    job = SiblingRun(args, order["hook"], order.get("work", 1))
    on_gpu = torch.device(args.device).type == "cuda"
    answer = measure(
        job,
        order["steps"],
        warm_up=WARM_UP_STEPS,
        mutex=lambda: None if job.state is None else job.state.mutex,
        synchronize=torch.cuda.synchronize if on_gpu else None,
    )
    stats = None if job.state is None else job.state.stats()
    say(event="done", **answer, digest=fingerprint(job.model), stats=stats)
    job.close()


def be_reproducible(device: torch.device) -> None:
    """Same losses in every run; what has no deterministic kernel warns and is compared all the same."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cudnn.benchmark = False
    torch.cuda.set_device(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", choices=sorted(_models.PRESETS), required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=int, default=0, help="a batch's size, in batches of the preset")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backend", choices=["gloo", "nccl"], default="gloo")
    args = parser.parse_args()
    if torch.device(args.device).type == "cuda":
        be_reproducible(torch.device(args.device))
    serve({"run": functools.partial(run, args)}, args.backend)


if __name__ == "__main__":
    main()

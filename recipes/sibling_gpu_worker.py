"""One rank of one of two sibling jobs on a GPU, told over stdin what to run next; `siblings_gpu.py` starts it.

As `sibling_worker.py`, with the data on the device beforehand, so that the device and not the data loader is what the
jobs share, and with one hook more: ``compute`` runs the same steps without any exchange, which measures C.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import hashlib
import itertools
import os
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import _models
from _meter import wire_bytes
from crossover_ddp import CrossoverState, crossover_hook, reduce_scatter_all_gather_hook
from sibling_worker import WARM_UP_STEPS, heard, say

BATCHES = 4


class GpuRun:
    """A fresh copy of the job under one hook."""

    def __init__(self, args: argparse.Namespace, hook: str, batches: list[Any], network: Any) -> None:
        preset = _models.PRESETS[args.preset]
        self.model = DistributedDataParallel(
            network, bucket_cap_mb=preset.bucket_cap_mb, gradient_as_bucket_view=True
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=preset.lr / 10, momentum=0.9)
        self.batches = itertools.cycle(batches)
        self.state: CrossoverState | None = None
        self.exchanges = hook != "compute"
        if hook == "rsag":
            self.model.register_comm_hook(None, reduce_scatter_all_gather_hook)
        elif hook == "crossover":
            self.state = CrossoverState()
            self.model.register_comm_hook(self.state, crossover_hook)

    def step(self) -> torch.Tensor:
        """Train one step; the loss stays on the device, so that the host runs ahead where it can."""
        inputs, targets = next(self.batches)
        with contextlib.nullcontext() if self.exchanges else self.model.no_sync():
            loss = _models.loss_of(self.model(inputs), targets)
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Hold a turn during the block, and none outside: nobody waits for a job that waits for its start."""
        mutex = None if self.state is None else self.state.mutex
        if mutex is not None:
            mutex.acquire()
        yield
        if mutex is not None:
            mutex.release()

    def pause(self) -> None:
        if self.state is not None and self.state.mutex is not None:
            self.state.mutex.release()

    def digest(self) -> str:
        summed = hashlib.sha256()
        for parameter in self.model.parameters():
            summed.update(parameter.detach().cpu().numpy().tobytes())
        return summed.hexdigest()

    def close(self) -> dict[str, Any] | None:
        if self.state is None:
            return None
        stats = self.state.stats()
        self.state.close()
        return stats


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def load_batches(args: argparse.Namespace, device: torch.device) -> tuple[list[Any], Any]:
    """Put some large batches of the preset's own data on the device; return them and the network."""
    network, batches, _ = _models.build(args.preset, args.seed)
    source = batches(dist.get_rank(), dist.get_world_size())
    found = []
    for _ in range(BATCHES):
        parts = [next(source) for _ in range(args.scale)]
        found.append(tuple(torch.cat(column).to(device) for column in zip(*parts, strict=True)))
    return found, network


def run(
    order: dict[str, Any], args: argparse.Namespace, device: torch.device, batches: list[Any], network: Any
) -> None:
    """Warm up, wait for the start signal, run the steps, report."""
    job = GpuRun(args, order["hook"], batches, copy.deepcopy(network).to(device))
    losses = [job.step() for _ in range(WARM_UP_STEPS)]
    synchronize(device)
    job.pause()
    dist.barrier()
    say(event="ready")
    heard()
    ends, begin_s, sent = [], time.monotonic(), wire_bytes()
    with job.turn():
        for _ in range(order["steps"]):
            losses.append(job.step())
            ends.append(time.monotonic())
    synchronize(device)
    ends[-1] = time.monotonic()  # the host may have run ahead
    sent_end = wire_bytes()
    say(
        event="done",
        begin_s=begin_s,
        ends_s=ends,
        core_busy_s=None,
        wire_bytes=None if sent is None or sent_end is None else sent_end - sent,
        losses=[float(loss) for loss in losses],
        digest=job.digest(),
        stats=job.close(),
    )
    del job
    gc.collect()


def be_reproducible() -> None:
    """Same losses in every run; what has no deterministic kernel warns and is compared all the same."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cudnn.benchmark = False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", choices=sorted(_models.PRESETS), required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=int, default=1)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--backend", choices=["gloo", "nccl"], default="gloo")
    args = parser.parse_args()
    device = torch.device(args.device)
    be_reproducible()
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(args.backend)
    batches, network = load_batches(args, device)
    say(event="up", pid=os.getpid())
    while (order := heard())["do"] != "quit":
        run(order, args, device, batches, network)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""One rank of the averaging study, trained one way after another; `averaging.py` starts it."""

from __future__ import annotations

import argparse
import contextlib
import functools
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import _models
from crossover_ddp.averaging_hooks import ElasticState, LocalSGDState, elastic_hook, local_sgd_hook
from crossover_ddp.comm_hooks import DecoupledState, decoupled_hook
from studies._worker import Order, WorkerJob, measure, say, serve

SWING_STEPS = 4
AVERAGING_STATES = (LocalSGDState, ElasticState)
AVERAGED = ("apart", "local", "delayed", "diloco", "sync", "async", "wild")
ONE_BUCKET_MB = 1024
NEVER = 1 << 30  # steps until ranks apart would exchange something


class AveragingRun(WorkerJob):
    """A fresh copy of the job, trained one way.

    Args:
        network: to train.
        batches: of this rank, without end.
        rate: learning rate of SGD with momentum 0.9.
        order: ``way``, ``sync_every``, ``delay``, ``fragments``, and ``slow_s``, seconds that the last rank sleeps in
            each step.
    """

    def __init__(self, network: nn.Module, batches: Iterator[Any], rate: float, order: Order) -> None:
        way, every = order["way"], order.get("sync_every", 4)
        options: dict[str, Any] = {"gradient_as_bucket_view": True}
        if way in AVERAGED:
            options["broadcast_buffers"] = False
        if way == "decoupled":
            options |= DecoupledState.ddp_options(network)
        if way == "powersgd":  # its collectives of several buckets start in another order on each rank
            options["bucket_cap_mb"] = ONE_BUCKET_MB
        self.model: DistributedDataParallel = DistributedDataParallel(network, **options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=rate, momentum=0.9)
        self.batches = batches
        self._accumulate = every if way == "accumulation" else 1
        self._count = 0
        self.waited_s: list[float] = []
        self._slow_s = order.get("slow_s", 0.0) if dist.get_rank() == dist.get_world_size() - 1 else 0.0
        self._hook(way, every, order)

    def _hook(self, way: str, every: int, order: Order) -> None:
        if way == "fp16":
            self.model.register_comm_hook(None, fp16_compress_hook)
        elif way == "decoupled":
            self.state = DecoupledState(self.optimizer)
            self.model.register_comm_hook(self.state, decoupled_hook)
        elif way in ("apart", "local", "delayed"):
            every = NEVER if way == "apart" else every
            self.state = LocalSGDState(every, order.get("delay", 0), order.get("fragments", 1))
            self.model.register_comm_hook(self.state, local_sgd_hook)
        elif way in AVERAGED:
            self.state = ElasticState(every, way)  # type: ignore[arg-type]
            self.model.register_comm_hook(self.state, elastic_hook)

    def step(self) -> torch.Tensor:
        """One mini-batch; the optimizer steps after the last of those that are accumulated."""
        self._count += 1
        is_last = self._count % self._accumulate == 0
        with contextlib.nullcontext() if is_last else self.model.no_sync():
            loss = self.backward()
        if self._slow_s:
            time.sleep(self._slow_s)
        if is_last:
            self.optimizer.step()
            self.optimizer.zero_grad()
        if isinstance(self.state, AVERAGING_STATES):
            self.waited_s.append(self.state.stats()["waited_s"])
        return loss.detach()

    def waits_s(self, steps: int) -> list[float]:
        """Return for how long each of the last so many steps has waited for an exchange."""
        return [after - before for before, after in pairwise(self.waited_s[-steps - 1 :])]

    def counted(self) -> dict[str, Any]:
        """Return the hook's counters."""
        return self.state.stats() if isinstance(self.state, AVERAGING_STATES) else {}


def run(preset: str, batch_size: int | None, order: Order) -> None:
    network, batches, _ = _models.build(preset, 0, batch_size)
    of_rank = batches(dist.get_rank(), dist.get_world_size())
    job = AveragingRun(network, of_rank, _models.PRESETS[preset].lr / 10, order)
    steps = order["steps"]
    if job._slow_s:  # it makes as many steps as fit into the others' time, not more
        steps = max(4, steps // order["slow_share"])
    answer = measure(job, steps, warm_up=order.get("warm_up", 8), swing=SWING_STEPS)
    say(event="done", **answer, stats=job.counted(), waits_s=job.waits_s(steps), measured=steps)
    job.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", choices=sorted(_models.PRESETS), required=True)
    parser.add_argument("--batch-size", type=int)
    args = parser.parse_args()
    serve({"run": functools.partial(run, args.preset, args.batch_size)})


if __name__ == "__main__":
    main()

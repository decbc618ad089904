"""One rank of the averaging study, trained one way after another; `averaging.py` starts it."""

from __future__ import annotations

import argparse
import contextlib
import functools
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import _models
from crossover_ddp.averaging_hooks import ElasticState, LocalSGDState, elastic_hook, local_sgd_hook
from crossover_ddp.comm_hooks import DecoupledState, decoupled_hook
from studies._worker import Order, WorkerJob, measure, say, serve

SWING_STEPS = 4
AVERAGED = ("local", "delayed", "sync", "async", "wild")


class AveragingRun(WorkerJob):
    """A fresh copy of the job, trained one way.

    Args:
        preset: of the recipes' models.
        order: ``way``, ``sync_every``, ``delay``, ``fragments``, and ``slow_s``, seconds that the last rank sleeps in
            each step.
    """

    def __init__(self, preset: str, order: Order) -> None:
        network, batches, _ = _models.build(preset, 0)
        way, every = order["way"], order.get("sync_every", 4)
        options: dict[str, Any] = {"gradient_as_bucket_view": True}
        if way in AVERAGED:
            options["broadcast_buffers"] = False
        if way == "decoupled":
            options |= DecoupledState.ddp_options(network)
        self.model: DistributedDataParallel = DistributedDataParallel(network, **options)
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=_models.PRESETS[preset].lr / 10, momentum=0.9
        )
        self.batches = batches(dist.get_rank(), dist.get_world_size())
        self._accumulate = every if way == "accumulation" else 1
        self._count = 0
        self._slow_s = order.get("slow_s", 0.0) if dist.get_rank() == dist.get_world_size() - 1 else 0.0
        self._hook(way, every, order)

    def _hook(self, way: str, every: int, order: Order) -> None:
        if way == "fp16":
            self.model.register_comm_hook(None, fp16_compress_hook)
        elif way == "decoupled":
            self.state = DecoupledState(self.optimizer)
            self.model.register_comm_hook(self.state, decoupled_hook)
        elif way in ("local", "delayed"):
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
        return loss.detach()

    def counted(self) -> dict[str, Any]:
        """Return the hook's counters."""
        averaged = isinstance(self.state, LocalSGDState | ElasticState)
        return self.state.stats() if averaged else {}


def run(preset: str, order: Order) -> None:
    job = AveragingRun(preset, order)
    steps = order["steps"]
    if job._slow_s:  # it makes as many steps as fit into the others' time, not more
        steps = max(4, steps // order["slow_share"])
    before = {"waited_s": 0.0}
    answer = measure(job, steps, warm_up=order.get("warm_up", 8), swing=SWING_STEPS)
    say(event="done", **answer, stats={**before, **job.counted()}, measured=steps)
    job.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", choices=sorted(_models.PRESETS), required=True)
    preset = parser.parse_args().preset
    serve({"run": functools.partial(run, preset)})


if __name__ == "__main__":
    main()

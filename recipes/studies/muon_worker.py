"""One rank of the study of Muon, trained one way after another; `muon.py` starts it."""

from __future__ import annotations

import argparse
import functools
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import _models
from _job import MuonAndAdamW
from crossover_ddp.muon_hooks import MuonState, muon_hook
from studies._worker import Order, WorkerJob, measure, say, serve

WARM_UP_STEPS = 4
LR = 1e-3


class MuonRun(WorkerJob):
    """A fresh copy of the job, trained by Muon and AdamW, with our hook or by plain DDP."""

    def __init__(self, preset: str, way: str) -> None:
        chosen = _models.PRESETS[preset]
        network, batches, _ = _models.build(preset, 0)
        self.model = DistributedDataParallel(
            network, gradient_as_bucket_view=True, bucket_cap_mb=chosen.bucket_cap_mb
        )
        self.optimizer = MuonAndAdamW(network, lr=LR)
        if way == "owners":
            self.state = MuonState(self.optimizer.muon)
            self.model.register_comm_hook(self.state, muon_hook)
        self.batches = batches(dist.get_rank(), dist.get_world_size())

    def momentum_bytes(self) -> int:
        state = self.optimizer.muon.state.values()
        return sum(each["momentum_buffer"].nbytes for each in state)

    def close(self) -> None:
        """Drop the state; its Muon goes with it."""


def run(preset: str, order: Order) -> None:
    job = MuonRun(preset, order["way"])
    answer: dict[str, Any] = measure(job, order["steps"], warm_up=order.get("warm_up", WARM_UP_STEPS))
    matrices = sum(len(group["params"]) for group in job.optimizer.muon.param_groups)
    calls = matrices * len(answer["losses"])
    if job.state is not None:
        calls = job.state.newton_schulz_calls
        loads = job.state.loads
        answer["busiest_share"] = max(loads) / sum(loads)
    say(event="done", **answer, calls=calls, matrices=matrices, momentum_bytes=job.momentum_bytes())
    job.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", choices=sorted(_models.PRESETS), required=True)
    serve({"run": functools.partial(run, parser.parse_args().preset)})


if __name__ == "__main__":
    main()

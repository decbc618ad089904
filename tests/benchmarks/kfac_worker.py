"""One rank of the measurements of K-FAC: the same model trained in several ways, step by step in turn.

Run by the lab (``recipes/lab``). Its only argument is a `kfac_runs.Plan` in JSON. Writes ``kfac-<rank>.json``
into the job's directory: for each way, time and wire bytes of its steps in order, and the owners of the layers.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from crossover_ddp.comm_hooks import reduce_scatter_all_gather_hook
from crossover_ddp.kfac_hooks import KFACState, kfac_hook
from tests.benchmarks.kfac_plan import Plan
from tests.benchmarks.pair_worker import sent_bytes

PLANNED_AT = 3  # after a factor step with the final buckets


class Run:
    """One way of training."""

    def __init__(self, way: str, plan: Plan) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(plan.width, plan.width, bias=False) for _ in range(plan.layers)]
        self.model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=plan.cap_mb)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.state: KFACState | None = None
        self._early = way == "early"
        self._samples, self._width = plan.samples, plan.width
        if way == "split":
            self.model.register_comm_hook(None, reduce_scatter_all_gather_hook)
        elif way != "ddp":
            self.state = KFACState(
                self.model,
                self.optimizer,
                damping=0.03,
                factor_update_steps=plan.factor_update_steps,
                inv_update_steps=plan.inv_update_steps,
                factors="local" if way == "local" else "global",
            )
            self.model.register_comm_hook(self.state, kfac_hook)
        self.generator = torch.Generator().manual_seed(dist.get_rank())

    def plan_if_due(self, step: int) -> None:
        if self._early and step == PLANNED_AT and self.state is not None:
            self.state.plan_factors(early=True)

    def step(self) -> None:
        inputs = torch.randn(self._samples, self._width, generator=self.generator)
        self.model(inputs).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def timed(run: Run) -> dict[str, float]:
    dist.barrier()
    wire_bytes, begin_s = sent_bytes(), time.perf_counter()
    run.step()
    time_s = time.perf_counter() - begin_s
    if run.state is not None:  # the step's own factors, which would follow behind later steps
        run.state._preconditioner.traffic.settle()
    # A rank may be done while its last bytes still wait for the link; the barrier's few follow them.
    dist.barrier()
    return {"time_s": time_s, "wire_bytes": sent_bytes() - wire_bytes}


def main() -> None:
    plan = Plan(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    runs = {way: Run(way, plan) for way in plan.ways}
    taken: dict[str, list[dict[str, Any]]] = {way: [] for way in plan.ways}
    for step in range(plan.warm_up + plan.steps):
        for way in plan.ways if step % 2 else plan.ways[::-1]:
            runs[way].plan_if_due(step)
            figures = timed(runs[way])
            if step >= plan.warm_up:
                taken[way].append({"step": step, **figures})
    states = {way: run.state for way, run in runs.items() if run.state is not None}
    for state in states.values():
        assert state.stats() == {"strained": 0, "dropped": 0}
    owners = {way: [*state.owners.values()] for way, state in states.items()}
    path = Path(os.environ["CROSSOVER_LAB_DIR"]) / f"kfac-{dist.get_rank()}.json"
    path.write_text(json.dumps({"taken": taken, "owners": owners}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

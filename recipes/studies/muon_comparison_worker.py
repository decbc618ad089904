"""One rank of the comparison of Muons, trained one way after another; `muon_comparison.py` starts it."""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import _models
from _job import hidden_matrices
from crossover_ddp.comm_hooks import DecoupledState, decoupled_hook
from crossover_ddp.muon_hooks import MuonState, muon_hook
from studies._worker import Order, WorkerJob, measure, say, serve

WARM_UP_STEPS = 4
SHARED: dict[str, Any] = {"lr": 2e-3, "weight_decay": 1e-4}
MOMENTUM = 0.95


class SeveralOptimizers:
    """Optimizers of one model that step together."""

    def __init__(self, parts: list[Optimizer]) -> None:
        self.parts = parts

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad()


def gather_unequal(outputs: list[torch.Tensor], own: torch.Tensor) -> None:
    """All-gather tensors of different shapes by one broadcast each, as NCCL does; gloo refuses them."""
    outputs[dist.get_rank()].copy_(own)
    for work in [dist.broadcast(output, rank, async_op=True) for rank, output in enumerate(outputs)]:
        assert work is not None
        work.wait()


def keller(path: Path, matrices: list[torch.Tensor]) -> Optimizer:
    """Make the Muon of KellerJordan's checkout; all-gathers parameters, one round of them after the other."""
    spec = importlib.util.spec_from_file_location("keller_muon", path / "muon.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    vars(module)["dist"] = types.SimpleNamespace(
        all_gather=gather_unequal, get_world_size=dist.get_world_size, get_rank=dist.get_rank
    )
    made: Optimizer = module.Muon(matrices, momentum=MOMENTUM, **SHARED)
    return made


def dion(path: Path, matrices: list[torch.Tensor]) -> Optimizer:
    """Make the Muon of dion's checkout for DDP, with as many Newton-Schulz steps as torch's."""
    if str(path) not in sys.path:
        sys.path.insert(0, str(path))
    module = importlib.import_module("dion.muon")
    group = dist.group.WORLD
    made: Optimizer = module.Muon(
        matrices, distributed_mesh=group, mu=MOMENTUM, nesterov=True, use_polar_express=False, **SHARED
    )
    return made


class MuonComparisonRun(WorkerJob):
    """A fresh copy of the job, trained one way."""

    def __init__(self, args: argparse.Namespace, way: str) -> None:
        chosen = _models.PRESETS[args.preset]
        network, batches, _ = _models.build(args.preset, 0)
        self.model = DistributedDataParallel(
            network, gradient_as_bucket_view=True, bucket_cap_mb=chosen.bucket_cap_mb
        )
        matrices = hidden_matrices(network)
        known = {id(matrix) for matrix in matrices}
        adamw = torch.optim.AdamW([p for p in network.parameters() if id(p) not in known], **SHARED)
        if way == "keller":
            muon = keller(args.keller, matrices)
        elif way == "dion":
            muon = dion(args.dion, matrices)
        else:
            muon = torch.optim.Muon(matrices, momentum=MOMENTUM, **SHARED)
        self.optimizer = SeveralOptimizers([muon, adamw])
        if way == "owners":
            assert isinstance(muon, torch.optim.Muon)
            self.state = MuonState(muon)
            self.model.register_comm_hook(self.state, muon_hook)
        elif way == "layers":
            self.state = DecoupledState([muon, adamw], owners="layers")
            self.model.register_comm_hook(self.state, decoupled_hook)
        self.batches = batches(dist.get_rank(), dist.get_world_size())

    def close(self) -> None:
        """Finish what is under way, and drop the state."""
        if isinstance(self.state, DecoupledState):
            self.state.flush()


def run(args: argparse.Namespace, order: Order) -> None:
    job = MuonComparisonRun(args, order["way"])
    say(event="done", **measure(job, order["steps"], warm_up=order.get("warm_up", WARM_UP_STEPS)))
    job.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", choices=sorted(_models.PRESETS), required=True)
    parser.add_argument("--keller", type=Path)
    parser.add_argument("--dion", type=Path)
    serve({"run": functools.partial(run, parser.parse_args())})


if __name__ == "__main__":
    main()

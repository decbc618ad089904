"""How long the way of a step is: the package's modules that one settled step of each hook enters."""

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import crossover_ddp as ours
from tests.harness import run_ranks
from tests.harness.networks import mlp

PACKAGE = str(Path(ours.__file__).parent)
SETTLED, SEEN = 6, 3
ROOM_FOR_MENDS = 2  # of today's engine
Attach = Callable[[DistributedDataParallel, torch.optim.Optimizer], None]


def split(model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    model.register_comm_hook(None, ours.reduce_scatter_all_gather_hook)


def attach(hook: Any, make: Callable[..., Any]) -> Attach:
    return lambda model, optimizer: model.register_comm_hook(make(model, optimizer), hook)


# At most so many modules, today. Whoever shortens a way lowers its number; the design wants 6 for the split, 8 for
# averaging, 9 for Int8, 10 for crossover, decoupled and Muon, 12 for owners and 16 for K-FAC.
WAYS: dict[str, tuple[int, Attach]] = {
    "split": (16, split),
    "crossover": (32, attach(ours.crossover_hook, lambda *_: ours.CrossoverState())),
    "decoupled": (32, attach(ours.decoupled_hook, lambda _, sgd: ours.DecoupledState(sgd, defer="always"))),
    "int8": (27, attach(ours.compressed_hook, lambda *_: ours.CompressedState(ours.Int8()))),
    "averaging": (24, attach(ours.local_sgd_hook, lambda *_: ours.LocalSGDState(2))),
    "muon": (23, attach(ours.muon_hook, lambda _, muon: ours.MuonState(muon))),
    "owners": (38, attach(ours.decoupled_hook, lambda _, sgd: ours.DecoupledState(sgd, owners="layers"))),
    "kfac": (38, attach(ours.kfac_hook, lambda model, sgd: ours.KFACState(model, sgd))),
}


class Modules:
    """The files of the package whose functions are called while it is open, on any thread begun after it was made."""

    def __init__(self) -> None:
        self.found: set[str] = set()
        self.open = False
        sys.setprofile(self.note)
        threading.setprofile(self.note)

    def note(self, frame: FrameType, event: str, argument: object) -> None:
        file = frame.f_code.co_filename
        if self.open and event == "call" and file.startswith(PACKAGE):
            self.found.add(file.removeprefix(f"{PACKAGE}/").removesuffix(".py"))

    def close(self) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def modules_of(rank: int, world_size: int, way: str) -> set[str]:
    network = mlp(6, 8, 8, 4, seed=1, bias=way != "muon")
    model = DistributedDataParallel(network, gradient_as_bucket_view=True, bucket_cap_mb=1e-4)
    if way == "muon":
        optimizer: torch.optim.Optimizer = torch.optim.Muon(network.parameters(), lr=0.01)
    else:
        optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    seen = Modules()
    try:
        WAYS[way][1](model, optimizer)
        for step in range(SETTLED + SEEN):
            seen.open = step >= SETTLED
            inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))
            nn.functional.mse_loss(model(inputs), torch.zeros(4, 4)).backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        seen.open = False
        seen.close()
    return seen.found


@pytest.mark.parametrize("way", WAYS)
def test_a_settled_step_enters_no_more_modules_than_today(way: str) -> None:
    found = sorted(set.union(*run_ranks(modules_of, 2, args=(way,))))
    assert 0 < len(found) <= WAYS[way][0] + ROOM_FOR_MENDS, f"{len(found)}: {found}"

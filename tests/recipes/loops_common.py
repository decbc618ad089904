"""What the ranks of all foreign loops share: the document's blocks, a small training, and a watch on each run."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from crossover_ddp import DecoupledState, GPUMutex, decoupled_hook
from crossover_ddp.comm_hooks import _mutexes
from tests.harness import documents
from tests.harness.networks import mlp

_DOCUMENT = (Path(__file__).resolve().parents[2] / "docs" / "loops.md").read_text()
WIDTH = 8

Report = dict[str, dict[str, Any]]


def diffs(heading: str) -> list[str]:
    """Return the diffs that the document shows under a heading."""
    return documents.blocks(documents.section(_DOCUMENT, heading), "diff")


def shown(source: str, names: dict[str, Any]) -> None:
    """Run a block of the document where a reader would paste it."""
    exec(compile(source, "docs/loops.md", "exec"), names)


def network() -> nn.Sequential:
    return mlp(*[WIDTH] * 4, seed=3, tanh_last=True)


def samples() -> TensorDataset:
    """32 samples: of batches of 4, each of two ranks has four."""
    return TensorDataset(torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(0)))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def square(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


@torch.no_grad()
def evaluate(model: nn.Module) -> None:
    model.eval()(torch.ones(1, WIDTH))


class Watched:
    """The model whose forwards are noted; a loop that makes its own sets it when it is made."""

    def __init__(self, model: nn.Module | None) -> None:
        self.model = model
        self.forwards: list[tuple[bool, bool]] = []
        self._former = list(_mutexes.values())
        self._found: list[GPUMutex] = []

    def mutexes(self) -> list[GPUMutex]:
        """Return the mutexes of this run, also those whose process group is gone."""
        self._found += [mutex for mutex in _mutexes.values() if mutex not in [*self._former, *self._found]]
        return self._found

    def note(self, module: nn.Module, _: Any) -> None:
        if module is self.model:
            self.forwards.append((module.training, any(mutex.holding for mutex in self.mutexes())))


class Runs:
    """The runs of one loop, and what came out of each."""

    def __init__(self) -> None:
        self.report: Report = {}

    @contextlib.contextmanager
    def run(self, name: str, model: nn.Module | None = None) -> Iterator[Watched]:
        """Watch one run of training ``model``."""
        watched, error = Watched(model), ""
        handle = nn.modules.module.register_module_forward_pre_hook(watched.note)
        try:
            yield watched
        except Exception as problem:  # part of the report: some runs must be refused
            error = f"{type(problem).__name__}: {problem}"
        handle.remove()
        state = {} if watched.model is None else watched.model.state_dict()
        self.report[name] = {
            "error": error,
            "forwards": watched.forwards,
            "weights": [value.detach().clone() for value in state.values()],
            "turns": sum(mutex.stats()["turns"] for mutex in watched.mutexes()),
            "left": all(mutex.disabled_because == "closed" for mutex in watched.mutexes()),
        }
        for mutex in watched.mutexes():
            mutex.close()


class Deferrals:
    """Counts how often a decoupled model had updates to make when a forward began."""

    def __init__(self) -> None:
        self.count = 0

    def hook(self, model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> DecoupledState:
        state = DecoupledState(optimizer, defer="always")
        model.register_comm_hook(state, decoupled_hook)
        model.register_forward_pre_hook(lambda *_: self._note(state))
        return state

    def _note(self, state: DecoupledState) -> None:
        self.count += bool(state.stats()["deferred"])

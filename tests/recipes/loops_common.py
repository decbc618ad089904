"""Shared by the foreign loops: the document's blocks, a small training, and a record of a run."""

import contextlib
import importlib.util
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import crossover_ddp
from crossover_ddp import AutoState, DecoupledState, GPUMutex, decoupled_hook
from crossover_ddp.comm_hooks import _mutexes
from tests.harness import documents
from tests.harness.networks import mlp
from tests.harness.waiting import eventually
from tests.multiprocess.compressed_training import digest

_DOCUMENT = (Path(__file__).resolve().parents[2] / "docs" / "loops.md").read_text()
WIDTH = 8
STEPS = 4  # of each rank in an epoch
KILLED_IN = STEPS + 2


if importlib.util.find_spec("lightning") is None:  # the same code under its other name
    _DOCUMENT = _DOCUMENT.replace("lightning.pytorch", "pytorch_lightning")
    _DOCUMENT = _DOCUMENT.replace("lightning.fabric", "lightning_fabric")


def diffs(heading: str) -> list[str]:
    return documents.blocks(documents.section(_DOCUMENT, heading), "diff")


def shown(source: str, names: dict[str, Any]) -> None:
    """Execute a block of the document with these names."""
    exec(compile(source, "docs/loops.md", "exec"), names)


def network() -> nn.Sequential:
    return mlp(*[WIDTH] * 4, seed=3, tanh_last=True)


def batches(size: int = 4) -> DataLoader[Any]:
    """Return 32 samples: with batches of 4, each of two ranks has four."""
    data = TensorDataset(torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(0)))
    return DataLoader(data, batch_size=size)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def square(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any, loss: Any = square
) -> None:
    for (inputs,) in loader:
        loss(model(inputs + dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def evaluate(model: nn.Module) -> None:
    model.eval()(torch.ones(1, WIDTH))


@dataclass
class Run:
    """A record of a training."""

    weights: list[torch.Tensor] = field(default_factory=list)
    turns: int = 0
    # Whether all mutexes were closed at the end.
    has_left: bool = False
    state: Any = None
    # For each forward, whether the model was in training mode, and whether it ran inside a turn.
    forwards: list[tuple[bool, bool]] = field(default_factory=list)

    def inside_turns(self, *, training: bool) -> list[bool]:
        return [holding for trains, holding in self.forwards if trains == training]

    def hook(self, model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
        """Let the model train decoupled."""
        self.state = DecoupledState(optimizer, defer="always")
        model.register_comm_hook(self.state, decoupled_hook)

    @property
    def deferred(self) -> int:
        assert self.state is not None
        return int(self.state.stats()["steps_deferred"])

    def assert_like(self, other: "Run", **tolerance: float) -> None:
        """Assert that weights are the same, by default bit for bit."""
        assert self.weights
        torch.testing.assert_close(
            self.weights, other.weights, **(tolerance or {"rtol": 0, "atol": 0})
        )


@contextlib.contextmanager
def watched(model: nn.Module, run: Run | None = None) -> Iterator[Run]:
    """Record a block in which a model is trained. Print its digest, which ranks compare."""
    run = run or Run()
    former = [*_mutexes.values()]
    found = list[GPUMutex]()

    def mutexes() -> list[GPUMutex]:
        """Return the mutexes of this run, including those of destroyed process groups."""
        found.extend(mutex for mutex in _mutexes.values() if mutex not in [*former, *found])
        return found

    def note(module: nn.Module, _: Any) -> None:
        if module is model:
            run.forwards.append((module.training, any(mutex.holding for mutex in mutexes())))

    handle = nn.modules.module.register_module_forward_pre_hook(note)
    yield run
    handle.remove()
    run.weights += [value.detach().clone() for value in model.state_dict().values()]
    run.turns = sum(mutex.stats()["turns"] for mutex in mutexes())
    run.has_left = all(mutex.disabled_because == "closed" for mutex in mutexes())
    for mutex in mutexes():
        mutex.close()
    # Running statistics differ between ranks.
    print(f"\nweights {digest([each.detach() for each in model.parameters()])}", flush=True)


@contextlib.contextmanager
def deferring(run: Run | None = None) -> Iterator[None]:
    """Let an ``AutoState(optimizer)`` of a document defer from the start, without a race."""

    def state(optimizer: torch.optim.Optimizer) -> AutoState:
        made = AutoState(optimizer, arms=("deferred",))
        if run is not None:
            run.state = made
        return made

    with patch.object(crossover_ddp, "AutoState", state):
        yield


@dataclass
class Job:
    """A training.

    It is "plain", without the hook, or "whole", or "killed" in its second epoch, or "resumed".
    """

    name: str
    directory: Path
    losses: list[float] = field(default_factory=list)

    def loss(self, output: torch.Tensor) -> torch.Tensor:
        return self.note(square(output))

    def note(self, loss: torch.Tensor) -> torch.Tensor:
        """Record the loss. Kill this process after step `KILLED_IN`, when both ranks are there."""
        self.losses.append(loss.item())
        if self.name == "killed" and len(self.losses) == KILLED_IN:
            (self.directory / f"killed-{os.environ['RANK']}").touch()
            assert eventually(lambda: len([*self.directory.glob("killed-*")]) == 2)
            os.kill(os.getpid(), signal.SIGKILL)
        return loss

    @property
    def resume(self) -> bool:
        return self.name == "resumed"

    def run(self, heading: str, names: dict[str, Any]) -> None:
        """Execute the document's diff under a heading: its result, or if "plain" its begin."""
        (diff,) = diffs(heading)
        own = {"resume": self.resume, "path": self.directory, "first_epoch": int(self.resume)}
        shown(
            documents.before(diff) if self.name == "plain" else documents.after(diff),
            {**own, **names},
        )

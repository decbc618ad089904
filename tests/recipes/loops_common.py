"""What the ranks of all foreign loops share: the document's blocks, a small training, and a watch on each run."""

from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from crossover_ddp import DecoupledState, GPUMutex, decoupled_hook
from crossover_ddp.comm_hooks import _mutexes
from tests.harness import documents
from tests.harness.networks import mlp
from tests.multiprocess.compressed_training import digest

_DOCUMENT = (Path(__file__).resolve().parents[2] / "docs" / "loops.md").read_text()
WIDTH = 8


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


class Run:
    """A block in which ``model`` is trained.

    Afterwards ``weights`` are the model's, ``error`` says what has ended it, ``turns`` how many were taken, and
    ``has_left`` whether all mutexes were closed by then. The weights' digest is printed, which ranks must share.
    """

    def __init__(self, model: nn.Module) -> None:
        self.error = ""
        self.deferred = 0
        """How often a decoupled model had updates to make when a forward began."""
        self._model = model
        self._forwards: list[tuple[bool, bool]] = []
        self._former = list(_mutexes.values())
        self._found: list[GPUMutex] = []

    def __enter__(self) -> "Run":
        self._handle = nn.modules.module.register_module_forward_pre_hook(self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._handle.remove()
        self.error = "" if error is None else f"{type(error).__name__}: {error}"
        self.weights = [value.detach().clone() for value in self._model.state_dict().values()]
        self.turns = sum(mutex.stats()["turns"] for mutex in self._mutexes())
        self.has_left = all(mutex.disabled_because == "closed" for mutex in self._mutexes())
        for mutex in self._mutexes():
            mutex.close()
        if error is None:
            print(f"\nweights {digest(self.weights)}", flush=True)
        return isinstance(error, Exception)  # some runs must be refused

    def inside_turns(self, *, training: bool) -> list[bool]:
        """Tell of each forward in training, or in evaluation, whether it ran inside a turn."""
        return [holding for trains, holding in self._forwards if trains == training]

    def assert_like(self, other: "Run", **tolerance: float) -> None:
        """Both runs went well, and their weights are the same, bit for bit if nothing else is said."""
        assert self.error == other.error == ""
        assert self.weights
        torch.testing.assert_close(self.weights, other.weights, **(tolerance or {"rtol": 0, "atol": 0}))

    def hook(self, model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> DecoupledState:
        """Let the model train decoupled."""
        state = DecoupledState(optimizer, defer="always")
        model.register_comm_hook(state, decoupled_hook)
        model.register_forward_pre_hook(lambda *_: self._count(state))
        return state

    def _count(self, state: DecoupledState) -> None:
        self.deferred += bool(state.stats()["deferred"])

    def _mutexes(self) -> list[GPUMutex]:
        """Return the mutexes of this run, also those whose process group is gone."""
        self._found += [mutex for mutex in _mutexes.values() if mutex not in [*self._former, *self._found]]
        return self._found

    def _note(self, module: nn.Module, _: Any) -> None:
        if module is self._model:
            self._forwards.append((module.training, any(mutex.holding for mutex in self._mutexes())))

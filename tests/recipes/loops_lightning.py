"""Lightning's loop without and with the lines of docs/loops.md; see loops_worker.py."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytorch_lightning
import torch
from pytorch_lightning.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from crossover_ddp import DecoupledState
from tests.harness import documents
from tests.recipes.loops_common import Deferrals, Report, Runs, diffs, network, samples, sgd, shown, square


class Module(pytorch_lightning.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        return square(self.network(batch[0]))

    def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
        self.log("loss", square(self.network(batch[0])), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(self)


class Clipping(Module):
    """What docs/loops.md advises for clipping with a decoupled state."""

    state: DecoupledState | None = None

    def configure_gradient_clipping(
        self, optimizer: torch.optim.Optimizer, gradient_clip_val: float, gradient_clip_algorithm: str
    ) -> None:
        assert self.state is not None
        self.state.clip_grad_norm_(gradient_clip_val)


class OnFitStart(pytorch_lightning.Callback):  # type: ignore[misc]
    """Registers a hook where docs/loops.md advises to."""

    def __init__(self, register: Callable[[DistributedDataParallel, torch.optim.Optimizer], None]) -> None:
        self.register = register

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.register(trainer.strategy.model, trainer.optimizers[0])


def lightning() -> Report:
    runs = Runs()
    line, callback = diffs("Lightning")
    plain = documents.before(line)
    train(runs, "plain", plain)
    train(runs, "line on a CPU", documents.after(line))
    with as_on_a_gpu():
        train(runs, "line", documents.after(line))
    train(runs, "callback", documents.after(callback))
    train(runs, "accumulated plain", plain, accumulate_grad_batches=2)
    train(runs, "accumulated callback", documents.after(callback), accumulate_grad_batches=2)
    train(runs, "clipped plain", plain, gradient_clip_val=0.01)
    decoupled(runs, "decoupled", plain)
    views = plain.replace("DDPStrategy()", "DDPStrategy(gradient_as_bucket_view=True)")
    decoupled(runs, "decoupled views", views)
    decoupled(runs, "decoupled accumulated", views, accumulate_grad_batches=2)
    decoupled(runs, "decoupled clipped", views, gradient_clip_val=0.01)
    decoupled(runs, "decoupled clipping", views, Clipping(), gradient_clip_val=0.01)
    return runs.report


def train(runs: Runs, name: str, source: str, module: Module | None = None, **options: Any) -> None:
    """Run a block of the document."""
    module = Module() if module is None else module
    loader = DataLoader(samples(), batch_size=4)
    trainer = functools.partial(pytorch_lightning.Trainer, **options)
    with runs.run(name, module.network), patch.object(pytorch_lightning, "Trainer", trainer):
        shown(source, {"model": module, "train_loader": loader, "val_loader": loader})


def decoupled(runs: Runs, name: str, source: str, module: Clipping | None = None, **options: Any) -> None:
    deferrals = Deferrals()

    def register(model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
        state = deferrals.hook(model, optimizer)
        if module is not None:
            module.state = state

    train(runs, name, source, module, callbacks=[OnFitStart(register)], **options)
    runs.report[name]["deferred"] = deferrals.count


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Let Lightning register its hook on the CPU, by its own code, which looks for a GPU first."""
    register = DDPStrategy._register_ddp_hooks

    def registered(self: Any) -> None:
        with patch.object(DDPStrategy, "root_device", torch.device("cuda", 0)):
            register(self)

    with patch.object(DDPStrategy, "_register_ddp_hooks", registered):
        yield

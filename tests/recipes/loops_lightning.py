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
from tests.recipes.loops_common import Run, diffs, network, samples, sgd, shown, square


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


def lightning() -> None:
    line, callback = diffs("Lightning")
    source = documents.before(line)
    plain = train(source)
    accumulated = train(source, accumulate_grad_batches=2)
    clipped = train(source, gradient_clip_val=0.01)
    assert not torch.equal(plain.weights[0], clipped.weights[0])

    ignored = train(documents.after(line))  # which the document warns of
    ignored.assert_like(plain)
    assert ignored.turns == 0
    with as_on_a_gpu():
        hooked = train(documents.after(line))
    hooked.assert_like(plain)
    assert hooked.turns == 8
    assert sum(hooked.inside_turns(training=True)) == 7  # all but the first
    # The first two are before training; then nobody pauses, and siblings wait a lease.
    assert hooked.inside_turns(training=False) == [False] * 2 + [True] * 8

    for expected, turns, inside, options in (
        (plain, 8, 6, {}),
        (accumulated, 4, 4, {"accumulate_grad_batches": 2}),
    ):
        pausing = train(documents.after(callback), **options)
        pausing.assert_like(expected)
        assert pausing.turns == turns
        assert sum(pausing.inside_turns(training=True)) == inside
        assert not any(pausing.inside_turns(training=False))
        assert pausing.has_left

    views = source.replace("DDPStrategy()", "DDPStrategy(gradient_as_bucket_view=True)")
    for expected, decoupled in (
        (plain, train_decoupled(source)),
        (plain, train_decoupled(views)),
        (accumulated, train_decoupled(views, accumulate_grad_batches=2)),
    ):
        decoupled.assert_like(expected)
        assert decoupled.deferred > 0
    by_lightning = train_decoupled(views, gradient_clip_val=0.01)
    by_lightning.assert_like(clipped)
    assert by_lightning.deferred == 0
    by_state = train_decoupled(views, Clipping(), gradient_clip_val=0.01)
    by_state.assert_like(clipped, rtol=1e-6, atol=1e-8)  # the norm is summed in another order
    assert by_state.deferred > 0


def train(source: str, module: Module | None = None, run: Run | None = None, **options: Any) -> Run:
    """Run a block of the document."""
    module = Module() if module is None else module
    loader = DataLoader(samples(), batch_size=4)
    trainer = functools.partial(pytorch_lightning.Trainer, **options)
    with run or Run(module.network) as done, patch.object(pytorch_lightning, "Trainer", trainer):
        shown(source, {"model": module, "train_loader": loader, "val_loader": loader})
    return done


def train_decoupled(source: str, module: Module | None = None, **options: Any) -> Run:
    module = Module() if module is None else module
    run = Run(module.network)

    def register(model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
        state = run.hook(model, optimizer)
        if isinstance(module, Clipping):
            module.state = state

    return train(source, module, run, callbacks=[OnFitStart(register)], **options)


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Let Lightning register its hook on the CPU, by its own code, which looks for a GPU first."""
    register = DDPStrategy._register_ddp_hooks

    def registered(self: Any) -> None:
        with patch.object(DDPStrategy, "root_device", torch.device("cuda", 0)):
            register(self)

    with patch.object(DDPStrategy, "_register_ddp_hooks", registered):
        yield

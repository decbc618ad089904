"""Lightning's loop without and with the lines of docs/loops.md; see loops_worker.py."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytorch_lightning
import torch
from pytorch_lightning.strategies import DDPStrategy

from tests.harness import documents
from tests.recipes.loops_common import Run, batches, diffs, network, sgd, shown, square, watched


class Module(pytorch_lightning.LightningModule):  # type: ignore[misc]
    def __init__(self, loss_function: Callable[[torch.Tensor], torch.Tensor] = square) -> None:
        super().__init__()
        self.network = network()
        self.loss_function = loss_function

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        return self.loss_function(self.network(batch[0]))

    def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
        self.log("loss", square(self.network(batch[0])), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(self)


class Decoupled(pytorch_lightning.Callback):  # type: ignore[misc]
    """Registers a hook where docs/loops.md advises to."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.run.hook(trainer.strategy.model, trainer.optimizers[0])


def lightning() -> None:
    line, callback = diffs("Lightning")
    source = documents.before(line)
    plain = train(source)
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
    # The first two are before training. Later ones are inside a turn, since nothing pauses it.
    assert hooked.inside_turns(training=False) == [False] * 2 + [True] * 8

    pausing = train(documents.after(callback))
    pausing.assert_like(plain)
    assert (pausing.turns, sum(pausing.inside_turns(training=True))) == (8, 6)
    assert not any(pausing.inside_turns(training=False))
    assert pausing.has_left

    views = source.replace("DDPStrategy()", "DDPStrategy(gradient_as_bucket_view=True)")
    decoupled = train(source, decoupled=True)
    decoupled.assert_like(plain)
    assert decoupled.deferred > 0
    by_lightning = train(views, decoupled=True, gradient_clip_val=0.01)
    # The norm has another order of additions.
    by_lightning.assert_like(clipped, rtol=1e-6, atol=1e-8)
    assert by_lightning.deferred > 0


def train(source: str, *, decoupled: bool = False, **options: Any) -> Run:
    module, run, loader = Module(), Run(), batches()
    if decoupled:
        options["callbacks"] = [Decoupled(run)]
    trainer = functools.partial(pytorch_lightning.Trainer, **options)
    with watched(module.network, run), patch.object(pytorch_lightning, "Trainer", trainer):
        shown(source, {"model": module, "train_loader": loader, "val_loader": loader})
    return run


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Make Lightning register its hook on the CPU. Its code does that only on a GPU."""
    register = DDPStrategy._register_ddp_hooks

    def registered(self: Any) -> None:
        with patch.object(DDPStrategy, "root_device", torch.device("cuda", 0)):
            register(self)

    with patch.object(DDPStrategy, "_register_ddp_hooks", registered):
        yield

"""Lightning's and Fabric's loops with the lines of docs/loops.md; see loops_worker.py.

The package ``lightning`` contains the code of ``pytorch_lightning``, which is used without it.
"""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from tests.harness import documents
from tests.recipes.loops_common import (
    Run,
    batches,
    deferring,
    diffs,
    network,
    sgd,
    shown,
    square,
    watched,
)

PACKAGE = importlib.import_module(
    "lightning.pytorch" if importlib.util.find_spec("lightning") else "pytorch_lightning"
)


class Module(PACKAGE.LightningModule):  # type: ignore[misc, name-defined]
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


def lightning() -> None:
    auto, turns, _ = diffs("Lightning")
    source, hooked = documents.before(auto), documents.after(auto)
    plain = train(source)
    run = Run()
    with deferring(run):
        train(hooked, run).assert_like(plain)
    assert run.deferred > 0
    # Another strategy in the place of "ddp".
    strategy = importlib.import_module(f"{PACKAGE.__name__}.strategies").DDPStrategy
    unused = strategy(find_unused_parameters=True, gradient_as_bucket_view=True)
    train(hooked, strategy=unused).assert_like(plain)

    resumed = hooked.replace("val_loader)", "val_loader, ckpt_path=path)")
    with deferring():
        train(hooked, max_epochs=1, default_root_dir="first")
        train(resumed).assert_like(plain)

    train(hooked, precision="bf16-mixed").assert_like(train(source, precision="bf16-mixed"))
    options = {"gradient_clip_val": 0.01, "accumulate_grad_batches": 2}
    clipped = train(source, **options)
    assert not torch.equal(plain.weights[0], clipped.weights[0])
    run = Run()
    with deferring(run):
        # The norm has another order of additions.
        train(hooked, run, **options).assert_like(clipped, rtol=1e-6, atol=1e-8)
    assert run.deferred > 0

    def never(state: object, bucket: object) -> torch.futures.Future[torch.Tensor]:
        raise AssertionError

    ignored = train(source, strategy=strategy(ddp_comm_hook=never))  # of which the document warns
    ignored.assert_like(plain)

    pausing = train(documents.after(turns))
    pausing.assert_like(plain)
    assert (pausing.turns, sum(pausing.inside_turns(training=True))) == (8, 6)
    assert not any(pausing.inside_turns(training=False))
    assert pausing.has_left


def train(source: str, run: Run | None = None, **options: Any) -> Run:
    module, run, loader = Module(), run or Run(), batches()

    def trainer(**given: Any) -> Any:
        return made(**{**given, **options})

    made = PACKAGE.Trainer
    with watched(module.network, run), patch.object(PACKAGE, "Trainer", trainer):
        path = next(Path("first").rglob("*.ckpt"), None)
        names = {"model": module, "train_loader": loader, "val_loader": loader, "path": path}
        shown(source, names)
    return run

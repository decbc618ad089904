"""Other people's loops with virtual ranks: the diffs of docs/loops.md, and a loop by hand.

    loops_virtual.py LOOP DIRECTORY FIRST_EPOCH EPOCHS

LOOP is the name of a function below. It trains from epoch FIRST_EPOCH to EPOCHS, on as many ranks as
there are, and resumes the checkpoint in DIRECTORY unless FIRST_EPOCH is 0. Rank 0 prints a hash of the
losses, and another one of parameters and buffers.
"""

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.data import TensorDataset

import crossover_ddp
from crossover_ddp import VirtualRanks, reduce_scatter_all_gather_hook
from tests.harness import documents
from tests.recipes.loops_common import WIDTH, diffs, sgd, shown
from tests.virtual.jobs import hash_of

COUNT = 4
EPOCHS = 2


def network() -> nn.Sequential:
    """Return a network whose outputs in training depend on random numbers and on buffers."""
    torch.manual_seed(3)
    return nn.Sequential(
        spectral_norm(nn.Linear(WIDTH, WIDTH)),
        nn.BatchNorm1d(WIDTH),
        nn.Tanh(),
        nn.Dropout(0.2),
        nn.Linear(WIDTH, 3),
    )


def samples() -> TensorDataset:
    """Return 48 samples: for four virtual ranks and batches of 4, an epoch has three steps."""
    made = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(48, WIDTH, generator=made), torch.randint(3, (48,), generator=made)
    )


class Job:
    """A training from one epoch to another."""

    def __init__(self, directory: Path, first_epoch: int, epochs: int) -> None:
        self.directory = directory
        self.first_epoch = first_epoch
        self.epochs = epochs
        self.network = network()
        self.optimizer = sgd(self.network)
        self.ranks: list[VirtualRanks] = []

    def names(self) -> dict[str, Any]:
        """Return the names that the document's lines use."""
        return {
            "count": COUNT,
            "world_size": int(os.environ["WORLD_SIZE"]),
            "dataset": samples(),
            "model": self.network,
            "optimizer": self.optimizer,
            "loss_function": self.loss,
            "first_epoch": self.first_epoch,
            "epochs": self.epochs,
            "resume": self.first_epoch > 0,
            "path": self.directory / "checkpoint",
        }

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        loss = functional.cross_entropy(outputs, labels)
        self.ranks[0].report(loss)
        return loss

    def note(self, *arguments: Any, **options: Any) -> VirtualRanks:
        """Create the virtual ranks of the document's lines, and keep them."""
        self.ranks.append(VirtualRanks(*arguments, **options))
        return self.ranks[-1]

    def print_hashes(self) -> None:
        (ranks,) = self.ranks
        losses = ranks.losses()
        steps = 3 * (self.epochs - self.first_epoch)
        assert ranks.step == 3 * self.epochs
        assert len(losses) == COUNT * steps
        if dist.get_rank() == 0:
            by_epoch = zip(*[iter(losses)] * COUNT * 3, strict=True)
            print(f"\nlosses {' '.join(map(hash_of, by_epoch))}", flush=True)
            print(f"weights {hash_of(self.network.state_dict())}", flush=True)


def by_hand(job: Job) -> None:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(job.network)
    model.register_comm_hook(None, reduce_scatter_all_gather_hook)
    ranks = job.note(model, COUNT)
    loader = ranks.loader(samples(), batch_size=4)
    for _ in range(job.epochs):
        for inputs, labels in ranks.micro_batches(loader):
            job.loss(model(inputs), labels).backward()
            if ranks.is_step_end:
                job.optimizer.step()
                job.optimizer.zero_grad()


def run(job: Job, heading: str) -> None:
    """Execute the document's lines under a heading."""
    (diff,) = diffs(heading)
    with patch.object(crossover_ddp, "VirtualRanks", job.note):
        shown(documents.after(diff), job.names())


def fabric(job: Job) -> None:
    run(job, "In Fabric")


def accelerate(job: Job) -> None:
    run(job, "In Accelerate")


def lightning(job: Job, *, is_manual: bool = False) -> None:
    from tests.recipes.loops_lightning import PACKAGE

    class Module(PACKAGE.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = not is_manual
            self.network = job.network

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return job.optimizer

        def training_step(self, batch: list[Tensor], _: int) -> Tensor | None:
            loss = job.loss(self.network(batch[0]), batch[1])
            if not is_manual:
                return loss
            self.manual_backward(loss)
            if job.ranks[0].is_step_end:
                self.optimizers().step()
                self.optimizers().zero_grad()
            return None

    (diff,) = diffs("In Lightning's Trainer")
    source = documents.after(diff)
    accumulates = "accumulate_grad_batches=count // world_size,"
    assert accumulates in source
    if is_manual:
        source = source.replace(accumulates, "")
    options = {"default_root_dir": job.directory, "enable_progress_bar": False}
    path = next(job.directory.rglob("*.ckpt"), None)
    with (
        patch.object(PACKAGE, "Trainer", partial(PACKAGE.Trainer, **options)),
        patch.object(crossover_ddp, "VirtualRanks", job.note),
    ):
        shown(source, {**job.names(), "model": Module(), "path": path})


def manual(job: Job) -> None:
    lightning(job, is_manual=True)


LOOPS: dict[str, Callable[[Job], None]] = {
    each.__name__: each for each in (by_hand, fabric, accelerate, lightning, manual)
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    loop, directory, first, last = sys.argv[1:]
    job = Job(Path(directory), int(first), int(last))
    LOOPS[loop](job)
    job.print_hashes()
    dist.destroy_process_group()

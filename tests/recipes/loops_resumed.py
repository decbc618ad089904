"""One rank of somebody's loop that is killed in the middle of an epoch, or goes on: the diffs of docs/loops.md.

    loops_resumed.py LOOP PHASE DIRECTORY

LOOP is the name of a function below. "killed": trains to the end, with plain DDP, too, where the hook has its bits, and
then again, until this process is killed in the second epoch. "resumed": goes on from what the second run has saved.
Writes DIRECTORY/PHASE-RANK.pt: the losses of each run, by its name.
"""

import argparse
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from crossover_ddp import DecoupledState, LocalSGDState, local_sgd_hook
from tests.harness import documents
from tests.harness.waiting import eventually
from tests.recipes.loops_common import diffs, network, samples, sgd, shown, square

STEPS = 4  # of each rank in an epoch
KILLED_IN = STEPS + 2


class Loss:
    """Notes the losses of a run, and kills all processes when the one of step ``killed_in`` is known to all."""

    def __init__(self, directory: Path, killed_in: int | None) -> None:
        self.values: list[float] = []
        self._directory, self._killed_in = directory, killed_in

    def __call__(self, output: torch.Tensor) -> torch.Tensor:
        loss = square(output)
        self.values.append(loss.item())
        if len(self.values) == self._killed_in:
            (self._directory / f"killed-{os.environ['RANK']}").touch()
            assert eventually(lambda: len([*self._directory.glob("killed-*")]) == 2)
            os.kill(os.getpid(), signal.SIGKILL)
        return loss


Train = Callable[[Loss, Path, bool, bool], None]
"""Takes the loss function, where to save, whether to resume from there, and whether to train with the hook."""


def train(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any, loss: Loss) -> None:
    for (inputs,) in loader:
        loss(model(inputs + dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()


def batches() -> DataLoader[Any]:
    return DataLoader(samples(), batch_size=32 // STEPS)


IMAGENET = """
def main_worker(args):
    if args.resume:
        if os.path.isfile(args.path):
            checkpoint = torch.load(args.path)
            args.start_epoch = checkpoint['epoch']
            model.load_state_dict(checkpoint['state_dict'])
            optimizer.load_state_dict(checkpoint['optimizer'])
            scheduler.load_state_dict(checkpoint['scheduler'])
    for epoch in range(args.start_epoch, 3):
        train(model, optimizer, loader, loss)

        scheduler.step()

        if args.rank == 0:
            save_checkpoint({
                'epoch': epoch + 1,
                'state_dict': model.state_dict(),
                'optimizer' : optimizer.state_dict(),
                'scheduler' : scheduler.state_dict()
            }, args.path)

main_worker(args)
"""


def imagenet(loss: Loss, directory: Path, resume: bool, hooked: bool) -> None:
    """In the order of main.py, with its names."""
    model = DistributedDataParallel(network())
    optimizer = sgd(model)
    state = LocalSGDState(
        3, delay=1, outer_optimizer=partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
    )
    model.register_comm_hook(state, local_sgd_hook)
    path, rank = directory / "checkpoint.pth.tar", dist.get_rank()
    names = {
        "args": argparse.Namespace(resume=resume, path=path, start_epoch=0, rank=rank),
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5),
        "state": state,
        "loader": batches(),
        "train": train,
        "loss": loss,
        "save_checkpoint": torch.save,
        "torch": torch,
        "os": os,
    }
    (diff,) = diffs("imagenet's main.py")
    shown(documents.patched(IMAGENET, diff), names)


TIMM = """
def main(start_epoch):
    if True:
        task.prepare_distributed(...)
    if start_epoch > 0:
        scheduler.step(start_epoch)
    try:
        for epoch in range(start_epoch, 3):
            train_one_epoch(epoch)
            scheduler.step(epoch + 1)
            if saver is not None:
                saver.save_checkpoint(epoch)
    except KeyboardInterrupt:
        pass

main(start_epoch)
"""


def timm(loss: Loss, directory: Path, resume: bool, hooked: bool) -> None:
    """``--opt muon`` under owners, saved and resumed by timm's own functions."""
    from timm.models import VisionTransformer, resume_checkpoint
    from timm.optim import create_optimizer_v2
    from timm.scheduler import create_scheduler_v2
    from timm.utils import CheckpointSaver

    torch.manual_seed(3)
    shape = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2, "num_classes": 4}
    vit = VisionTransformer(**shape)
    optimizer = create_optimizer_v2(vit, opt="muon", lr=0.01)
    last, start_epoch = directory / "last.pth.tar", 0
    if resume:
        start_epoch = resume_checkpoint(vit, str(last), optimizer, weights_only=False)
    model = DistributedDataParallel(vit, **DecoupledState.ddp_options(vit))

    def train_one_epoch(epoch: int) -> None:
        for step in range(STEPS):
            torch.manual_seed(100 * epoch + 10 * step + dist.get_rank())
            loss(model(torch.randn(2, 3, 8, 8))).backward()
            optimizer.step()
            optimizer.zero_grad()

    saver = CheckpointSaver(model, optimizer, checkpoint_dir=str(directory)) if dist.get_rank() == 0 else None
    names = {
        "start_epoch": start_epoch,
        "train_one_epoch": train_one_epoch,
        "scheduler": create_scheduler_v2(optimizer, "cosine", num_epochs=3)[0],
        "saver": saver,
        "optimizer": optimizer,
        "task": SimpleNamespace(prepare_distributed=lambda _: model, get_trainable_module=lambda: model),
    }
    (diff,) = diffs("timm's Muon")
    shown(documents.patched(TIMM, diff) if hooked else TIMM, names)


def lightning(loss: Loss, directory: Path, resume: bool, hooked: bool) -> None:
    import pytorch_lightning

    from tests.recipes.loops_lightning import Module

    class Noting(Module):
        def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
            return loss(self.network(batch[0]))

    (diff,) = diffs("Lightning's checkpoints")
    source = documents.after(diff)
    path = None
    if resume:
        (path,) = directory.rglob("*.ckpt")
        source = source.replace("val_loader)", "val_loader, ckpt_path=path)")
    options = {"default_root_dir": directory, "enable_progress_bar": False}
    loader = DataLoader(samples(), batch_size=4)
    with patch.object(pytorch_lightning, "Trainer", partial(pytorch_lightning.Trainer, **options)):
        shown(source, {"model": Noting(), "train_loader": loader, "val_loader": loader, "path": path})


def accelerate(loss: Loss, directory: Path, resume: bool, hooked: bool) -> None:
    model = network()
    names = {
        "model": model,
        "optimizer": sgd(model),
        "loader": DataLoader(samples(), batch_size=4),
        "loss_function": loss,
        "resume": resume,
        "path": directory,
        "first_epoch": int(resume),
    }
    (diff,) = diffs("Accelerate's save_state")
    shown(documents.after(diff), names)


def distributed_checkpoint(loss: Loss, directory: Path, resume: bool, hooked: bool) -> None:
    model = DistributedDataParallel(network(), gradient_as_bucket_view=True)
    names = {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01),
        "loader": batches(),
        "train": partial(train, loss=loss),
        "resume": resume,
        "path": directory,
        "first_epoch": int(resume),
    }
    (diff,) = diffs("torch.distributed.checkpoint")
    shown(documents.after(diff) if hooked else documents.before(diff), names)


LOOPS: dict[str, Train] = {
    each.__name__: each for each in (imagenet, timm, lightning, accelerate, distributed_checkpoint)
}
WITH_PLAIN = ("timm", "distributed_checkpoint")
OWN_GROUP = ("accelerate",)  # made by the loop itself


def main(loop: str, phase: str, directory: Path) -> None:
    losses = {}

    def run(name: str, where: str, *, resume: bool = False, killed_in: int | None = None) -> None:
        (directory / where).mkdir(exist_ok=True)
        loss = Loss(directory / where, killed_in)
        LOOPS[loop](loss, directory / where, resume, name != "plain")
        losses[name] = loss.values
        torch.save(losses, directory / f"{phase}-{os.environ['RANK']}.pt")

    if loop not in OWN_GROUP:
        dist.init_process_group("gloo")
    if phase == "resumed":
        run("resumed", "killed", resume=True)
    else:
        if loop in WITH_PLAIN:
            run("plain", "plain")
        run("whole", "whole")
        run("killed", "killed", killed_in=KILLED_IN)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))

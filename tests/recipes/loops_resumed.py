"""Loops that are killed in the middle of an epoch, and resumed, with the diffs of docs/loops.md.

See loops_worker.py.
"""

import argparse
import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp import LocalSGDState, local_sgd_hook
from tests.harness import documents
from tests.recipes import loops_one_job
from tests.recipes.loops_common import (
    STEPS,
    Job,
    Run,
    batches,
    deferring,
    diffs,
    network,
    sgd,
    shown,
    train,
    watched,
)

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
        train(model, optimizer, loader)

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


def imagenet(job: Job) -> None:
    model = DistributedDataParallel(network())
    optimizer = sgd(model)
    state = LocalSGDState(
        3, delay=1, outer_optimizer=partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
    )
    model.register_comm_hook(state, local_sgd_hook)
    path, rank = job.directory / "checkpoint.pth.tar", dist.get_rank()
    names = {
        "args": argparse.Namespace(resume=job.resume, path=path, start_epoch=0, rank=rank),
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5),
        "state": state,
        "loader": batches(8),
        "train": partial(train, loss=job.loss),
        "save_checkpoint": torch.save,
        "torch": torch,
        "os": os,
    }
    (diff,) = diffs("imagenet's main.py")
    shown(documents.patched(IMAGENET, diff), names)


TIMM = """
def main(start_epoch):
    if True:
        task.prepare_distributed(device_ids=[device], broadcast_buffers=not args.no_ddp_bb)
    if start_epoch > 0:
        scheduler.step(start_epoch)
    try:
        for epoch in range(start_epoch, 3):
            train_one_epoch(epoch)
            validate(task.get_trainable_module())
            scheduler.step(epoch + 1)
            if saver is not None:
                saver.save_checkpoint(epoch)
    except KeyboardInterrupt:
        pass

main(start_epoch)
"""


def timm(job: Job) -> None:
    (diff,) = diffs("timm's Muon")
    run_timm(job, "" if job.name == "plain" else diff)


def run_timm(job: Job, diff: str, opt: str = "muon") -> Run:
    """Train in timm's task, whose average follows AdamW. Timm's functions save and resume it."""
    from timm.models import VisionTransformer, resume_checkpoint
    from timm.optim import create_optimizer_v2
    from timm.scheduler import create_scheduler_v2
    from timm.task import ClassificationTask
    from timm.utils import CheckpointSaver

    torch.manual_seed(3)
    shape = {
        "img_size": 8,
        "patch_size": 4,
        "embed_dim": 16,
        "depth": 1,
        "num_heads": 2,
        "num_classes": 4,
    }
    vit = VisionTransformer(**shape)
    task = ClassificationTask(vit, nn.CrossEntropyLoss(), device=torch.device("cpu"), verbose=False)
    optimizer = create_optimizer_v2(vit, opt=opt, lr=0.01)
    if opt != "muon":
        task.setup_ema(decay=0.9)
    start_epoch, directory = 0, str(job.directory)
    if job.resume:
        start_epoch = resume_checkpoint(
            vit, f"{directory}/last.pth.tar", optimizer, weights_only=False
        )

    def train_one_epoch(epoch: int) -> None:
        for step in range(STEPS):
            torch.manual_seed(100 * epoch + 10 * step + dist.get_rank())
            job.loss(task.get_trainable_module()(torch.randn(2, 3, 8, 8))).backward()
            optimizer.step()
            optimizer.zero_grad()
            task.update_ema(step=epoch * STEPS + step)

    def validate(model: nn.Module) -> None:
        with torch.inference_mode():
            model.eval()(torch.ones(1, 3, 8, 8))
        model.train()

    names = {
        "start_epoch": start_epoch,
        "args": argparse.Namespace(no_ddp_bb=False, model_ema=task.has_ema()),
        "device": None,
        "model": vit,
        "train_one_epoch": train_one_epoch,
        "validate": validate,
        "scheduler": create_scheduler_v2(optimizer, "cosine", num_epochs=3)[0],
        "saver": None
        if dist.get_rank()
        else CheckpointSaver(vit, optimizer, checkpoint_dir=directory),
        "optimizer": optimizer,
        "task": SimpleNamespace(
            prepare_distributed=lambda device_ids, **ddp: task.prepare_distributed(**ddp),
            get_trainable_module=task.get_trainable_module,
        ),
    }
    run = Run()
    with watched(vit, run):
        shown(documents.patched(TIMM, diff), names)
        if task.has_ema():
            average = task.get_trainable_module(ema=True)
            run.weights += [each.clone() for each in average.state_dict().values()]
    return run


def lightning(job: Job) -> None:
    from tests.recipes.loops_lightning import PACKAGE, Module

    (diff,) = diffs("Lightning's checkpoints")
    source = documents.after(diff)
    if job.resume:
        source = source.replace("val_loader)", "val_loader, ckpt_path=path)")
    options = {"default_root_dir": job.directory, "enable_progress_bar": False}
    loader, path = batches(), next(job.directory.rglob("*.ckpt"), None)
    with patch.object(PACKAGE, "Trainer", partial(PACKAGE.Trainer, **options)):
        shown(
            source,
            {"model": Module(job.loss), "train_loader": loader, "val_loader": loader, "path": path},
        )


def fabric(job: Job) -> None:
    model = network()
    shifted = [(inputs + int(os.environ["RANK"]),) for (inputs,) in batches(8)]
    names = {
        "model": model,
        "optimizer": sgd(model),
        "loader": shifted,
        "loss_function": job.loss,
        "path": job.directory / "checkpoint.pt",
    }
    run = Run()
    with deferring(run):
        job.run("Fabric", names)
    assert job.name == "plain" or run.deferred > 0


def accelerate(job: Job) -> None:
    model = network()
    names = {
        "model": model,
        "optimizer": sgd(model),
        "loader": batches(),
        "loss_function": job.loss,
    }
    job.run("Accelerate's save_state", names)


def distributed_checkpoint(job: Job) -> None:
    model = DistributedDataParallel(network(), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    names = {"model": model, "optimizer": optimizer, "loader": batches(8)}
    job.run("torch.distributed.checkpoint", {**names, "train": partial(train, loss=job.loss)})


def torchvision(job: Job) -> None:
    (diff,) = diffs("torchvision's references")
    with deferring():
        loops_one_job.torchvision(job, "" if job.name == "plain" else diff)


def nanogpt(job: Job) -> None:
    source = documents.patched(loops_one_job.NANOGPT, diffs("nanoGPT")[2])
    loops_one_job.nanogpt(
        job, loops_one_job.without_hook(source) if job.name == "plain" else source
    )


LOOPS = {
    each.__name__: each
    for each in (
        imagenet,
        timm,
        lightning,
        fabric,
        accelerate,
        distributed_checkpoint,
        torchvision,
        nanogpt,
    )
}
WITH_PLAIN = ("timm", "distributed_checkpoint", "torchvision", "nanogpt", "fabric")
OWN_GROUP = ("accelerate", "fabric")  # made by the loop itself


def run(loop: str, phase: str, directory: Path) -> None:
    """Train the jobs of a phase. Write their losses, by name, to DIRECTORY/PHASE-RANK.pt."""
    if loop not in OWN_GROUP and not dist.is_initialized():
        dist.init_process_group("gloo")
    losses = {}
    first = ["plain", "whole", "killed"] if loop in WITH_PLAIN else ["whole", "killed"]
    for name in ["resumed"] if phase == "resumed" else first:
        job = Job(name, directory / ("killed" if name == "resumed" else name))
        job.directory.mkdir(exist_ok=True)
        LOOPS[loop](job)
        losses[name] = job.losses
        torch.save(losses, directory / f"{phase}-{os.environ['RANK']}.pt")

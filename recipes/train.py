"""Train an image or language model with DistributedDataParallel, under torchrun.

    torchrun --nproc-per-node 2 recipes/train.py --model timm:resnet18 --hook crossover
    torchrun --nproc-per-node 2 recipes/train.py --model gpt --optimizer adamw --steps 200

Without ``--data-dir`` it trains on scikit-learn's scanned digits (the GPT on Python's help topics).
This package adds one line: ``model.register_comm_hook(state, hook)``.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import _data
import _models
from _hooks import HOOKS
from _job import count_steps, join_the_job, learning_rate, leave_the_job, make_optimizers, say
from _options import parse_arguments
from crossover_ddp import DecoupledState, ElasticState, LocalSGDState
from lab.meter import StepMeter, configuration, fingerprint, log_path


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv, HOOKS, __doc__)
    device = join_the_job(args)
    data = _data.load_data(args, args.data_dir, args.seed)
    torch.manual_seed(args.seed)
    network = _models.make(args, data.classes).to(device)
    options: dict[str, Any] = {"gradient_as_bucket_view": True, "bucket_cap_mb": args.bucket_cap_mb}
    if args.hook == "decoupled" and args.bucket_cap_mb is None:
        options = DecoupledState.ddp_options(network)
    model = DistributedDataParallel(network, **options)
    optimizers = make_optimizers(args, model)
    state = None
    if args.hook != "none":
        state, hook = HOOKS[args.hook](model, optimizers, args)
        model.register_comm_hook(state, hook)  # the one line

    meter = StepMeter(log_path(args.log_json, dist.get_rank()))
    meter.start(**configuration(model, args))
    try:
        train(TrainingJob(args, device, model, optimizers, data, state, meter))
    finally:
        meter.flush()
    leave_the_job()


class TrainingJob(NamedTuple):
    """The arguments of the functions below."""

    args: argparse.Namespace
    device: torch.device
    model: DistributedDataParallel
    optimizers: list[torch.optim.Optimizer]
    data: _data.Data
    hook_state: Any
    meter: StepMeter


def train(job: TrainingJob) -> None:
    """Train to the end, with evaluations and checkpoints."""
    args, sampler = job.args, _data.sampler_of(job.data.train, job.args.seed)
    per_epoch = count_steps(args, len(sampler))
    total = args.steps or args.epochs * per_epoch
    first = step = load_checkpoint(job) if args.resume else 0
    last = min(total, first + args.stop_after) if args.stop_after else total
    began_s = time.monotonic()
    while step < last:
        epoch, done = divmod(step, per_epoch)
        batches = _data.epoch_batches(
            job.data.train,
            sampler,
            epoch=epoch,
            batch_size=args.batch_size,
            skip=done * args.accumulate,
            workers=args.workers,
            pin=job.device.type == "cuda",
        )
        for _ in range(min(per_epoch - done, last - step)):
            loss = train_step(job, batches, step, total)
            if step % args.log_every == 0:  # reading a loss makes the host wait for the GPU
                say(f"step {step} of {total}: loss {loss.item():.4f}")
            step += 1
            if step == last or step % (args.checkpoint_every or per_epoch) == 0:
                save_checkpoint(job, step)
        if args.eval_every and (step == total or (epoch + 1) % args.eval_every == 0):
            evaluate(job, epoch)
    if isinstance(job.hook_state, ElasticState | LocalSGDState):
        job.hook_state.average()  # one model again
        job.hook_state.close()
    sha256, wall_s = fingerprint(job.model.module), time.monotonic() - began_s
    job.meter.event("end", steps=step, wall_s=wall_s, parameters_sha256=sha256)
    say(f"{step} steps, {wall_s:.1f} s, parameters sha256 {sha256}")


def train_step(
    job: TrainingJob, batches: Iterator[_data.Batch], step: int, total: int
) -> torch.Tensor:
    """Make one optimizer step over ``--accumulate`` batches. Return this rank's mean loss."""
    args, device = job.args, job.device
    job.meter.begin_step()
    # The seed of dropout depends on step and rank, so checkpoints need no random state.
    torch.manual_seed((args.seed * 1_000_003 + step) * dist.get_world_size() + dist.get_rank())
    lr = learning_rate(args, step, total)
    for optimizer in job.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr
    mean_loss = torch.zeros((), device=device)
    for part in range(args.accumulate):
        inputs, targets = (tensor.to(device, non_blocking=True) for tensor in next(batches))
        # Gradients are exchanged once per step: with the last batch, not with those before it.
        is_last = part == args.accumulate - 1
        with nullcontext() if is_last else job.model.no_sync():
            with torch.autocast(device.type, torch.bfloat16, enabled=args.amp):
                loss = _models.loss_of(job.model(inputs), targets) / args.accumulate
            loss.backward()
        mean_loss += loss.detach()
    for optimizer in job.optimizers:
        optimizer.step()
        optimizer.zero_grad()
    job.meter.end_step(step, mean_loss, lr)
    return mean_loss


@torch.no_grad()
def evaluate(job: TrainingJob, epoch: int) -> None:
    """Measure loss and accuracy. Each rank evaluates a part of the test set.

    If ranks have different parameters, as with averaging hooks, their mean is evaluated.
    """
    totals = torch.zeros(3, dtype=torch.float64, device=job.device)
    with within(job.hook_state, "averaged"), within(job.hook_state, "paused"):
        network = job.model.module.eval()
        # Each rank has its own batch statistics. From here on all use those of rank 0.
        for buffer in network.buffers():
            dist.broadcast(buffer, 0)
        for batch in _data.test_batches(job.data.test, batch_size=job.args.batch_size):
            inputs, targets = (tensor.to(job.device) for tensor in batch)
            with torch.autocast(job.device.type, torch.bfloat16, enabled=job.args.amp):
                outputs = network(inputs)
                loss = _models.loss_of(outputs, targets)
            totals[0] += loss * targets.numel()
            totals[1] += (outputs.argmax(-1) == targets).sum()
            totals[2] += targets.numel()
        dist.all_reduce(totals)
        network.train()
    loss, accuracy = (totals[:2] / totals[2]).tolist()
    job.meter.event("eval", epoch=epoch, accuracy=accuracy, loss=loss)
    say(f"epoch {epoch}: accuracy {accuracy:.4f}, loss {loss:.4f}")


def save_checkpoint(job: TrainingJob, step: int) -> None:
    """Write the state after ``step`` steps, on rank 0. A crash leaves the previous file intact."""
    if job.args.checkpoint is None:
        return
    with within(job.hook_state, "paused"):
        if hasattr(job.hook_state, "checkpoint"):
            state = job.hook_state.checkpoint(job.optimizers, to=0)  # a collective call
        else:
            kept = [optimizer.state_dict() for optimizer in job.optimizers]
            state = {"model": job.model.module.state_dict(), "optimizer": kept}
        if dist.get_rank() == 0:
            unfinished = job.args.checkpoint.with_suffix(".unfinished")
            torch.save({"step": step, **state}, unfinished)
            os.replace(unfinished, job.args.checkpoint)


def load_checkpoint(job: TrainingJob) -> int:
    """Continue from ``--checkpoint`` if it exists. Return how many steps are done.

    Without a file training starts at step 0, so that a batch system can repeat the same command.
    Rank 0 reads the file for all ranks, so that the nodes need no common directory.
    """
    found: list[dict[str, Any] | None] = [None]
    if dist.get_rank() == 0 and job.args.checkpoint.exists():
        found[0] = torch.load(job.args.checkpoint, map_location="cpu", weights_only=True)
    dist.broadcast_object_list(found, 0)
    state = found[0]
    if state is None:
        return 0
    if hasattr(job.hook_state, "restore"):
        job.hook_state.restore(state, job.optimizers)
    else:
        job.model.module.load_state_dict(state["model"])
        for optimizer, saved in zip(job.optimizers, state["optimizer"], strict=True):
            optimizer.load_state_dict(saved)
    return int(state["step"])


def within(hook_state: object, name: str) -> AbstractContextManager[object]:
    """Return a context of the hook's state, or one that does nothing if the state has no such.

    In "averaged" all ranks have the mean of their parameters. In "paused" a sibling may compute.
    """
    context: Callable[[], AbstractContextManager[object]] = getattr(hook_state, name, nullcontext)
    return context()


if __name__ == "__main__":
    main()

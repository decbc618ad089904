"""Train an image or language model with DistributedDataParallel, under torchrun.

    torchrun --nproc-per-node 2 recipes/train.py --model timm:resnet18 --hook crossover
    torchrun --nproc-per-node 2 recipes/train.py --model gpt --optimizer adamw --steps 200

Without ``--data-dir`` it trains on scikit-learn's scanned digits (the GPT on Python's help topics).
What this package adds is one line: ``model.register_comm_hook(state, hook)``.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

import _data
import _models
from _meter import StepMeter, default_log_path
from crossover_ddp.comm_hooks import (
    CrossoverState,
    DecoupledState,
    crossover_hook,
    decoupled_hook,
    reduce_scatter_all_gather_hook,
)
from crossover_ddp.kfac_hooks import KFACState, kfac_hook

Hook = Callable[[Any, Any], torch.futures.Future[torch.Tensor]]
MakeState = Callable[[nn.Module, torch.optim.Optimizer, argparse.Namespace], tuple[object, Hook]]
LEARNING_RATES = {"sgd": 0.05, "adamw": 1e-3}

# Every hook with the state that it works on.
HOOKS: dict[str, MakeState] = {
    "allreduce": lambda model, optimizer, args: (None, allreduce_hook),
    "rsag": lambda model, optimizer, args: (None, reduce_scatter_all_gather_hook),
    "crossover": lambda model, optimizer, args: (CrossoverState(), crossover_hook),
    "decoupled": lambda model, optimizer, args: (DecoupledState(optimizer), decoupled_hook),
    "kfac": lambda model, optimizer, args: (
        KFACState(
            model,
            optimizer,
            damping=args.damping,
            kl_clip=args.kl_clip or None,
            factor_update_steps=args.factor_update_steps,
            inv_update_steps=args.inv_update_steps,
            factors=args.factors,
        ),
        kfac_hook,
    ),
}
FINEST_BUCKETS = 48
PLANNING_STEPS = 12


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    device = join_the_job(args)
    data = load_data(args)
    buckets = {"bucket_cap_mb": args.bucket_cap_mb}
    if args.bucket_cap_mb == "auto":
        buckets = plan_buckets(args, device, data)
    torch.manual_seed(args.seed)
    model = DistributedDataParallel(
        make_model(args, data).to(device), gradient_as_bucket_view=True, **buckets
    )
    optimizer = make_optimizer(args, model)
    state = None
    if args.hook != "none":
        state, hook = HOOKS[args.hook](model, optimizer, args)
        model.register_comm_hook(state, hook)  # the one line

    meter = StepMeter(log_path(args))
    job = Job(args, device, model, optimizer, data, state, meter)
    meter.start(**describe(job))
    try:
        train(job)
    finally:
        meter.close()
    leave_the_job()


class Job(NamedTuple):
    """Everything that the functions below work on."""

    args: argparse.Namespace
    device: torch.device
    model: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    data: _data.Data
    hook_state: object
    meter: StepMeter


def train(job: Job) -> None:
    """Train to the end, evaluating after epochs and saving now and then."""
    args = job.args
    sampler: DistributedSampler[Any] = DistributedSampler(
        job.data.train,  # type: ignore[arg-type]  # a Dataset by its methods, not by inheritance
        seed=args.seed,
        drop_last=True,
    )
    steps_per_epoch = count_steps(args, sampler)
    total = args.steps or args.epochs * steps_per_epoch
    first = step = load_checkpoint(job) if args.resume else 0
    last = min(total, first + args.stop_after) if args.stop_after else total
    began_s = time.monotonic()
    with progress(args, total) as report:
        while step < last:
            epoch, done = divmod(step, steps_per_epoch)
            batches = _data.epoch_batches(
                job.data.train,
                sampler,
                epoch=epoch,
                batch_size=args.batch_size,
                skip=done * args.accumulate,
                workers=args.workers,
                pin=job.device.type == "cuda",
            )
            for _ in range(min(steps_per_epoch - done, last - step)):
                report(step, train_step(job, batches, step, total))
                step += 1
                if step == last or step % (args.checkpoint_every or steps_per_epoch) == 0:
                    save_checkpoint(job, step)
            if is_evaluation_due(args, epoch, step, total):
                report(step, evaluate(job, epoch))
    finish(job, step, time.monotonic() - began_s)


def train_step(job: Job, batches: Iterator[_data.Batch], step: int, total: int) -> torch.Tensor:
    """Do one optimizer step over ``--accumulate`` batches; return this rank's mean loss."""
    args, device = job.args, job.device
    job.meter.begin_step()
    # Seeded by step and rank, dropout needs no random state in the checkpoint to resume exactly.
    torch.manual_seed((args.seed * 1_000_003 + step) * dist.get_world_size() + dist.get_rank())
    lr = learning_rate(args, step, total)
    for group in job.optimizer.param_groups:
        group["lr"] = lr
    mean_loss = torch.zeros((), device=device)
    for part in range(args.accumulate):
        inputs, targets = (tensor.to(device, non_blocking=True) for tensor in next(batches))
        # Gradients are exchanged once per step: with the last batch, not with those before it.
        is_last = part == args.accumulate - 1
        with contextlib.nullcontext() if is_last else job.model.no_sync():
            with autocast(job):
                loss = _models.loss_of(job.model(inputs), targets) / args.accumulate
            loss.backward()
        mean_loss += loss.detach()
    job.optimizer.step()
    job.optimizer.zero_grad()
    job.meter.end_step(step, mean_loss, lr)
    return mean_loss


@torch.no_grad()
def evaluate(job: Job, epoch: int) -> str:
    """Measure loss and accuracy on the test set, every rank on its share of it."""
    network = job.model.module.eval()
    # Each rank has batch statistics of its own; training goes on with those of rank 0.
    for buffer in network.buffers():
        dist.broadcast(buffer, 0)
    totals = torch.zeros(3, dtype=torch.float64, device=job.device)
    with turn_given_away(job.hook_state):
        for batch in _data.test_batches(job.data.test, batch_size=job.args.batch_size):
            inputs, targets = (tensor.to(job.device) for tensor in batch)
            with autocast(job):
                outputs = network(inputs)
                loss = _models.loss_of(outputs, targets)
            totals[0] += loss * targets.numel()
            totals[1] += (outputs.argmax(-1) == targets).sum()
            totals[2] += targets.numel()
        dist.all_reduce(totals)
    network.train()
    loss, accuracy = (totals[:2] / totals[2]).tolist()
    job.meter.event("eval", epoch=epoch, accuracy=accuracy, loss=loss)
    return f"epoch {epoch}: accuracy {accuracy:.4f}, loss {loss:.4f}"


def save_checkpoint(job: Job, step: int) -> None:
    """Write the state after ``step`` steps, from rank 0; a crash leaves the previous file whole."""
    if job.args.checkpoint is None:
        return
    with turn_given_away(job.hook_state):
        # Each rank has the second-order state of its own layers: all must help to save it.
        kfac = job.hook_state.state_dict() if isinstance(job.hook_state, KFACState) else None
        if dist.get_rank() == 0:
            state = {
                "step": step,
                "model": job.model.module.state_dict(),
                "optimizer": job.optimizer.state_dict(),
                "kfac": kfac,
            }
            unfinished = job.args.checkpoint.with_suffix(".unfinished")
            torch.save(state, unfinished)
            os.replace(unfinished, job.args.checkpoint)


def load_checkpoint(job: Job) -> int:
    """Continue from ``--checkpoint`` if it is there; return how many steps are done.

    Starting afresh when there is no file lets a batch system repeat one and the same command. Rank 0
    reads for all, so that the nodes need no common directory.
    """
    found: list[dict[str, Any] | None] = [None]
    if dist.get_rank() == 0 and job.args.checkpoint.exists():
        found[0] = torch.load(job.args.checkpoint, map_location="cpu", weights_only=True)
    dist.broadcast_object_list(found, 0)
    state = found[0]
    if state is None:
        return 0
    job.model.module.load_state_dict(state["model"])
    job.optimizer.load_state_dict(state["optimizer"])
    if isinstance(job.hook_state, KFACState):
        job.hook_state.load_state_dict(state["kfac"])
    return int(state["step"])


def finish(job: Job, step: int, wall_s: float) -> None:
    """Log a fingerprint of the parameters: two runs did the same if and only if theirs are equal."""
    digest = hashlib.sha256()
    for name, parameter in job.model.module.named_parameters():
        digest.update(name.encode())
        digest.update(parameter.detach().cpu().reshape(-1).view(torch.uint8).numpy())
    job.meter.event("end", steps=step, wall_s=wall_s, parameters_sha256=digest.hexdigest())
    if dist.get_rank() == 0:
        print(f"{step} steps, {wall_s:.1f} s, parameters sha256 {digest.hexdigest()}", flush=True)


def learning_rate(args: argparse.Namespace, step: int, total: int) -> float:
    """Rise over the warm-up, then fall along a cosine: a function of the step has no state to save."""
    highest: float = LEARNING_RATES[args.optimizer] if args.lr is None else args.lr
    warmup: int = args.warmup_steps
    if step < warmup:
        return highest * (step + 1) / warmup
    share = (step - warmup) / max(1, total - warmup)
    return highest * 0.5 * (1.0 + math.cos(math.pi * share))


def make_optimizer(args: argparse.Namespace, model: nn.Module) -> torch.optim.Optimizer:
    lr = learning_rate(args, 0, 1)
    if args.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr, momentum=args.momentum, weight_decay=args.weight_decay)
    return torch.optim.AdamW(model.parameters(), lr, weight_decay=args.weight_decay)


def plan_buckets(args: argparse.Namespace, device: torch.device, data: _data.Data) -> dict[str, Any]:
    """Train a throw-away copy of the model for a few steps, and let the package choose the sizes of buckets."""
    network = make_model(args, data).to(device)
    size_mb = sum(each.numel() * each.element_size() for each in network.parameters()) / 2**20
    model = DistributedDataParallel(
        network, bucket_cap_mb=size_mb / FINEST_BUCKETS, gradient_as_bucket_view=True
    )
    optimizer = make_optimizer(args, model)
    state = DecoupledState(optimizer)
    model.register_comm_hook(state, decoupled_hook)
    sampler: DistributedSampler[Any] = DistributedSampler(data.train, drop_last=True)  # type: ignore[arg-type]
    batches = _data.epoch_batches(data.train, sampler, epoch=0, batch_size=args.batch_size)
    for _, (inputs, targets) in zip(range(PLANNING_STEPS), batches, strict=False):
        _models.loss_of(model(inputs.to(device)), targets.to(device)).backward()
        optimizer.step()
        optimizer.zero_grad()
    plan = state.plan_buckets()
    state.close()
    if dist.get_rank() == 0:
        print(
            f"{plan.buckets} buckets, the largest of {plan.bucket_cap_mb:.2f} MB: a step should take "
            f"{plan.step_s:.3f} s, and {plan.limit_s:.3f} s at the very least",
            flush=True,
        )
    return plan.ddp_options()


def load_data(args: argparse.Namespace) -> _data.Data:
    if args.model == _models.GPT:
        return _data.load_text(context=args.context, vocabulary=args.vocabulary)
    if args.data_dir is None:
        return _data.load_digits(image_size=args.image_size, channels=args.channels)
    return _data.load_folder(
        args.data_dir, image_size=args.image_size, channels=args.channels, seed=args.seed
    )


def make_model(args: argparse.Namespace, data: _data.Data) -> nn.Module:
    return _models.make_model(
        args.model,
        classes=data.classes,
        channels=args.channels,
        image_size=args.image_size,
        context=args.context,
        options=args.model_options,
    )


def join_the_job(args: argparse.Namespace) -> torch.device:
    """Set threads and determinism, choose the device, and join the other ranks."""
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it by this name
        torch.use_deterministic_algorithms(True)
    device, backend = torch.device("cpu"), "gloo"
    if args.device != "cpu" and torch.cuda.is_available():
        gpus = torch.cuda.device_count()
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % gpus)
        torch.cuda.set_device(device)
        # NCCL refuses two ranks of one job on one GPU; gloo does not mind.
        backend = "nccl" if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= gpus else "gloo"
    backend = args.backend or backend
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:  # started without torchrun: a job of one rank
        store = dist.HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    return device


def leave_the_job() -> None:
    """Leave the other ranks, without the abort at exit that gloo is prone to.

    Gloo's threads let go of the last backward's context a moment after the exchange is done. They need
    the interpreter for that, outlive the process group, and abort the process if Python is ending by
    then (https://github.com/pytorch/pytorch/pull/179291): so give them that moment.
    """
    if "gloo" in dist.get_backend():
        time.sleep(0.1)
    dist.destroy_process_group()


def count_steps(args: argparse.Namespace, sampler: DistributedSampler[Any]) -> int:
    steps: int = len(sampler) // (args.batch_size * args.accumulate)
    if steps == 0:
        raise ValueError(
            f"expected batch_size * accumulate <= the {len(sampler)} samples that each rank has, got "
            f"batch_size={args.batch_size}, accumulate={args.accumulate}; lower one of them"
        )
    return steps


def autocast(job: Job) -> torch.autocast:
    return torch.autocast(job.device.type, torch.bfloat16, enabled=job.args.amp)


def turn_given_away(hook_state: object) -> contextlib.AbstractContextManager[object]:
    """Let a sibling job compute meanwhile, if the hook shares the device with one."""
    paused: Callable[[], contextlib.AbstractContextManager[object]]
    paused = getattr(hook_state, "paused", contextlib.nullcontext)
    return paused()


def is_evaluation_due(args: argparse.Namespace, epoch: int, step: int, total: int) -> bool:
    """Evaluate after every so many epochs, and at the very end whether an epoch is full or not."""
    return bool(args.eval_every) and (step == total or (epoch + 1) % args.eval_every == 0)


def log_path(args: argparse.Namespace) -> Path | None:
    """One log per rank where the path has a place for it (``log{rank}.jsonl``), else rank 0's only."""
    if args.log_json is None:
        return default_log_path(dist.get_rank())
    if "{rank}" in args.log_json:
        return Path(args.log_json.format(rank=dist.get_rank()))
    return Path(args.log_json) if dist.get_rank() == 0 else None


def describe(job: Job) -> dict[str, Any]:
    parameters = [each for each in job.model.parameters() if each.requires_grad]
    return {
        "rank": dist.get_rank(),
        "world_size": dist.get_world_size(),
        "backend": dist.get_backend(),
        "device": str(job.device),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "parameters_numel": sum(each.numel() for each in parameters),
        "gradient_bytes": sum(each.numel() * each.element_size() for each in parameters),
        "arguments": vars(job.args),
    }


Report = Callable[[int, "torch.Tensor | str"], None]


@contextlib.contextmanager
def progress(args: argparse.Namespace, total: int) -> Iterator[Report]:
    """Offer a function that shows how far rank 0 is: a bar on a terminal, else a line now and then."""
    if dist.get_rank() != 0:
        yield lambda step, news: None
    elif sys.stdout.isatty():
        from rich.progress import Progress

        with Progress() as bar:
            task = bar.add_task("training", total=total)

            def show(step: int, news: torch.Tensor | str) -> None:
                if isinstance(news, str):
                    bar.console.print(news)
                elif (
                    step % args.log_every == 0 or step + 1 == total
                ):  # reading a loss makes the host wait for the GPU
                    bar.update(task, completed=step + 1, description=f"loss {news.item():.4f}")

            yield show
    else:
        yield lambda step, news: print_line(args, step, total, news)


def print_line(args: argparse.Namespace, step: int, total: int, news: torch.Tensor | str) -> None:
    if isinstance(news, str):
        print(news, flush=True)
    elif step % args.log_every == 0:
        print(f"step {step} of {total}: loss {news.item():.4f}", flush=True)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model_arguments(parser.add_argument_group("model and data"))
    add_training_arguments(parser.add_argument_group("training"))
    add_kfac_arguments(parser.add_argument_group("K-FAC, for --hook kfac"))
    add_run_arguments(parser.add_argument_group("devices, communication, files"))
    if preset := parser.parse_known_args(argv)[0].preset:
        parser.set_defaults(**vars(_models.PRESETS[preset]))  # what is also given explicitly wins
    args = parser.parse_args(argv)
    args.model_options = {**args.model_options, **dict(args.model_option)}
    for name in ("batch_size", "accumulate", "log_every"):
        if getattr(args, name) < 1:
            parser.error(f"expected {name} >= 1, got {name}={getattr(args, name)}")
    if args.resume and args.checkpoint is None:
        parser.error("expected --checkpoint PATH with --resume, got none; say where to resume from")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("expected a CUDA device, got none; leave --device out to train on the CPU")
    return args


def add_model_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--preset", choices=sorted(_models.PRESETS), help="defaults for measuring: see _models.py"
    )
    group.add_argument("--model", default="timm:resnet18", help="timm:NAME, torchvision:NAME, NAME, or gpt")
    group.add_argument(
        "--model-option",
        action="append",
        default=[],
        type=key_and_value,
        metavar="KEY=VALUE",
        help="given to the model's constructor, e.g. depth=6; may be repeated",
    )
    group.set_defaults(model_options={})
    group.add_argument("--data-dir", type=Path, help="images in train/CLASS and val/CLASS; default: digits")
    group.add_argument("--image-size", type=int, default=64, help="height and width in pixels (default 64)")
    group.add_argument("--channels", type=int, default=3, help="1 for grey images (default 3)")
    group.add_argument("--context", type=int, default=128, help="words per sample of the GPT (default 128)")
    group.add_argument("--vocabulary", type=int, default=2048, help="words the GPT knows (default 2048)")
    group.add_argument("--workers", type=int, default=0, help="processes that load data (default 0)")


def add_training_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--epochs", type=int, default=5, help="(default 5)")
    group.add_argument("--steps", type=int, help="optimizer steps in all, instead of --epochs")
    group.add_argument(
        "--batch-size", type=int, default=32, help="samples per rank and backward (default 32)"
    )
    group.add_argument("--accumulate", type=int, default=1, help="backwards per optimizer step (default 1)")
    group.add_argument("--optimizer", choices=("sgd", "adamw"), default="sgd", help="(default sgd)")
    group.add_argument(
        "--lr", type=float, help="highest learning rate (default 0.05 for sgd, 0.001 for adamw)"
    )
    group.add_argument("--momentum", type=float, default=0.9, help="of sgd (default 0.9)")
    group.add_argument("--weight-decay", type=float, default=1e-4, help="(default 0.0001)")
    group.add_argument("--warmup-steps", type=int, default=10, help="(default 10)")
    group.add_argument("--eval-every", type=int, default=1, help="epochs; 0 for never (default 1)")
    group.add_argument("--amp", action="store_true", help="compute in bfloat16 where that is safe")
    group.add_argument(
        "--seed", type=int, default=0, help="of weights, order of samples, dropout (default 0)"
    )
    group.add_argument("--deterministic", action="store_true", help="refuse operations that are not (GPU)")


def add_run_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--hook", choices=("none", *HOOKS), default="none", help="how gradients are exchanged")
    group.add_argument(
        "--bucket-cap-mb",
        type=cap_or_auto,
        help="size of DDP's buckets, or auto: measure and choose, for decoupled (default: DDP's own)",
    )
    group.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default auto)")
    group.add_argument("--backend", help="nccl or gloo (default: nccl if each rank has a GPU of its own)")
    group.add_argument("--threads", type=int, help="of torch on the CPU (default: torch's choice)")
    group.add_argument("--checkpoint", type=Path, help="file to save to, after every epoch and at the end")
    group.add_argument("--checkpoint-every", type=int, help="steps between checkpoints, instead of an epoch")
    group.add_argument("--resume", action="store_true", help="go on from --checkpoint if it is there")
    group.add_argument("--stop-after", type=int, help="stop after so many steps of this run, to be resumed")
    group.add_argument("--log-json", help="file for one JSON object per line; {rank} stands for the rank")
    group.add_argument("--log-every", type=int, default=10, help="steps per line of output (default 10)")


def add_kfac_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--damping", type=float, default=0.001, help="of the factors (default 0.001)")
    group.add_argument(
        "--kl-clip", type=float, default=0.001, help="bound of a step; 0 for none (default 0.001)"
    )
    group.add_argument(
        "--factor-update-steps", type=int, default=1, help="steps from factors to factors (default 1)"
    )
    group.add_argument(
        "--inv-update-steps", type=int, default=10, help="steps from solvers to solvers (default 10)"
    )
    group.add_argument(
        "--factors",
        choices=("global", "local"),
        default="global",
        help="of all ranks' data, or of the layer owner's alone, which costs no traffic (default global)",
    )


def cap_or_auto(text: str) -> float | str:
    """Read a size in megabytes, or ``auto``."""
    return text if text == "auto" else float(text)


def key_and_value(text: str) -> tuple[str, Any]:
    """Read ``depth=6`` or ``channels=(24,48)``; a value that is no Python literal is a string."""
    key, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE, got {text!r}")
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value


if __name__ == "__main__":
    main()

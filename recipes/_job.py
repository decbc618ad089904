"""Shared by all training jobs: joining and leaving, optimizers, the learning rate."""

import argparse
import math
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

LEARNING_RATES = {"sgd": 0.05, "adamw": 1e-3, "muon": 1e-3}
HEADS = ("head", "fc", "classifier")
WEIGHT_DECAY = 1e-4


def join_the_job(args: argparse.Namespace) -> torch.device:
    """Set threads and determinism, choose the device, and join the other ranks."""
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.deterministic:
        # cuBLAS is deterministic only with this variable.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    device = torch.device("cpu")
    backend = "gloo"
    if args.device != "cpu" and torch.cuda.is_available():
        gpus = torch.cuda.device_count()
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % gpus)
        torch.cuda.set_device(device)
        # NCCL refuses two ranks of one job on one GPU. Gloo allows that.
        backend = "nccl" if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= gpus else "gloo"
    options: dict[str, Any] = {}
    if "RANK" not in os.environ:  # without torchrun: a job of one rank
        options = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(args.backend or backend, **options)
    return device


def say(text: str) -> None:
    """Print on rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def leave_the_job() -> None:
    """Leave the other ranks, without the abort that gloo may cause at exit.

    Gloo's threads release the context of the last backward a moment after the exchange has ended.
    They outlive the process group, and need the interpreter for that. If Python is already shutting
    down they abort the process (https://github.com/pytorch/pytorch/pull/179291). So wait a moment.
    """
    if "gloo" in dist.get_backend():
        time.sleep(0.1)
    dist.destroy_process_group()


def learning_rate(args: argparse.Namespace, step: int, total: int) -> float:
    """Return the learning rate of a step: a linear warm-up, then a cosine.

    It depends only on the step, so checkpoints need not save it.
    """
    highest: float = LEARNING_RATES[args.optimizer] if args.lr is None else args.lr
    warmup: int = args.warmup_steps
    if step < warmup:
        return highest * (step + 1) / warmup
    share = (step - warmup) / max(1, total - warmup)
    return highest * 0.5 * (1.0 + math.cos(math.pi * share))


def hidden_matrices(model: nn.Module) -> list[torch.Tensor]:
    """Return the weights of all linear layers but the head."""
    return [
        module.weight
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.rpartition(".")[-1] not in HEADS
    ]


def make_optimizers(args: argparse.Namespace, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Make the optimizers of ``--optimizer``, for all parameters together.

    Muon has the matrices of hidden linear layers, AdamW all other parameters. Muon's steps are
    scaled to the size of AdamW's, so that both can have the same learning rate.
    """
    options: dict[str, Any] = {"lr": learning_rate(args, 0, 1), "weight_decay": WEIGHT_DECAY}
    if args.optimizer == "muon":
        matrices = hidden_matrices(model)
        known = {id(matrix) for matrix in matrices}
        others = [each for each in model.parameters() if id(each) not in known]
        muon = torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **options)
        return [muon, torch.optim.AdamW(others, **options)]
    if args.optimizer == "sgd":
        return [torch.optim.SGD(model.parameters(), momentum=0.9, **options)]
    return [torch.optim.AdamW(model.parameters(), **options)]


def count_steps(args: argparse.Namespace, samples: int) -> int:
    """Return the optimizer steps of an epoch. Each rank has ``samples``."""
    steps: int = samples // (args.batch_size * args.accumulate)
    if steps == 0:
        raise ValueError(
            f"expected batch_size * accumulate <= the {samples} samples that each rank has, got "
            f"batch_size={args.batch_size}, accumulate={args.accumulate}; lower one of them"
        )
    return steps

"""A training script whose compute is sleep: how long it takes hardly depends on who else uses the machine.

    torchrun --nproc-per-node 2 recipes/studies/sleepy_job.py --hook split

Each layer has a quarter of a megabyte of gradients in a bucket of its own, and computes as long as the arguments say.
"""

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp.comm_hooks import (
    CrossoverState,
    DecoupledState,
    crossover_hook,
    crossover_wrapper,
    decoupled_hook,
    reduce_scatter_all_gather_hook,
)

WIDTH = 256
LAYER_BYTES = WIDTH * WIDTH * 4


class Compute(torch.autograd.Function):
    """Sleep on the way there and on the way back."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return gradient, None, None


class SleepyLayer(nn.Module):
    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.seconds = forward_s, backward_s

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        # Before the linear on the way back, hence after it on the way there.
        sleep: Callable[..., torch.Tensor] = Compute.apply
        return sleep(self.linear(inputs), *self.seconds)


def register(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, hook: str) -> None:
    states: dict[str, Any] = {
        "plain": lambda: (None, allreduce_hook),
        "split": lambda: (None, reduce_scatter_all_gather_hook),
        "crossover": lambda: (CrossoverState(), crossover_hook),
        "decoupled": lambda: (DecoupledState(optimizer), decoupled_hook),
        "wrapped": lambda: (CrossoverState(), crossover_wrapper(fp16_compress_hook)),
    }
    model.register_comm_hook(*states[hook]())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hook", default="split")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--forward", type=float, default=0.002, help="seconds of each layer")
    parser.add_argument("--backward", type=float, default=0.004)
    parser.add_argument("--bucket-cap-mb", type=float, default=LAYER_BYTES / 2**20 / 2)
    parser.add_argument("--steps", type=int, default=1_000_000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    network = nn.Sequential(*(SleepyLayer(args.forward, args.backward) for _ in range(args.layers)))
    model = DistributedDataParallel(network, bucket_cap_mb=args.bucket_cap_mb, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    register(model, optimizer, args.hook)
    ends_s = []
    inputs = torch.ones(2, WIDTH)
    for _ in range(args.steps):
        model(inputs).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        ends_s.append(time.monotonic())
    print(json.dumps({"ends_s": ends_s}), flush=True)
    dist.barrier()  # gloo may abort a rank whose peer is gone already
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

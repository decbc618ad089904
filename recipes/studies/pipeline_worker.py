"""A rank of the pipeline's studies: trains blocks that sleep, by a plan; see pipeline_lab.py."""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the recipes' directory

from crossover_ddp.gpu_mutex import GPUMutex
from crossover_ddp.pipeline import Plan, Runner
from studies.sleepy_job import Compute

WIDTH = 256


class PacedBlock(nn.Module):
    """A linear layer that takes at least the given seconds each way."""

    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seconds = forward_s, backward_s

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        sleep: Callable[..., torch.Tensor] = Compute.apply
        return sleep(torch.tanh(self.linear(inputs)), *self.seconds)


def blocks(count: int, forward_s: float, backward_s: float) -> list[nn.Module]:
    torch.manual_seed(0)
    return [PacedBlock(forward_s, backward_s) for _ in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--forward", type=float, default=0.02, help="seconds of a block")
    parser.add_argument("--backward", type=float, default=0.02)
    parser.add_argument("--rows", type=int, default=64, help="of a micro-batch")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--turns", action="store_true", help="one turn for each band")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    plan = Plan.load(args.plan)
    mutex = GPUMutex() if args.turns else None
    runner = Runner(
        plan, blocks(len(plan.layers), args.forward, args.backward), nn.functional.mse_loss, mutex=mutex
    )
    optimizer = torch.optim.SGD(runner.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(args.rows * plan.microbatches, WIDTH, generator=generator)
    y = torch.randn(args.rows * plan.microbatches, WIDTH, generator=generator)
    losses, seconds = [], []
    for _ in range(args.steps):
        if not args.turns:
            dist.barrier()
        begin_s = time.monotonic()
        loss = runner.step(x, y)
        if not args.turns:
            dist.barrier()
        seconds.append(time.monotonic() - begin_s)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(None if loss is None else loss.item())
    end_s = time.monotonic()
    dist.barrier()
    stats = mutex.stats() if mutex else {}
    print(
        "RESULT "
        + json.dumps({"losses": losses, "seconds": seconds, "end_s": end_s, "turns": stats}, default=str),
        flush=True,
    )
    if mutex:
        mutex.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

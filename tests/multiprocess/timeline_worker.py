"""A rank that trains a few steps: ``timeline_worker.py RANK STORE``. Run as a script, on a clock of its own."""

import sys

import torch
import torch.distributed as dist

from crossover_ddp import reduce_scatter_all_gather_hook

STEPS = 30


def main(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    layers = [torch.nn.Linear(64, 64) for _ in range(4)]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.02)
    model.register_comm_hook(None, reduce_scatter_all_gather_hook)
    for _ in range(STEPS):
        model(torch.randn(8, 64)).sum().backward()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])

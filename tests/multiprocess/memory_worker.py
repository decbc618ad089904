"""Trains a little, plain or decoupled, and prints the peak of its memory once buckets are what they stay."""

import re
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp import DecoupledState, decoupled_hook

LAYERS, WIDTH = 8, 1600  # ten megabytes each, and one bucket each

torch.set_num_threads(1)
dist.init_process_group("gloo")
network = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
model = DistributedDataParallel(network, bucket_cap_mb=9, gradient_as_bucket_view=True)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
state = None
if sys.argv[1] == "decoupled":
    state = DecoupledState(optimizer, defer="always")
    model.register_comm_hook(state, decoupled_hook)
for step in range(10):
    if step == 4:  # the first one is a single bucket, whatever the cap
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    model(torch.ones(4, WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
if state is not None:
    state.close()
[peak_kib] = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
print(f"peak of {int(peak_kib) * 1024} bytes", flush=True)
dist.barrier()
dist.destroy_process_group()

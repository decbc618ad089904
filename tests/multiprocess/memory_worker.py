"""Trains a little, one way or another, and prints the peak of its memory once buckets are what they stay."""

import ctypes
import os
import re
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp import DecoupledState, OwnerState, decoupled_hook, owner_hook
from crossover_ddp.muon_hooks import MuonState, muon_hook

LAYERS, WIDTH = 6, 1600  # ten megabytes each, and one bucket each
SMALL, LARGE = 16, 160000  # for Muon: as many bytes, and little to compute
M_MMAP_THRESHOLD = -3
# The peak is there in each step, within 0.1 MB: two steps are watched, in the campaign four.
STEPS = 7 if os.environ.get("CROSSOVER_CAMPAIGN") else 5

# Freed memory goes back at once. By default glibc keeps more and more of it, and peaks of like ranks differ by 30 MB.
assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1_000_000) == 1
torch.set_num_threads(1)
dist.init_process_group("gloo")
way = sys.argv[1]
widths = [SMALL, LARGE] if way.startswith("muon") else [WIDTH, WIDTH]
network = nn.Sequential(
    *(nn.Linear(widths[place % 2], widths[1 - place % 2], bias=False) for place in range(LAYERS))
)
model = DistributedDataParallel(network, bucket_cap_mb=9, gradient_as_bucket_view=True)
optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
state = None
if way in ("muon", "muon owners"):
    optimizer = muon = torch.optim.Muon(network.parameters(), lr=1e-3, ns_steps=1)
    if way == "muon owners":
        model.register_comm_hook(MuonState(muon), muon_hook)
if way in ("adamw", "adamw owners"):
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
if way == "decoupled":
    state = DecoupledState(optimizer, defer="always")
    model.register_comm_hook(state, decoupled_hook)
if way == "adamw owners":
    model.register_comm_hook(OwnerState(optimizer), owner_hook)
for step in range(STEPS):
    if step == 3:  # the first one is a single bucket, whatever the cap
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    model(torch.ones(4, widths[0])).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
if state is not None:
    state.flush()
status = Path("/proc/self/status").read_text()
# Without pages of files: torch's code is in memory once for all ranks, and the more of it the more a rank has called.
[peak_kib], [code_kib] = (
    re.findall(rf"{name}:\s+(\d+) kB", status) for name in ("VmHWM", "RssFile")
)
print(f"peak of {(int(peak_kib) - int(code_kib)) * 1024} bytes", flush=True)
dist.barrier()
dist.destroy_process_group()

"""Trains a few steps with a hook and prints the peak of its memory, once buckets are final.

Argument: the way to train.
"""

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

LAYERS, WIDTH = 6, 1600  # each layer has ten megabytes, and is one bucket
SMALL, LARGE = 16, 160000  # for Muon: layers of the same size that need little computation
M_MMAP_THRESHOLD = -3
# Each step has the same peak, within 0.1 MB. The last two steps are measured, in the campaign four.
STEPS = 7 if os.environ.get("CROSSOVER_CAMPAIGN") else 5

# Return freed memory at once. By default glibc keeps more and more of it, and the peaks of
# identical ranks differ by 30 MB.
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
    if step == 3:  # the first step has a single bucket of any size
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    model(torch.ones(4, widths[0])).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
if state is not None:
    state.flush()
status = Path("/proc/self/status").read_text()
# Without pages of files: they are torch's code, which ranks share, and grow with each function
# that a rank calls.
[peak_kib] = re.findall(r"VmHWM:\s+(\d+) kB", status)
[code_kib] = re.findall(r"RssFile:\s+(\d+) kB", status)
print(f"peak of {(int(peak_kib) - int(code_kib)) * 1024} bytes", flush=True)
dist.barrier()
dist.destroy_process_group()

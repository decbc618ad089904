"""Turns on a device without torch.distributed, for any two programs that compute.

Start it twice, side by side:

    python recipes/minimal_mutex.py a & python recipes/minimal_mutex.py b

Each computes only in its own turns. Between two turns, while it waits for data, for example, the
other one has the device.
"""

import argparse
import time

import torch

from crossover_ddp import GPUMutex

parser = argparse.ArgumentParser()
parser.add_argument("name")
parser.add_argument("--turns", type=int, default=20)
args = parser.parse_args()
on_gpu = torch.cuda.is_available()
device = torch.device("cuda" if on_gpu else "cpu")
# Scaled so that products keep their size: processors are much slower with numbers next to zero.
values, weights = torch.randn(2, 1024, 1024, device=device) / 32

mutex = GPUMutex(device=None if on_gpu else "core0")  # a name stands for a device that is no GPU
for _ in range(args.turns):
    mutex.acquire()
    for _ in range(10):
        values = torch.tanh(values @ weights)
    mutex.release()
    time.sleep(0.01)  # the part of a step that needs no device

with mutex.paused():  # a long pause, such as a checkpoint, in which the sibling has the device
    torch.save(values.cpu(), "/dev/null")
print(f"{args.name}: {mutex.stats()}")
mutex.close()

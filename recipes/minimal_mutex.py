"""Turns on a device without torch.distributed, for any two programs that compute.

Start it twice, side by side:

    python recipes/minimal_mutex.py a & python recipes/minimal_mutex.py b

Each computes in its own turns only; what it does between two turns (waiting for data, say) costs nobody anything.
"""

import argparse
import time

import torch

from crossover_ddp.gpu_mutex import GPUMutex

parser = argparse.ArgumentParser()
parser.add_argument("name")
parser.add_argument("--turns", type=int, default=20)
args = parser.parse_args()
on_gpu = torch.cuda.is_available()
device = torch.device("cuda" if on_gpu else "cpu")
# Products keep their size: of numbers next to zero a processor computes many times slower.
values, weights = torch.randn(2, 1024, 1024, device=device) / 32

mutex = GPUMutex(device=None if on_gpu else "core0")  # a name stands for a device that is no GPU
for _ in range(args.turns):
    mutex.acquire()
    for _ in range(10):
        values = torch.tanh(values @ weights)
    mutex.release()
    time.sleep(0.01)  # the part of a step that needs no device

with (
    mutex.paused()
):  # a long pause, such as a checkpoint: the turn is given away for its whole length
    torch.save(values.cpu(), "/dev/null")
print(f"{args.name}: {mutex.stats()}")
mutex.close()

"""Leave by one of Python's ways while this process's threads wait in gloo for a peer that never answers."""

import contextlib
import os
import sys
import time

import torch
import torch.distributed as dist

from tests.harness.training import Training, waited_for_by_nobody

way, how = sys.argv[1:]
dist.init_process_group("gloo")
training = Training(way, dist.get_rank(), around=waited_for_by_nobody).run(5)
if dist.get_rank() == 0:
    training.step()
    time.sleep(0.3)  # the threads are inside of gloo by then
    print("leaving", flush=True)
    if how == "exit":
        sys.exit(0)
    if how == "destroy":
        dist.destroy_process_group()
elif way == "decoupled":
    time.sleep(1)  # rank 0 waits for who may still need its parts, while that one lives
    os._exit(0)
else:
    with contextlib.suppress(RuntimeError):
        dist.recv(torch.ones(1), 0)  # outlives rank 0, and hears of its end at once
    time.sleep(1)

"""Destroy the process group while another rank is killed or stopped.

Arguments: that rank, and the name of the signal.
"""

import os
import signal
import sys
import time

import torch.distributed as dist

from crossover_ddp._ddp import leaving
from tests.harness.training import Training

lost, how = int(sys.argv[1]), signal.Signals[sys.argv[2]]
leaving._TOGETHER_S = 1.0  # type: ignore[misc]
dist.init_process_group("gloo")
training = Training("crossover", dist.get_rank()).run(3)
dist.barrier()
if dist.get_rank() == lost:
    os.kill(os.getpid(), how)
time.sleep(0.3)
dist.destroy_process_group()
print("destroyed", flush=True)

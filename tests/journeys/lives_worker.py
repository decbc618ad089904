"""Train in one process group after the other, all made by `env://` at the same port.

Arguments: the hook, and a digit for each group: the rank that is late to leave it.
"""

import sys
import time

import torch.distributed as dist

from tests.harness.training import Training

way, late = sys.argv[1:]
training = None
for number in late:
    former = training  # keeps its model alive, and with it rank 0's store of that group
    dist.init_process_group("gloo")
    training = Training(way, dist.get_rank()).run(3)
    rank = dist.get_rank()
    # Elastic ranks do not wait for each other in their steps. Without the barrier a fast rank would
    # end the rounds of slower ones.
    dist.barrier()
    dist.destroy_process_group()
    if rank == int(number):
        time.sleep(0.3)
print("lived", len(late), "lives")

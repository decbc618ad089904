"""Train in one process group after the other, as a script does that begins again; on `env://`, at one port.

Arguments: the hook, and which rank is late in which life, as digits.
"""

import sys
import time

import torch.distributed as dist

from tests.harness.training import Training

way, late = sys.argv[1:]
training = None
for number in late:
    former = training  # its model lives on, and with it rank 0's store of that life
    dist.init_process_group("gloo")
    training = Training(way, dist.get_rank()).run(3)
    rank = dist.get_rank()
    dist.barrier()  # elastic ranks do not wait for each other in their steps, and this ends the rounds of slower ones
    dist.destroy_process_group()
    if rank == int(number):
        time.sleep(0.3)
print("lived", len(late), "lives")

"""Exit in one of several ways while this process's threads wait in gloo for a peer.

The peer never answers. Arguments: the hook, and the way to exit.
"""

import functools
import os
import signal
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from crossover_ddp._system.environment import COMPARE_REPLICAS
from tests.harness.training import Training, waited_for_by_nobody


class Last:
    """Kills the peer when the interpreter is torn down, so that threads in gloo resume then."""

    def __init__(self, peer: int) -> None:
        self._peer = peer

    def __del__(
        self,
        kill: Callable[[int, int], None] = os.kill,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        kill(self._peer, signal.SIGKILL)
        sleep(0.3)


way, how = sys.argv[1:]
# Parameters may differ: the hook below answers before the mean has arrived.
os.environ[COMPARE_REPLICAS] = "0"
dist.init_process_group("gloo")
journeys: list[torch.futures.Future[torch.Tensor]] = []
# Not a function of this module: a hook that outlives the interpreter would keep the module alive,
# and `Last` with it.
training = Training(
    way, dist.get_rank(), around=functools.partial(waited_for_by_nobody, journeys=journeys)
)
if training.state is not None:
    training.state.compare_replicas = False
for _ in range(5):
    training.step()
    # The next step uses DDP's buckets again. Only the last step's may still be under way.
    torch.futures.wait_all(journeys)
    journeys.clear()
numbers = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
dist.all_gather(numbers, torch.tensor([os.getpid()]))
if dist.get_rank() == 0:
    last = Last(int(numbers[1]))
    training.step()
    time.sleep(0.3)  # until the threads wait in gloo
    print("leaving", flush=True)
    if how == "exit":
        sys.exit(0)
    if how == "destroy":
        dist.destroy_process_group()
else:
    time.sleep(60)

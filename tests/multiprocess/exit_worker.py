"""Ends the interpreter while the exchange's threads wait for a peer that never comes."""

import contextlib
import sys
import time

import torch
import torch.distributed as dist

from crossover_ddp._exchange.exchange import Exchange
from tests.unit.exchange.fake_bucket import FakeBucket

dist.init_process_group("gloo")
assert dist.group.WORLD is not None
engine = Exchange.of(dist.group.WORLD)
engine.submit(FakeBucket(torch.ones(10))).wait()
if dist.get_rank() == 0:
    future = engine.submit(FakeBucket(torch.ones(1_000_000)))
    time.sleep(0.3)  # the reducer is inside gloo by then
    assert not future.done()
    print("leaving", flush=True)
    if sys.argv[1] == "exit":
        sys.exit(0)
    if sys.argv[1] == "destroy":
        dist.destroy_process_group()
else:
    # Outlive rank 0, and hear of its end at once.
    with contextlib.suppress(RuntimeError):
        dist.recv(torch.ones(1), 0)
    time.sleep(1)

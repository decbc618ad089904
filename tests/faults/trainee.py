"""A rank that trains, started by a lane or by torchrun.

python -m torch.distributed.run … -m tests.faults.trainee '{"seed": 1, …}'
"""

import functools
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.harness.training import Training

SLOW_S = 0.3
FORKED_S = 2.0


def network(seed: int) -> nn.Module:
    """Return a network with BatchNorm, whose buffers DDP broadcasts in forward, inside the turn."""
    torch.manual_seed(seed)
    return nn.Sequential(
        *(nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU()),
        *(nn.Conv2d(12, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(12 * 256, 64), nn.Linear(64, 10)),
    )


def sample(first: int, number: int) -> torch.Tensor:
    """Return a batch that is a function of its number, whichever process loads it."""
    return torch.randn(16, 1, 16, 16, generator=torch.Generator().manual_seed(first + number))


def befall(order: dict[str, Any], step: int) -> None:
    """Do the faults of the order that are due in this step, inside a turn."""
    if Path(order["stop"] + ".slow").exists():
        time.sleep(SLOW_S)
    if step in order.get("forks", ()) and os.fork() == 0:  # a child that lives for a while
        time.sleep(FORKED_S)
        os._exit(0)
    first_life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if first_life and order.get("dies") == [dist.get_rank(), step]:
        os.kill(os.getpid(), signal.SIGKILL)


def live(order: dict[str, Any]) -> None:
    """Train until the steps are done or the file ``order["stop"]`` appears. Log a line per step."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a DataLoader waits for its workers
    os.environ["CROSSOVER_GROUP"] = order["group"]
    dist.init_process_group("gloo")
    workers = order.get("workers", 0)
    loader = torch.utils.data.DataLoader(
        range(order["steps"]),
        batch_size=None,
        collate_fn=functools.partial(sample, (1000 * order["seed"] + dist.get_rank()) << 32),
        num_workers=workers,
        multiprocessing_context="fork" if workers else None,
    )
    batches = iter(loader)
    training = Training(
        None if order["hook"] == "none" else order["hook"],
        module=network(order["seed"]),
        optimizers=lambda model: [torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)],
        loss=lambda model, *_: model(next(batches)).pow(2).mean(),
        bucket_cap_mb=0.2,
    )
    with open(order["log"], "w", buffering=1) as log:
        going = torch.ones(1)
        while going and training.steps < order["steps"]:
            begin_s = time.monotonic()
            befall(order, training.steps)
            loss = training.step()
            print(json.dumps([training.steps, begin_s, time.monotonic(), loss]), file=log)
            going[0] = not Path(order["stop"]).exists()
            dist.broadcast(going, 0)
        print(json.dumps({"stats": training.state.stats() if training.state else None}), file=log)
    training.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    order = json.loads(sys.argv[1])
    order["log"] += f"{os.environ['RANK']}-life{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    os.environ["CROSSOVER_DEVICE"] = f"dev{os.environ['RANK']}"
    live(order)

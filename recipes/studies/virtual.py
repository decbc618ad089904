"""Steps of virtual ranks over plain DDP with accumulation, and over the hook alone.

    torchrun --standalone --nproc-per-node 1 recipes/studies/virtual.py
    torchrun --standalone --nproc-per-node 2 recipes/studies/virtual.py

All ways train the same GPT, with as many micro-batches a step, in alternating blocks of steps. A row
has the median step time over that of DDP in the same block, and the bytes that each rank sends over
those of an all-reduce. Keep the machine otherwise idle.
"""

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the recipes' directory

import crossover_ddp as ddp
from _models import TinyGPT, loss_of

VOCABULARY, WARM_UP = 512, 4
DDP, HOOK, VIRTUAL = "DDP, accumulation", "crossover_hook, accumulation", "virtual ranks"


class Way:
    """One way of training. All ways have equal models."""

    def __init__(self, name: str, count: int, batch: torch.Tensor) -> None:
        torch.manual_seed(0)
        model = TinyGPT(vocabulary=VOCABULARY, context=batch.shape[1] - 1, dim=128, depth=3)
        self.model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.name, self.batch = name, batch
        self.times: list[float] = []
        self.micro_batches = count // dist.get_world_size()
        self.ranks: ddp.VirtualRanks | None = None
        self.state: Any = None
        if name != DDP:
            self.state = ddp.CrossoverState(trial=False)
            self.model.register_comm_hook(self.state, ddp.crossover_hook)
        if name == VIRTUAL:
            self.ranks = ddp.VirtualRanks(self.model, count)

    def micro_batch(self, number: int) -> Any:
        if self.ranks is not None:
            return self.ranks.micro_batch()
        is_last = number == self.micro_batches - 1
        return contextlib.nullcontext() if is_last else self.model.no_sync()

    def step(self) -> None:
        began_s = time.perf_counter()
        share = 1 if self.ranks is not None else self.micro_batches
        for number in range(self.micro_batches):
            with self.micro_batch(number):
                outputs = self.model(self.batch[:, :-1])
                (loss_of(outputs, self.batch[:, 1:]) / share).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.times.append(time.perf_counter() - began_s)

    def bytes_sent(self) -> int:
        return 0 if self.state is None else int(self.state.stats()["bytes_sent"])


def measured(args: argparse.Namespace, count: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each way."""
    made = torch.Generator().manual_seed(dist.get_rank())
    batch = torch.randint(VOCABULARY, (args.batch, args.context + 1), generator=made)
    ways = [Way(name, count, batch) for name in (DDP, HOOK, VIRTUAL)]
    for way in ways:
        for _ in range(WARM_UP):
            way.step()
    ratios: dict[str, list[float]] = {way.name: [] for way in ways}
    steps = args.blocks * args.steps
    before = {way.name: way.bytes_sent() for way in ways}
    for block in range(args.blocks):
        turn = block % len(ways)
        for way in (*ways[turn:], *ways[:turn]):
            way.times.clear()
            dist.barrier()
            for _ in range(args.steps):
                way.step()
        medians = {way.name: statistics.median(way.times) for way in ways}
        for name, median in medians.items():
            ratios[name].append(median / medians[DDP])
    size = dist.get_world_size()
    gradients = sum(p.nbytes for p in ways[0].model.parameters())
    whole = 2 * (size - 1) / size * gradients
    over_hook = [v / h for v, h in zip(ratios[VIRTUAL], ratios[HOOK], strict=True)]
    for way in ways:
        sent = (way.bytes_sent() - before[way.name]) / steps
        yield {
            "way": way.name,
            "virtual ranks": count,
            "ranks": size,
            "step_s": round(statistics.median(way.times), 4),
            "over_ddp": round(statistics.median(ratios[way.name]), 3),
            "over_hook": round(statistics.median(over_hook), 3) if way.name == VIRTUAL else None,
            "bytes": round(sent / whole, 3) if sent and whole else None,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=8, help="virtual ranks (default: 8)")
    parser.add_argument("--batch", type=int, default=4, help="samples in a micro-batch")
    parser.add_argument("--context", type=int, default=32, help="tokens in a sample")
    parser.add_argument("--blocks", type=int, default=15, help="alternating blocks of each way")
    parser.add_argument("--steps", type=int, default=8, help="steps in a block")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for count in (args.count, dist.get_world_size()):
        for row in measured(args, count):
            if dist.get_rank() == 0:
                print(json.dumps(row), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Layouts by owners, straight to them and around a ring: seconds for a step's buckets that leave at once.

    python recipes/lab run --nodes 4 --rate 100mbit --job 'a: python tests/benchmarks/around.py' --out runs/around

Rank 0 prints a line for each case: the median and the range of each way, in rounds of both in turns.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from crossover_ddp._engine import gloo
from crossover_ddp._engine.exchange import Exchange, Way
from crossover_ddp._engine.links import Layout, Link

MB = (1 << 20) // 4
# By bucket: what each of four ranks owns, in MB.
CASES: dict[str, list[list[float]]] = {
    "25 MB, one owner has 9 of the first 10 MB": [[0.33, 0.33, 9, 0.34], [2, 2, 2, 1.5], [1.5, 2, 2, 2]],
    "25 MB in one bucket, one owner has 9 MB": [[5.3, 9, 5.3, 5.4]],
    "25 MB in one bucket, equal parts": [[6.25] * 4],
    "three buckets of 8 MB, each of one owner": [
        [8 if rank == i else 0 for rank in range(4)] for i in range(3)
    ],
    "eight buckets of 2 MB, each of one owner": [
        [2 if rank == i % 4 else 0 for rank in range(4)] for i in range(8)
    ],
    "2 MB of one owner": [[0, 2, 0, 0]],
    "0.5 MB of one owner": [[0, 0.5, 0, 0]],
}
WAYS: dict[str, Callable[[Layout, int], bool]] = {
    "straight": lambda layout, itemsize: False,
    "ring": lambda layout, itemsize: True,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="cases that contain this")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    exchange = Exchange.of(dist.group.WORLD)
    for name, case in CASES.items():
        if args.only in name:
            layouts = [[int(part * MB) for part in bucket] for bucket in case]
            found: dict[str, list[float]] = {way: [] for way in WAYS}
            for round_ in range(args.rounds + 1):
                for way in sorted(WAYS, reverse=round_ % 2 == 1):
                    taken = seconds(exchange, layouts, way)
                    if round_:  # the first one warms up
                        found[way].append(taken)
            if dist.get_rank() == 0:
                rows = [
                    f"{way} {statistics.median(s):.3f} ({min(s):.3f} to {max(s):.3f})"
                    for way, s in found.items()
                ]
                print(f"{name}: {', '.join(rows)}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def seconds(exchange: Exchange, layouts: list[list[int]], way: str) -> float:
    gloo.goes_around = WAYS[way]
    flats = [torch.randn(sum(layout)) for layout in layouts]
    dist.barrier()
    begin_s = time.monotonic()
    trips = [
        exchange.begin(journey(flat, layout), flat.device, "a bucket")
        for flat, layout in zip(flats, layouts, strict=True)
    ]
    for trip in trips:
        trip.wait()
    dist.barrier()
    return time.monotonic() - begin_s


def journey(flat: torch.Tensor, layout: Layout) -> Way:
    async def there_and_back(link: Link) -> None:
        await link.reduce_scatter(flat, layout)
        await link.compute()
        await link.all_gather(flat, layout)

    return there_and_back


if __name__ == "__main__":
    main()

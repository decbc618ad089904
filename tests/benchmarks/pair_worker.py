"""One rank of the benchmark: the split's pair of halves against ``dist.all_reduce`` of the same buffer.

Run by the lab (``recipes/lab``); arguments are pairs SIZE_BYTES:REPEATS. Writes ``pair-<rank>.json`` into
the job's directory: for each size, and for each way, the times in alternating order, and the wire bytes.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from crossover_ddp._engine.exchange import Exchange
from crossover_ddp._engine.links import Link

WARM_UP = 2


def main() -> None:
    dist.init_process_group("gloo")
    assert dist.group.WORLD is not None
    engine = Exchange.of(dist.group.WORLD)
    results = [measure(engine, *map(int, argument.split(":"))) for argument in sys.argv[1:]]
    engine.close()
    path = Path(os.environ["CROSSOVER_LAB_DIR"]) / f"pair-{dist.get_rank()}.json"
    path.write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def measure(engine: Exchange, size_bytes: int, repeats: int) -> dict[str, Any]:
    buffer = torch.empty(size_bytes // 4)
    layout = engine.equal_layout(buffer)

    async def split(link: Link) -> None:
        await link.reduce_scatter(buffer, layout)
        await link.all_gather(buffer, layout)

    def pair() -> None:
        engine.begin(split, buffer.device, "a buffer").wait()

    def all_reduce() -> None:
        buffer.div_(engine.size)
        dist.all_reduce(buffer)

    ways = {"pair": pair, "all_reduce": all_reduce}
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for round_ in range(WARM_UP + repeats):
        for name, way in ways.items():
            buffer.fill_(1.0 + dist.get_rank())
            figures = timed(way)
            assert (buffer - (1 + engine.size) / 2).abs().max() < 1e-6, name
            if round_ >= WARM_UP:
                taken[name].append(figures)
    return {"size_bytes": size_bytes, **taken}


def timed(way: Callable[[], None]) -> dict[str, float]:
    dist.barrier()
    wire_bytes, cpu_s, begin_s = sent_bytes(), time.process_time(), time.perf_counter()
    way()
    figures = {"time_s": time.perf_counter() - begin_s, "cpu_s": time.process_time() - cpu_s}
    # A rank may be done while its last bytes still wait for the link; the barrier's few follow them.
    dist.barrier()
    return {**figures, "wire_bytes": sent_bytes() - wire_bytes}


def sent_bytes() -> int:
    # Not of /sys, which belongs to the name space that mounted it.
    table = dict(line.split(":") for line in Path("/proc/self/net/dev").read_text().splitlines()[2:])
    columns = {name.strip(): columns.split() for name, columns in table.items()}
    return int(columns[os.environ["GLOO_SOCKET_IFNAME"]][8])


if __name__ == "__main__":
    main()

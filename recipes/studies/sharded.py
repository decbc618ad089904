"""Steps of FSDP2 on two nodes of two ranks: native, and with hooks between the nodes.

    python recipes/studies/sharded.py --ratio 1 3 --repeats 5

All ways train the same GPT on the emulated cluster, on one core a node. First a way without any
exchange between nodes gives C. The link's rate is then set so that the exact gradients of a node
take M = ratio × C. A row has medians over repeats of step times over those of native
``fully_shard`` on the whole mesh, and the bytes that left a node. Needs root and an idle machine.
"""

import argparse
import functools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the recipes' directory

import crossover_ddp as ddp
from _models import TinyGPT, loss_of
from crossover_ddp.fsdp import register_comm_hook
from lab import STEADY_MEMORY, Cluster, Job

CONTEXT, VOCABULARY, BATCH = 64, 512, 8
WARM_UP, STEPS = 9, 16
ALONE = "no exchange"
NATIVE = "native"


def diloco(group: dist.ProcessGroup) -> tuple[Any, Any]:
    outer = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
    state = ddp.LocalSGDState(4, delay=1, outer_optimizer=outer, process_group=group)
    return state, ddp.local_sgd_hook


HOOKS: dict[str, Callable[[dist.ProcessGroup], tuple[Any, Any]]] = {
    "split": lambda group: (group, ddp.reduce_scatter_all_gather_hook),
    "crossover": lambda group: (ddp.CrossoverState(group), ddp.crossover_hook),
    "Int8": lambda group: (
        ddp.CompressedState(ddp.Int8(), process_group=group),
        ddp.compressed_hook,
    ),
    "DiLoCo, every 4": diloco,
}
WAYS = (NATIVE, ALONE, *HOOKS)


def train(way: str, path: Path) -> None:
    """Train in this rank, and write seconds and bytes a step, and the losses, to ``path``."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("between", "inside"))
    torch.manual_seed(0)
    model = TinyGPT(vocabulary=VOCABULARY, context=CONTEXT, dim=192, depth=4, heads=3)
    used = mesh if way == NATIVE else mesh["inside"]
    for block in model.blocks:
        fully_shard(block, mesh=used)
    sharded = fully_shard(model, mesh=used)
    if way in HOOKS:
        register_comm_hook(sharded, *HOOKS[way](mesh["between"].get_group()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    dice = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    begin_s, begin_bytes = 0.0, 0
    for step in range(WARM_UP + STEPS):
        if step == WARM_UP:
            dist.barrier()
            begin_s, begin_bytes = time.monotonic(), sent_bytes()
        words = torch.randint(0, VOCABULARY, (BATCH, CONTEXT + 1), generator=dice)
        loss = loss_of(model(words[:, :-1]), words[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    dist.barrier()
    found = {
        "step_s": (time.monotonic() - begin_s) / STEPS,
        "bytes": (sent_bytes() - begin_bytes) / STEPS,
        "losses": losses,
        "numel": sum(each.numel() for each in model.parameters()),
    }
    if dist.get_rank() == 0:
        path.write_text(json.dumps(found))
    dist.destroy_process_group()


def sent_bytes() -> int:
    """Return the bytes that this node has sent."""
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())


def run(cluster: Cluster, way: str, directory: Path) -> dict[str, Any]:
    """Run one way in all ranks, and return the findings of rank 0."""
    path = directory / "found.json"
    words = ["python", __file__, "--way", way, "--file", str(path)]
    cluster.run([Job("a", words, STEADY_MEMORY)], timeout_s=600, out=directory / "run")
    found: dict[str, Any] = json.loads(path.read_text())
    path.unlink()
    return found


def measure(ratios: list[float], repeats: int) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="sharded-") as name,
        Cluster(nodes=2, rate_mbit=1000.0, ranks_per_node=2) as cluster,
    ):
        directory = Path(name)
        alone = run(cluster, ALONE, directory)
        print("| M/C | rate | way | step over native | bytes over native | losses |")
        print("|---|---|---|---|---|---|")
        for ratio in ratios:
            rate_mbit = 4 * alone["numel"] * 8 / 1e6 / (ratio * alone["step_s"])
            cluster.set_rate(rate_mbit)
            runs: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
            for number in range(repeats):
                order = list(WAYS)
                random.Random(number).shuffle(order)
                for way in order:
                    runs[way].append(run(cluster, way, directory))
            for way in WAYS:
                pairs = [*zip(runs[way], runs[NATIVE], strict=True)]
                steps = [own["step_s"] / native["step_s"] for own, native in pairs]
                sent = [own["bytes"] / native["bytes"] for own, native in pairs]
                equal = all(own["losses"] == native["losses"] for own, native in pairs)
                print(
                    f"| {ratio:g} | {rate_mbit:.0f} Mbit/s | {way}, "
                    f"{statistics.median(own['step_s'] for own in runs[way]):.3f} s | "
                    f"{statistics.median(steps):.2f} ({min(steps):.2f} to {max(steps):.2f}) | "
                    f"{statistics.median(sent):.3f} | {'equal' if equal else 'others'} |",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ratio", type=float, nargs="+", default=[1.0, 3.0], help="M/C")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.way:
        train(arguments.way, arguments.file)
    else:
        measure(arguments.ratio, arguments.repeats)


if __name__ == "__main__":
    main()

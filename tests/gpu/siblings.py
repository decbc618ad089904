"""Benchmark of two jobs of two ranks on one GPU, in all ways of sharing it.

    python tests/gpu/siblings.py [--backend gloo] [--rate MBIT] [--repeats 3] [--seconds 2]
                                 [--out siblings.json]

A job alone that exchanges nothing gives C, one that trains gives T1, one that only exchanges gives
M. Then both jobs train one after the other, side by side, with turns, and with turns after a trial,
in a different order in each repeat. One job trains alone with other hooks. At last one job waits
20 ms for data in each step while the other one computes.

With ``--rate`` the two ranks of a job are on two nodes of the lab's network (root). Without it the
link is as fast as the machine's memory. NCCL treats ranks that share a GPU as ranks of different
hosts. It needs MPS, since its kernels wait for those of the peer on the GPU. Prints steps per
second, and factors over one after the other.
"""

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import crossover_ddp as ddp
from lab.network import INTERFACE, LabId, Network
from tests.harness.groups import free_port, share_the_gpu

JOBS, RANKS, LAYERS = 2, 2, 8
TIMEOUT = timedelta(seconds=120)
WAIT_S = 0.02
ALONE, BESIDE, TURNS, TRIED = "one after the other", "side by side", "turns", "tried"
TOGETHER = [BESIDE, TURNS, TRIED]
WARM_UP = {TRIED: 200, "decoupled": 100}  # steps of their trials
HOOKS: dict[str, Callable[[torch.optim.Optimizer], tuple[Any, Any]]] = {
    TURNS: lambda _: (ddp.CrossoverState(trial=False), ddp.crossover_hook),
    TRIED: lambda _: (ddp.CrossoverState(trial=True), ddp.crossover_hook),
    "split": lambda _: (None, ddp.reduce_scatter_all_gather_hook),
    "int8": lambda _: (ddp.CompressedState(ddp.Int8()), ddp.compressed_hook),
    "decoupled": lambda optimizer: (ddp.DecoupledState(optimizer), ddp.decoupled_hook),
}
WAITING = [BESIDE, TRIED]
ONE_JOB = ["plain", "split", TURNS, "int8", "decoupled"]
TOLD = ("turns", "handovers", "turns_pay", "leases_expired", "deferred", "exposed_s")
# By job: width, batch, and seconds of waiting in each step.
Plan = dict[int, tuple[int, int, float]]


class Shared:
    """The job, the rank and the stores of this process, for all runs."""

    def __init__(self) -> None:
        self.job = int(os.environ["JOB"])
        self.rank = int(os.environ["RANK"])
        self.store = dist.TCPStore(
            os.environ["ADDRESS"],
            int(os.environ["PORT"]),
            is_master=self.job == self.rank == 0,
            wait_for_workers=False,
            timeout=TIMEOUT,
        )
        torch.cuda.set_device(0)
        share_the_gpu()
        own = dist.PrefixStore(f"job {self.job}", self.store)
        backend = os.environ["BACKEND"]
        dist.init_process_group(
            backend, store=own, rank=self.rank, world_size=RANKS, timeout=TIMEOUT
        )

    def meet(self, what: str, count: int) -> None:
        """Wait until ``count`` ranks have come to this point."""
        if self.store.add(what, 1) == count:
            self.store.set(f"{what}, all", "")
        self.store.wait([f"{what}, all"])


class Training:
    """A network under DDP with a hook, and its batch. A narrow network leaves the GPU to others."""

    def __init__(self, shared: Shared, hook: str, width: int, batch: int) -> None:
        torch.manual_seed(shared.job)
        layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(width, width), nn.GELU())]
        self.model = DistributedDataParallel(
            nn.Sequential(*layers).cuda(), bucket_cap_mb=max(1.0, 2 * width * width * 4 / 1e6)
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        state, function = HOOKS.get(hook, lambda _: (None, None))(self.optimizer)
        if function is not None:
            self.model.register_comm_hook(state, function)
        self.state: Any = state
        self.data = torch.randn(batch, width, device="cuda")
        self.ends = [torch.cuda.Event(blocking=True) for _ in range(2)]

    def step(self, wait_s: float = 0.0, sync: bool = True) -> None:
        time.sleep(wait_s)
        with contextlib.nullcontext() if sync else self.model.no_sync():
            self.model(self.data).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=not sync)
        # The host waits for the previous step. Otherwise it could run many steps ahead, and count
        # steps that the device has not done.
        self.ends[0].record()
        self.ends.reverse()
        self.ends[0].synchronize()

    def close(self) -> dict[str, Any]:
        stats = {} if self.state is None else self.state.stats()
        if self.state is not None:
            self.state.close()
        return {key: stats[key] for key in TOLD if key in stats}


def rate(
    shared: Shared, name: str, hook: str, plan: Plan, seconds: float, sync: bool = True
) -> Any:
    """Let the jobs of a plan train at once. Return this job's steps per second."""
    shared.meet(name, JOBS * RANKS)  # the other jobs leave the GPU alone
    if shared.job not in plan:
        return {}
    width, batch, wait_s = plan[shared.job]
    training = Training(shared, hook, width, batch)
    for _ in range(WARM_UP.get(hook, 6)):
        training.step(wait_s, sync)
    torch.cuda.synchronize()
    mutex = training.state.mutex if isinstance(training.state, ddp.CrossoverState) else None
    if mutex is not None:
        mutex.release()  # the siblings must not wait while this job waits for them
    shared.meet(f"{name}: warm", RANKS * len(plan))
    over = f"{name}: job {shared.job} is over"
    begin_s = time.monotonic()
    steps = 0
    stamps_s: list[float] = []
    last = None
    while last is None or steps < last:
        # The other rank is at most one step ahead, so it reads the number before that step.
        if shared.rank == 0 and last is None and time.monotonic() - begin_s > seconds:
            last = steps + 4  # more than a deferred update needs
            shared.store.set(over, str(last))
        elif last is None and shared.rank and shared.store.check([over]):
            last = int(shared.store.get(over))
        training.step(wait_s, sync)
        steps += 1
        stamps_s.append(time.monotonic())
    torch.cuda.synchronize()
    if mutex is not None:
        mutex.release()
    # The first job to end leaves the GPU to the other one: only the steps before that count.
    shared.store.set(f"{over}: {shared.rank}", str(stamps_s[-1]))
    shared.meet(f"{name}: over", RANKS * len(plan))
    ends_s = min(
        float(shared.store.get(f"{name}: job {job} is over: {shared.rank}")) for job in plan
    )
    steps = sum(each <= ends_s for each in stamps_s)
    return {"steps_per_s": steps / (stamps_s[steps - 1] - begin_s), **training.close()}


def wire_s(shared: Shared, width: int) -> float:
    """Return M: the time of an exchange of all gradients, with nothing else to do."""
    buckets = [torch.ones(2, width, width, device="cuda") for _ in range(LAYERS // 2)]
    for _ in range(2):
        torch.cuda.synchronize()
        begin_s = time.monotonic()
        for bucket in buckets:
            dist.all_reduce(bucket)
        torch.cuda.synchronize()
    return time.monotonic() - begin_s


def rank_main(args: argparse.Namespace) -> None:
    """Make all runs in a rank of a job. Rank 0 of each job writes the results."""
    shared = Shared()
    rows: dict[str, Any] = {}
    batch = 4096
    m_s = wire_s(shared, args.width) if shared.job == 0 else 0.0
    for number in range(3):
        alone: Plan = {0: (args.width, batch, 0.0)}
        if found := rate(shared, f"calibration {number}", BESIDE, alone, args.seconds, sync=False):
            c_s = 1 / found["steps_per_s"]
            share = torch.tensor(batch * m_s / args.ratio / c_s, device="cuda")
            dist.all_reduce(share, dist.ReduceOp.MAX)
            batch = min(max(256, int(share) // 256 * 256), args.most)
            rows |= {"M s": m_s, "C s": c_s, "batch": batch}
            shared.store.set("batch", str(batch))
    shared.meet("calibrated", JOBS * RANKS)
    batch = int(shared.store.get("batch"))
    if shared.job == 0:
        shared.store.wait(["computing, all"])
        rows["M s, while the sibling computes"] = wire_s(shared, args.width)
        print(rows, flush=True)
        shared.meet("wire", RANKS)
    else:
        computing = Training(shared, BESIDE, args.width, batch)
        computing.step(sync=False)
        shared.meet("computing", RANKS)
        while not shared.store.check(["wire, all"]):
            computing.step(sync=False)
    busy = (args.width, batch, 0.0)
    idle = (128, 64, WAIT_S)

    def all_of(what: str, ways: list[str], *plans: Plan) -> list[Any]:
        """Return name, way and plan of runs, in a different order in each repeat."""
        return [
            (f"{way}{what} {repeat}", way, plan)
            for repeat in range(args.repeats)
            for way in random.Random(repeat).sample(ways, len(ways))
            for plan in (plans if way == ALONE or what else [plans[0] | plans[1]])
        ]

    runs = all_of("", [ALONE, *TOGETHER], {0: busy}, {1: busy})
    runs += all_of(", one job", ONE_JOB, {0: busy})
    runs += all_of(", one waits", WAITING, {0: idle, 1: busy})
    for name, way, plan in runs:
        label = name if len(plan) > 1 else f"{name} {[*plan]}"
        if (found := rate(shared, label, way, plan, args.seconds)) and shared.rank == 0:
            rows[name] = found
            print(f"job {shared.job}: {name}: {found}", flush=True)
    shared.meet("the end", JOBS * RANKS)
    if shared.rank == 0:
        Path(f"{args.out}.{shared.job}").write_text(json.dumps(rows))
    dist.destroy_process_group()


def summary(both: list[dict[str, Any]], repeats: int) -> dict[str, Any]:
    """Compare the ways: medians over repeats."""

    def of(job: int, name: str) -> float:
        return float(both[job][name]["steps_per_s"])

    rows = {key: both[0][key] for key in ("M s", "M s, while the sibling computes", "C s", "batch")}
    # One after the other, two steps take the sum of the times of each job's step alone.
    alone = [
        2 / sum(1 / of(job, f"{ALONE} {repeat}") for job in range(JOBS))
        for repeat in range(repeats)
    ]
    t1_s = 1 / statistics.median(alone)
    rows |= {"T1 s": t1_s, "bound": t1_s / max(rows["C s"], rows["M s"], t1_s / 2)}
    for way in TOGETHER:
        together = [
            sum(of(job, f"{way} {repeat}") for job in range(JOBS)) for repeat in range(repeats)
        ]
        factors = [got / base for got, base in zip(together, alone, strict=True)]
        rows[way] = {"factor": statistics.median(factors), "each": factors}
    for way in WAITING:
        waits = [
            [of(job, f"{way}, one waits {repeat}") for repeat in range(repeats)]
            for job in range(JOBS)
        ]
        rows[f"{way}, one waits"] = {"waiting": waits[0], "computing": waits[1]}
    for way in ONE_JOB:
        rows[f"{way}, one job"] = [of(0, f"{way}, one job {repeat}") for repeat in range(repeats)]
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--backend", default="gloo", choices=["gloo", "nccl"])
    parser.add_argument("--rate", type=float, help="Mbit/s of each node's link")
    parser.add_argument("--ratio", type=float, default=0.75, help="M/C, by the size of the batch")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each run")
    parser.add_argument("--width", type=int, default=1024, help="of each of eight layers")
    parser.add_argument("--most", type=int, default=65536, help="samples in a batch")
    parser.add_argument("--out", default="siblings.json")
    args = parser.parse_args()
    if "JOB" in os.environ:
        rank_main(args)
        return 0
    common = {
        "BACKEND": args.backend,
        "CROSSOVER_GROUP": f"siblings-{os.getpid()}",
        "OMP_NUM_THREADS": "1",
    }
    common |= {"WORLD_SIZE": str(RANKS), "ADDRESS": "127.0.0.1", "PORT": str(free_port())}
    with contextlib.ExitStack() as ending:
        enter: list[list[str]] = [[]] * RANKS
        if args.rate:
            lab = LabId.of_this_process(0)
            network = Network(lab, nodes=RANKS, rate_mbit=args.rate, mtu=9000, cores=[None] * RANKS)
            ending.callback(network.close)
            enter = [network.enter(node) for node in range(RANKS)]
            interface = {f"{backend}_SOCKET_IFNAME": INTERFACE for backend in ("GLOO", "NCCL")}
            common |= {"ADDRESS": network.address(0), **interface}
        ranks = [
            subprocess.Popen(
                [*enter[rank], sys.executable, *sys.argv],
                env={**os.environ, **common, "JOB": str(job), "RANK": str(rank)},
            )
            for job in range(JOBS)
            for rank in range(RANKS)
        ]
        codes = [each.wait() for each in ranks]
    if any(codes):
        return 1
    found = summary(
        [json.loads(Path(f"{args.out}.{job}").read_text()) for job in range(JOBS)], args.repeats
    )
    Path(args.out).write_text(json.dumps(found, indent=1) + "\n")
    print(torch.cuda.get_device_name(), json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())

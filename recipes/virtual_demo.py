"""One loss curve through kills and changes of the number of ranks, in about a minute.

    python recipes/virtual_demo.py

A network with BatchNorm, dropout and random shifts of its images trains with eight virtual ranks.
First it trains on one rank without a break. Then the same job is killed (SIGKILL, all ranks) and
resumed from its latest checkpoint on another number of ranks, again and again. The losses that each
attempt wrote, and a picture of them, are in runs/virtual/. At the end the two jobs have one hash of
parameters, buffers, optimizer state and all losses. Exit status 1 if they do not.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from crossover_ddp import VirtualRanks, reduce_scatter_all_gather_hook

COUNT: Final = 8  # virtual ranks
SIZES: Final = (1, 2, 3, 4)
SAVED_EVERY: Final = 10
TIMEOUT_S: Final = 120.0


# --- a rank ---------------------------------------------------------------------------------------


class Images(Dataset[tuple[Tensor, int]]):
    """Noisy copies of ten images, with more noise and a random shift whenever one is read."""

    def __init__(self, count: int = 1800) -> None:
        made = torch.Generator().manual_seed(0)
        self.labels = torch.randint(10, (count,), generator=made).tolist()
        pure = torch.randn(10, 1, 8, 8, generator=made)
        self.images = pure[self.labels] + torch.randn(count, 1, 8, 8, generator=made)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        shift = torch.randint(-1, 2, (2,)).tolist()
        image = self.images[index].roll(shift, (1, 2))
        return image + 0.1 * torch.randn(image.shape), self.labels[index]


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(512, 10),
    )


def train(directory: Path, steps: int, log: Path) -> None:
    """Train from the latest checkpoint to the last step. Rank 0 writes a line for each step."""
    torch.manual_seed(0)
    model = DistributedDataParallel(network(), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model.register_comm_hook(None, reduce_scatter_all_gather_hook)
    ranks = VirtualRanks(model, COUNT)
    loader = ranks.loader(Images(), batch_size=16)
    losses: list[float] = []  # the mean loss of each step
    saved = directory / "checkpoint.pt"
    if saved.exists():
        checkpoint = torch.load(saved)
        model.module.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        ranks.load_state_dict(checkpoint["ranks"])
        losses = checkpoint["losses"]
    while ranks.step < steps:
        for images, labels in ranks.micro_batches(loader):
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            ranks.report(loss)
            if ranks.is_step_end:
                optimizer.step()
                optimizer.zero_grad()
                losses.append(sum(ranks.losses()) / COUNT)
                if dist.get_rank() == 0:
                    checkpoint = {
                        "model": model.module.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "ranks": ranks.state_dict(),
                        "losses": losses,
                    }
                    if ranks.step % SAVED_EVERY == 0 or ranks.step == steps:
                        torch.save(checkpoint, f"{saved}.new")
                        os.replace(f"{saved}.new", saved)  # a kill leaves a whole file
                    with log.open("a") as file:
                        print(json.dumps({"step": ranks.step, "loss": losses[-1]}), file=file)
                if ranks.step == steps:
                    break


def run_rank(args: argparse.Namespace) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", f"file://{args.store}", rank=rank, world_size=size)
    train(args.out, args.steps, args.log)
    dist.destroy_process_group()


# --- the demo -------------------------------------------------------------------------------------


class Attempt(NamedTuple):
    """The steps that one attempt of the job has made before it was killed or has ended."""

    size: int
    losses: Mapping[int, float]  # by step


def attempt(directory: Path, steps: int, size: int, number: int, killed_at: int | None) -> Attempt:
    """Start all ranks, and kill them once the step ``killed_at`` is in their log."""
    log = directory / f"attempt-{number}-{size}-ranks.jsonl"
    with tempfile.TemporaryDirectory() as store:
        command = [sys.executable, __file__, "--steps", str(steps), "--out", str(directory)]
        command += ["--log", str(log), "--store", f"{store}/store"]
        # All attempts have one thread a rank, as torchrun sets it for several ranks.
        common = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(size)}
        ranks = [
            subprocess.Popen(command, env={**common, "RANK": str(rank)}) for rank in range(size)
        ]
        try:
            end_s = time.monotonic() + TIMEOUT_S
            while any(rank.poll() is None for rank in ranks):
                if killed_at is not None and killed_at in read(log):
                    break
                if any(rank.poll() for rank in ranks) or time.monotonic() > end_s:
                    raise RuntimeError(f"a rank failed, or the job took more than {TIMEOUT_S} s")
                time.sleep(0.01)
        finally:
            for rank in ranks:  # all at once, so that none reports the loss of another
                rank.kill()
            for rank in ranks:
                rank.wait()
    return Attempt(size, read(log))


def read(log: Path) -> dict[int, float]:
    if not log.exists():
        return {}
    whole, _, _ = log.read_text().rpartition("\n")  # a kill may have cut the last line
    return {each["step"]: each["loss"] for each in map(json.loads, whole.splitlines())}


def hash_of(saved: Path) -> str:
    """Return a hash of all numbers in a checkpoint but the number of ranks, which is not there."""
    digest = hashlib.sha256()

    def feed(value: Any) -> None:
        if isinstance(value, Tensor):
            digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, Mapping):
            for key, each in value.items():
                digest.update(str(key).encode())
                feed(each)
        elif isinstance(value, (list, tuple)):
            for each in value:
                feed(each)
        else:
            digest.update(repr(value).encode())

    feed(torch.load(saved))
    return digest.hexdigest()[:16]


def draw(path: Path, alone: Attempt, attempts: Sequence[Attempt], hashes: Sequence[str]) -> None:
    """Draw the curve without a break, and above it the attempts. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(
        [*alone.losses], [*alone.losses.values()], color="0.8", linewidth=6, label="1 rank, no kill"
    )
    for size in sorted({each.size for each in attempts}):
        axes.plot([], [], color=f"C{size}", label=f"{size} rank{'s' * (size > 1)}")
    for before, after in zip(attempts, [*attempts[1:], None], strict=True):
        kept = min(after.losses) if after is not None else max(before.losses) + 1
        color = f"C{before.size}"
        steps = [step for step in before.losses if step < kept]
        axes.plot(steps, [before.losses[step] for step in steps], color=color)
        lost = [step for step in before.losses if step >= kept]
        losses = [before.losses[step] for step in lost]
        axes.plot(lost, losses, "o", color=color, markersize=7, fillstyle="none")
        if after is not None:
            last = max(before.losses)
            axes.plot(last, before.losses[last], "x", color=color)
    one = len({*hashes}) == 1
    axes.set_title(
        f"{COUNT} virtual ranks: one hash, {hashes[0]}" if one else f"two hashes: {hashes}"
    )
    axes.set_xlabel("step (×: all ranks killed; circles: steps lost since the latest checkpoint)")
    axes.set_ylabel("mean loss")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=100)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100, help="steps of the job (default: 100)")
    parser.add_argument("--kills", type=int, default=3, help="kills of the job (default: 3)")
    parser.add_argument("--seed", type=int, default=0, help="chooses kills and numbers of ranks")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/virtual"), help="(default: %(default)s)"
    )
    for name in ("--log", "--store"):  # of a rank, which the demo starts
        parser.add_argument(name, type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.store is not None:
        run_rank(args)
        return 0
    if not 0 <= 4 * args.kills < args.steps:
        parser.error(
            f"expected 0 <= 4 * kills < steps, got --kills {args.kills} --steps {args.steps}"
        )
    began_s = time.monotonic()
    shutil.rmtree(args.out, ignore_errors=True)
    for name in ("alone", "killed"):
        (args.out / name).mkdir(parents=True)
    alone = attempt(args.out / "alone", args.steps, 1, 0, None)
    print(f"1 rank without a break: {args.steps} steps, loss {alone.losses[args.steps]:.6f}")
    chance = random.Random(args.seed)
    attempts: list[Attempt] = []
    share = args.steps // (args.kills + 1)
    kills: list[int | None] = [
        # So early in its share that the job cannot end before the kill.
        number * share + chance.randrange(share // 2 + 1)
        for number in range(1, args.kills + 1)
    ]
    kills.append(None)
    for number, killed_at in enumerate(kills):
        others = [size for size in SIZES if not attempts or size != attempts[-1].size]
        size = chance.choice(others)
        attempts.append(attempt(args.out / "killed", args.steps, size, number, killed_at))
        first, last = min(attempts[-1].losses), max(attempts[-1].losses)
        end = "ended" if killed_at is None else "killed"
        print(f"{size} rank{'s' * (size > 1)}: steps {first} to {last}, {end}", flush=True)
    hashes = [hash_of(args.out / name / "checkpoint.pt") for name in ("alone", "killed")]
    print(f"hash without a break: {hashes[0]}, after {args.kills} kills: {hashes[1]}")
    try:
        draw(args.out / "curve.png", alone, attempts, hashes)
        print(f"picture: {args.out / 'curve.png'}")
    except ImportError:
        print("no picture: pip install 'crossover_ddp[picture]'")
    print(f"all of this took {time.monotonic() - began_s:.0f} s")
    return 0 if hashes[0] == hashes[1] else 1


if __name__ == "__main__":
    raise SystemExit(main())

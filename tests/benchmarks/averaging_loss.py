"""What averaging now and then costs in test loss, after equal samples, against plain DDP with the same seeds.

    python -m tests.benchmarks.averaging_loss --task digits --seeds 10
    python -m tests.benchmarks.averaging_loss --task gpt --seeds 10 --steps 480 --way ddp delayed-4 streamed-8
    python -m tests.benchmarks.averaging_loss --task digits --seeds 3 --ranks 2 --times runs/averaging --picture

Replicas are copies in one process (`tests/multiprocess/replicas.py`); the tests hold the hooks to these bit by bit, so
no network and no ranks are needed. Every way is trained with each learning rate of the same list on seeds of their own,
and then with its best one on ``--seeds`` seeds, whose weights and batches are those of plain DDP's runs. With
``--picture`` the seconds of a step, in units of C, are read from the result of `averaging.py`; then loss is drawn over
time.

``digits``: a convolutional net, digits shifted at random, SGD with momentum. ``gpt``: a small GPT on Python's help
topics, AdamW. Learning rates fall to zero on a cosine. "wild" and "async" have no fixed order: here each copy pulls one
centre when it has made its steps, in the order of time, without lost additions. "warmed" begins with 64 steps that
are plain DDP's (``warmup_steps=64``).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes"))

import _models
from studies._loss_tasks import OUTER, TASKS, LossTask, interval
from studies._tables import Cells, show_table
from tests.multiprocess.replicas import Copies, DelayedWalk, Spring, TogetherWalk, flat, mean_of, write

TUNING_SEED: Final = 1000
TUNING_SEEDS: Final = 2
MOVING: Final = 0.9
WARM_UP: Final = 64


# --- ways of training ---------------------------------------------------------------------------------------------


class Walk(Protocol):
    """Copies, trained some way."""

    copies: Copies

    def step(self) -> None:
        """Let each copy train on one batch."""

    def average(self) -> None:
        """Make all copies equal."""


class EveryStep:
    """Plain DDP; ``batches`` of them for one update: accumulation."""

    def __init__(self, copies: Copies, batches: int = 1) -> None:
        self.copies = copies
        self._batches = batches
        self._computed = 0

    def step(self) -> None:
        self._computed += 1
        if self._computed % self._batches:
            self.copies.compute()
            return
        # Gradients of several batches are a sum; their mean is what a larger batch has.
        self.copies.step(together=True, divisor=self._batches)

    def average(self) -> None:
        """They are equal."""


class WildWalk:
    """EA-wild: each copy pulls the centre every so many steps of its own, at its own pace.

    Args:
        copies: of the model.
        sync_every: of `ElasticState`.
        paces: how many steps of the fastest copy one step of each takes.
    """

    def __init__(self, copies: Copies, sync_every: int, paces: Sequence[int]) -> None:
        self.copies = copies
        self._every, self._paces = sync_every, paces
        self._centre = copies.snapshots()[0].clone()
        self._rate = MOVING / copies.world_size
        self._done = [0] * copies.world_size
        self._ticks = 0

    def step(self) -> None:
        self._ticks += 1
        for rank, pace in enumerate(self._paces):
            if self._ticks % pace == 0:
                self.copies.step_alone(rank, self._done[rank])
                self._done[rank] += 1
                if self._done[rank] % self._every == 0:
                    self._pull(rank)
        self.copies.steps += 1

    @torch.no_grad()
    def _pull(self, rank: int) -> None:
        model = self.copies.models[rank]
        values = flat(model)
        delta = (values - self._centre).mul_(self._rate)
        write(model, values - delta)
        self._centre += delta

    def average(self) -> None:
        self.copies.average()


@dataclass(frozen=True)
class TrainingWay:
    """One way of training.

    Args:
        begin: makes the walk of copies.
        timed_as: the way of `averaging.py` whose time of a step it has.
    """

    begin: Callable[[Copies, Sequence[int]], Walk]
    timed_as: str


def delayed(
    every: int,
    delay: int,
    fragments: int = 1,
    outer: tuple[float, float] | None = None,
    warmup_steps: int = 0,
) -> TrainingWay:
    def begin(copies: Copies, _: Sequence[int]) -> Walk:
        return DelayedWalk(
            copies,
            sync_every=every,
            delay=delay,
            fragments=fragments,
            outer=outer,
            warmup_steps=warmup_steps,
        )

    return TrainingWay(begin, "delayed")


def together(copies: Copies, _: Sequence[int]) -> Walk:
    spring = Spring(copies.snapshots()[0], copies.world_size, MOVING / copies.world_size)
    return TogetherWalk(copies, spring, 4)


WAYS: Final[Mapping[str, TrainingWay]] = {
    "ddp": TrainingWay(lambda copies, _: EveryStep(copies), "ddp"),
    "accumulation-4": TrainingWay(lambda copies, _: EveryStep(copies, 4), "accumulation"),
    "delayed-4": delayed(4, 3),
    "streamed-8": delayed(8, 1, 8),
    "warmed-4": delayed(4, 3, warmup_steps=WARM_UP),
    "warmed-8": delayed(8, 1, 8, warmup_steps=WARM_UP),
    **{f"local-{every}": delayed(every, 1) for every in (2, 4, 8, 16, 32, 64)},
    "diloco-8": delayed(8, 1, 8, OUTER),
    "diloco-64": delayed(64, 1, 8, OUTER),
    "easgd-4": TrainingWay(together, "sync"),
    "wild-4": TrainingWay(lambda copies, paces: WildWalk(copies, 4, paces), "wild"),
}
SAME_LOSSES: Final = {"decoupled": "ddp", "fp16": "ddp"}
"""Ways of `averaging.py` drawn with another one's losses: equal for decoupled training, up to rounding for fp16."""


# --- one training -------------------------------------------------------------------------------------------------


def make_copies(task: LossTask, seed: int, ranks: int, rate: float) -> Copies:
    torch.manual_seed(seed)
    models = [task.build()]
    for _ in range(ranks - 1):
        models.append(task.build())
        models[-1].load_state_dict(models[0].state_dict())
    generators = [torch.Generator().manual_seed(seed * 1009 + rank) for rank in range(ranks)]

    def gradients(rank: int) -> None:
        inputs, targets = task.batch(generators[rank])
        _models.loss_of(models[rank](inputs), targets).backward()

    return Copies(models, [task.optimizer(model, rate) for model in models], gradients)


def train(task: LossTask, way: str, seed: int, rate: float, args: argparse.Namespace) -> list[float]:
    """Return the test loss of the mean of all copies at ``args.points`` moments, evenly spread; the last is the end."""
    copies = make_copies(task, seed, args.ranks, rate)
    paces = [1] * (args.ranks - 1) + [args.slow]
    walk = WAYS[way].begin(copies, paces)
    judge, losses = task.build(), []
    for step in range(args.steps):
        for optimizer in copies.optimizers:
            optimizer.param_groups[0]["lr"] = rate * 0.5 * (1 + math.cos(math.pi * step / args.steps))
        walk.step()
        if (step + 1) * args.points // args.steps > step * args.points // args.steps:
            if step + 1 == args.steps:
                walk.average()
            with torch.no_grad():
                write(judge, mean_of(copies.snapshots()))
                losses.append(task.test_loss(judge))
    return losses


def tuned_rate(task: LossTask, way: str, args: argparse.Namespace) -> float:
    """Return the learning rate with the least mean loss; all ways have the same list and the same seeds."""
    seeds = range(TUNING_SEED, TUNING_SEED + TUNING_SEEDS)
    found = {
        rate: statistics.fmean(train(task, way, seed, rate, args)[-1] for seed in seeds)
        for rate in task.rates
    }
    return min(found, key=lambda rate: found[rate] if math.isfinite(found[rate]) else math.inf)


def run_task(name: str, args: argparse.Namespace, say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Yield a row for each way; plain DDP comes first."""
    task = TASKS[name]()
    reference: list[float] = []
    for way in ["ddp", *(each for each in args.way if each != "ddp")]:
        begin_s = time.monotonic()
        rate = tuned_rate(task, way, args)
        curves = [train(task, way, seed, rate, args) for seed in range(args.seeds)]
        reference = reference or [curve[-1] for curve in curves]
        relative = [curve[-1] / base - 1 for curve, base in zip(curves, reference, strict=True)]
        mean, half = interval(relative)
        say(f"{name}, {way}: {time.monotonic() - begin_s:.0f} s")
        yield {
            "task": name,
            "way": way,
            "ranks": args.ranks,
            "slow": args.slow,
            "steps": args.steps,
            "samples": args.steps * args.ranks * task.batch_size,
            "rate": rate,
            "loss": statistics.fmean(curve[-1] for curve in curves),
            "relative": mean,
            "half_width": half,
            "curves": curves,
        }


def cells(row: Mapping[str, Any]) -> Cells:
    within = f"{row['relative']:+.1%} ± {row['half_width']:.1%}"
    return {
        "task": row["task"],
        "way": row["way"],
        "learning rate": f"{row['rate']:g}",
        "test loss": row["loss"],
        "against DDP, 95 %": "–" if row["way"] == "ddp" else within,
    }


# --- loss over time -----------------------------------------------------------------------------------------------


def times_of(directory: Path) -> list[dict[str, Any]]:
    """Read what `averaging.py` has measured, from all results in a directory."""
    paths = sorted(directory.rglob("averaging.json"))
    if not paths:
        raise SystemExit(
            f"expected averaging.json in {directory}, found none; run studies/averaging.py --out"
        )
    return [row for path in paths for row in json.loads(path.read_text())]


def steps_in_c(measured: Mapping[str, Any], way: str) -> float | None:
    """Return the time of a step in units of C; of ranks at their own pace, that of the fastest."""
    times = measured["fastest_s" if way in ("wild", "async") else "step_s"]
    return times[way] / measured["c_s"] if way in times else None


def draw_losses(rows: Sequence[Mapping[str, Any]], times: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw loss over time, a panel for each measured ratio M/C, the slow rank's behind them."""
    from matplotlib.figure import Figure

    panels = sorted(times, key=lambda each: (each["slow"], each["ratio"]))
    figure = Figure(figsize=(5 * len(panels), 4), layout="constrained")
    for place, measured in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), place + 1)
        chosen = [row for row in rows if (row["slow"] > 1) == (measured["slow"] > 1)]
        for row in chosen:
            names = [WAYS[row["way"]].timed_as]
            names += [way for way, other in SAME_LOSSES.items() if other == row["way"]]
            for name in names:
                step = steps_in_c(measured, name)
                if step is not None:
                    mean = [statistics.fmean(point) for point in zip(*row["curves"], strict=True)]
                    at = [step * row["steps"] * (point + 1) / len(mean) for point in range(len(mean))]
                    label = row["way"] if name == names[0] else name
                    axes.plot(at, mean, label=label, linestyle="-" if name == names[0] else "--")
        slow = f", one rank {measured['slow']:g} times slower" if measured["slow"] > 1 else ""
        axes.set_title(f"M/C {measured['m_s'] / measured['c_s']:.2g}{slow}")
        axes.set_xlabel("time in units of C")
        axes.set_ylabel("test loss")
        axes.set_yscale("log")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    figure.savefig(path, dpi=110)


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", nargs="+", choices=sorted(TASKS), default=["digits"])
    parser.add_argument("--way", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=600, help="mini-batches of each rank (default 600)")
    parser.add_argument("--points", type=int, default=20, help="moments of a run at which it is judged")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--slow", type=int, default=1, help="how many times slower the last rank is")
    parser.add_argument("--out", type=Path, default=Path("runs/averaging-loss"))
    parser.add_argument("--times", type=Path, default=Path("runs/averaging"), help="results of averaging.py")
    parser.add_argument(
        "--picture", action="store_true", help="draw all results in --out over measured times"
    )
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    console, rows = Console(), []
    for task in args.task:
        name = f"{task}-{args.ranks}-slow{args.slow}.json"
        found = []
        for row in run_task(task, args, Console(stderr=True).print):
            found.append(row)
            (args.out / name).write_text(json.dumps(found))
        rows += found
    show_table(console, f"Test loss after equal samples, {args.seeds} paired seeds", map(cells, rows))
    if args.picture:
        drawn = [
            row
            for path in args.out.glob(f"*-{args.ranks}-slow*.json")
            for row in json.loads(path.read_text())
        ]
        draw_losses(
            [row for row in drawn if row["task"] == "digits"], times_of(args.times), args.out / "loss.png"
        )
    return rows


if __name__ == "__main__":
    main()

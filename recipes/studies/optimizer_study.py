"""Tune SGD with momentum, Adam and K-FAC with the same budget each, and count what they need to a target.

    python recipes/studies/optimizer_study.py --study autoencoder --seeds 3
    torchrun --nproc-per-node 2 recipes/studies/optimizer_study.py --study cnn --seeds 2

``autoencoder``: a deep autoencoder of digits, all images in each step; steps to the training loss that tuned Adam
reaches after nine tenths of the budget. ``cnn``: a convolutional net; epochs to 97 % test accuracy, measured four
times per epoch. Every optimizer gets ``--configs`` configurations, drawn from the ranges below with a fixed seed, and
every configuration ``--seeds`` seeds. Writes study.json, which second_order.py reads, and study.png.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the recipes' directory

from studies._digits import PEER, Choice, Training, make_problem, mean_over_ranks, one_job
from studies._search import Log, OneOf, Result, SearchTrial, Space, best_of, draw, late_loss
from studies._tables import Cells, show_table

SMOKE_CONFIGS: Final = 2
SMOKE_SEEDS: Final = 1
SMOKE_BUDGET: Final[Mapping[str, int]] = {"autoencoder": 6, "cnn": 1}
LATE: Final = 0.9
ACCURACY: Final = 0.97
CHECKS_PER_EPOCH: Final = 4

_DECAYS = OneOf((0.8, 0.9, 0.95))
_CLIPS = OneOf((None, 1e-4, 1e-3, 1e-2))
_ADAM: Space = {
    "lr": Log(1e-3, 5e-2),
    "betas": OneOf(((0.9, 0.999), (0.9, 0.99), (0.95, 0.999))),
    "eps": Log(1e-8, 1e-4),
}
_NESTEROV = OneOf((False, True))


def _kfac(damping: Log) -> Space:
    return {"lr": Log(1e-2, 0.3), "damping": damping, "kl_clip": _CLIPS, "factor_decay": _DECAYS}


SPACES: Mapping[str, Mapping[str, Space]] = {
    "autoencoder": {
        "adam": _ADAM,
        "sgd": {"lr": Log(3e-3, 0.3), "nesterov": _NESTEROV},
        "kfac": _kfac(Log(1e-6, 1e-2)),
        PEER: _kfac(Log(1e-6, 1e-2)),
    },
    "cnn": {
        "adam": _ADAM,
        "sgd": {"lr": Log(1e-2, 0.3), "nesterov": _NESTEROV},
        "kfac": _kfac(Log(1e-4, 1e-1)),
        PEER: _kfac(Log(1e-3, 1.0)),
    },
}
BUDGETS: Mapping[str, int] = {"autoencoder": 600, "cnn": 8}  # steps, epochs


@dataclass(frozen=True)
class Contender:
    """An optimizer of the study: its name there, its configurations."""

    name: str
    choices: tuple[Choice, ...]


def contenders(
    study: str, configs: int, *, peer: bool = False, only: Sequence[str] | None = None
) -> list[Contender]:
    """Return all contenders; K-FAC with updates in every step, and every 10 (factors) and 100 (solvers) steps."""
    found = []
    for optimizer, space in SPACES[study].items():
        if optimizer == PEER and not peer:
            continue
        drawn = draw(space, configs)
        periods = [("", 1, 1), (" 10/100", 10, 100)] if optimizer in ("kfac", PEER) else [("", 0, 0)]
        for suffix, factors, solvers in periods:
            fixed = {"factor_update_steps": factors, "inv_update_steps": solvers} if factors else {}
            choices = tuple(Choice(optimizer, {**options, **fixed}) for options in drawn)
            if only is None or optimizer in only:
                found.append(Contender(optimizer + suffix, choices))
    return found


Stop = Callable[[float], bool]
Curve = tuple[Sequence[float], list[float]]  # moments of measuring, and what was measured then


def train_autoencoder(training: Training, steps: int, stop: Stop) -> Curve:
    """Return the training loss after 0, 1, 2, ... steps, until ``stop`` says so or it is not a number."""
    losses: list[float] = []
    with contextlib.suppress(FloatingPointError):
        for _ in range(steps + 1):
            losses += mean_over_ranks(training.step())
            if not math.isfinite(losses[-1]) or stop(losses[-1]):
                break
    return range(len(losses)), losses


def train_classifier(training: Training, epochs: int) -> Curve:
    """Return moments in epochs and the accuracies then, until the target is met or training has broken down."""
    per_epoch = training.steps_per_epoch
    checks = {round(per_epoch * part / CHECKS_PER_EPOCH) for part in range(1, CHECKS_PER_EPOCH + 1)}
    moments: list[float] = []
    accuracies: list[float] = []
    with contextlib.suppress(FloatingPointError):
        for step in range(epochs * per_epoch):
            loss = training.step()
            if step % per_epoch + 1 not in checks:
                continue
            moments.append(training.epochs)
            accuracies.append(training.accuracy())
            if accuracies[-1] >= ACCURACY or not math.isfinite(mean_over_ranks(loss)[0]):
                break
    return moments, accuracies


class Study:
    """All trials of a study, one after the other, on all ranks."""

    def __init__(self, args: argparse.Namespace, advance: Callable[[str], None]) -> None:
        self.args = args
        self.problem = make_problem(args.study)
        self.contenders = contenders(args.study, args.configs, peer=args.peer, only=args.only)
        self.trials: list[SearchTrial] = []
        self.falling = args.study == "autoencoder"
        self.target = -math.inf if self.falling else ACCURACY
        self.seconds: dict[str, float] = {}
        self._advance = advance

    def run(self) -> Iterator[None]:
        """Run the trials of one contender after the other."""
        for contender in self.contenders:
            began_s = time.monotonic()
            for config, choice in enumerate(contender.choices):
                for seed in range(self.args.seeds):
                    self._advance(f"{contender.name}, configuration {config + 1}")
                    self.trials.append(self._trial(contender.name, config, choice, seed))
            self.seconds[contender.name] = time.monotonic() - began_s
            # Adam comes first, and what it has reached late is the target of all.
            if contender.name == "adam" and self.falling:
                self.target = late_loss(self.trials, self.args.budget, LATE)
            yield

    def _trial(self, name: str, config: int, choice: Choice, seed: int) -> SearchTrial:
        training = Training(self.problem, choice, seed)
        began_s = time.process_time()
        if self.falling:
            at, values = train_autoencoder(training, self.args.budget, lambda loss: loss <= self.target)
        else:
            at, values = train_classifier(training, self.args.budget)
        step_s = (time.process_time() - began_s) / training.steps
        training.close()
        return SearchTrial(name, config, seed, at, values, step_s)

    def results(self) -> list[Result]:
        """Return what is known of those that have had all their trials."""
        return [best_of(name, self.trials, self.target, falling=self.falling) for name in self.seconds]

    def as_json(self) -> dict[str, Any]:
        """Return all that was asked and found; a median that is infinite is null."""
        choices = {each.name: each.choices for each in self.contenders}
        steps = 1 if self.falling else self.problem.steps_per_epoch(dist.get_world_size())
        return {
            "study": self.args.study,
            "world_size": dist.get_world_size(),
            "torch": torch.__version__,
            "unit": "steps" if self.falling else "epochs",
            "budget": self.args.budget,
            "seeds": self.args.seeds,
            "target": self.target,
            "ranges": {
                optimizer: {name: str(values) for name, values in space.items()}
                for optimizer, space in SPACES[self.args.study].items()
            },
            "results": [
                {
                    **asdict(result),
                    "each": [finite(value) for value in result.each],
                    "median": finite(result.median),
                    "cpu_s": finite(result.median * steps * result.step_s),
                    "choice": choices[result.optimizer][result.config].as_json(),
                    "tuning_s": self.seconds[result.optimizer],
                }
                for result in self.results()
            ],
            "trials": [
                {
                    **choices[trial.optimizer][trial.config].as_json(),
                    "name": trial.optimizer,
                    "config": trial.config,
                    "seed": trial.seed,
                    "at": list(trial.at),
                    "values": [finite(float(f"{value:.6g}")) for value in trial.values],
                }
                for trial in self.trials
            ],
        }


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def cells(result: Mapping[str, Any], unit: str) -> Cells:
    """What the table says of a result."""
    options = ", ".join(f"{name} {value}" for name, value in result["choice"]["options"].items())
    return {
        "optimizer": result["optimizer"],
        f"{unit}, median": number(result["median"], unit),
        "each seed": ", ".join(number(value, unit) for value in result["each"]),
        "met by": f"{result['met']} of {result['configs']}",
        "CPU ms/step": f"{1e3 * result['step_s']:.1f}",
        "CPU s": None if result["cpu_s"] is None else f"{result['cpu_s']:.2f}",
        "best one": options,
    }


def number(value: float | None, unit: str) -> str:
    return "never" if value is None else f"{value:.0f}" if unit == "steps" else f"{value:.2f}"


def draw_picture(found: Mapping[str, Any], path: Path) -> None:
    """Draw the best configurations' curves, and when each of all configurations met the target."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    curves, dots = figure.subplots(1, 2)
    for row, result in enumerate(found["results"]):
        colour = f"C{row}"
        trials = [trial for trial in found["trials"] if trial["name"] == result["optimizer"]]
        for trial in trials:
            if trial["config"] == result["config"]:
                label = result["optimizer"] if trial["seed"] == 0 else None
                curves.plot(trial["at"], trial["values"], color=colour, lw=1, label=label)
        moments = [moment for trial in trials if (moment := met_at(found, trial)) is not None]
        dots.plot(moments, [row] * len(moments), "o", color=colour, alpha=0.5)
    if found["unit"] == "steps":
        # Some begin with a leap that would leave no room for the rest.
        curves.set_ylim(0.9 * found["target"], 1.1 * found["trials"][0]["values"][0])
    curves.axhline(found["target"], color="black", ls=":", lw=1)
    curves.set(xlabel=found["unit"], ylabel="training loss" if found["unit"] == "steps" else "test accuracy")
    curves.legend(fontsize=8)
    names = [result["optimizer"] for result in found["results"]]
    dots.set(xlabel=f"{found['unit']} to the target, each configuration and seed", xlim=(0, None))
    dots.set_yticks(range(len(names)), names)
    figure.savefig(path, dpi=110)


def met_at(found: Mapping[str, Any], trial: Mapping[str, Any]) -> float | None:
    """Return when a trial met the target; None if it never did."""
    sign = -1 if found["unit"] == "steps" else 1
    least = sign * found["target"] - 1e-5 * found["target"]  # the values are rounded
    pairs = zip(trial["at"], trial["values"], strict=True)
    return next((at for at, value in pairs if value is not None and sign * value >= least), None)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--study", choices=sorted(SPACES), default="autoencoder", help="(default autoencoder)"
    )
    parser.add_argument("--configs", type=int, default=12, help="per optimizer (default 12)")
    parser.add_argument("--seeds", type=int, default=3, help="per configuration (default 3)")
    parser.add_argument("--budget", type=int, help=f"steps or epochs of a training (default {dict(BUDGETS)})")
    parser.add_argument("--peer", action="store_true", help=f"also {PEER}, which must be installed")
    parser.add_argument("--only", nargs="+", help="only these optimizers (autoencoder: adam sets the target)")
    parser.add_argument("--smoke", action="store_true", help="a few steps only, to see that it runs")
    parser.add_argument("--out", type=Path, help="directory (default: runs/study-<study>)")
    args = parser.parse_args(argv)
    if args.smoke:
        args.configs, args.seeds = SMOKE_CONFIGS, SMOKE_SEEDS
    args.budget = args.budget or (SMOKE_BUDGET if args.smoke else BUDGETS)[args.study]
    args.out = args.out or Path("runs") / f"study-{args.study}"
    if args.study == "autoencoder" and args.only is not None and "adam" not in args.only:
        parser.error(f"expected adam among --only, got {' '.join(args.only)}; the target is its loss")
    if args.peer and find_spec("kfac") is None:
        parser.error(f"expected {PEER} with --peer, got none; pip install {PEER}, or leave --peer out")
    return args


def save(found: Mapping[str, Any], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "study.json").write_text(json.dumps(found) + "\n")


def report(found: Mapping[str, Any], out: Path, console: Console) -> None:
    draw_picture(found, out / "study.png")
    unit = found["unit"]
    goal = f"loss {found['target']:.3f}" if unit == "steps" else f"{found['target']:.0%} test accuracy"
    title = f"{found['study']}: {unit} to {goal}, best of each optimizer's configurations"
    show_table(console, title, (cells(result, unit) for result in found["results"]))
    console.print(f"{out / 'study.json'}, {out / 'study.png'}")


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse_arguments(argv)
    with one_job():
        leads = dist.get_rank() == 0
        console = Console(stderr=True, quiet=not leads)
        count = (
            len(contenders(args.study, args.configs, peer=args.peer, only=args.only))
            * args.configs
            * args.seeds
        )
        with Progress(console=console) as progress:
            task = progress.add_task("", total=count)
            study = Study(args, lambda what: progress.update(task, advance=1, description=what))
            for _ in study.run():
                found = study.as_json()
                if leads:
                    save(found, args.out)
        if leads:
            report(found, args.out, Console(width=None if console.is_terminal else 160))
    return found


if __name__ == "__main__":
    main()

"""Train small nets on digits with SGD, AdamW and K-FAC and draw the loss over steps, seconds and bytes sent.

    torchrun --nproc-per-node 2 recipes/studies/second_order.py --model cnn vit
    python recipes/lab run --rate 20mbit --job 'digits: python recipes/studies/second_order.py --out runs/second-order'
    python recipes/studies/second_order.py --model autoencoder --from-study runs/study-autoencoder/study.json

The trainings follow each other in one process group, with the same weights and the same order of images. K-FAC is
plain SGD with momentum whose gradients arrive preconditioned. Bytes are counted by the network interface in the
emulated cluster and computed elsewhere; the picture says which. Writes second_order.json and second_order.png.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the recipes' directory

from studies._digits import Choice, Training, WireMeter, make_problem, mean_over_ranks, one_job
from studies._tables import Cell, Cells, show_table

Sheet = Mapping[str, Choice]

_KFAC = {"lr": 0.1, "kl_clip": 1e-4, "factor_update_steps": 10, "inv_update_steps": 10}
# Found by a few trials by hand; the autoencoder's by optimizer_study.py.
DEFAULTS: Final[Mapping[str, Sheet]] = {
    "cnn": {
        "sgd": Choice("sgd", {"lr": 0.1}),
        "adamw": Choice("adamw", {"lr": 0.01}),
        "kfac": Choice("kfac", {**_KFAC, "damping": 0.003, "factor_decay": 0.9}),
    },
    "vit": {
        "sgd": Choice("sgd", {"lr": 0.1}),
        "adamw": Choice("adamw", {"lr": 0.003}),
        "kfac": Choice("kfac", {**_KFAC, "damping": 0.001, "factor_decay": 0.8}),
    },
    "autoencoder": {
        "sgd": Choice("sgd", {"lr": 0.0495}),
        "adamw": Choice("adamw", {"lr": 0.0159, "betas": (0.9, 0.99), "weight_decay": 0.0}),
        "kfac": Choice(
            "kfac",
            {"lr": 0.0252, "damping": 1.5e-4, "kl_clip": 1e-4, "factor_decay": 0.8, "inv_update_steps": 1},
        ),
    },
}
WARM_UP_STEPS: Final = 3
SMOOTHING: Final = 0.9
PANELS: Final = (("steps", "steps"), ("seconds", "seconds"), ("megabytes", "MB sent per rank"))


@dataclass(frozen=True)
class Curve:
    """One training: the loss before each step, and what had been spent until then.

    Args:
        losses: mean over the ranks.
        seconds: since the first step began, on rank 0.
        megabytes: sent by a rank, the mean over the ranks.
        accuracy: on test images at the end; None for the autoencoder.
    """

    model: str
    optimizer: str
    choice: Mapping[str, Any]
    losses: Sequence[float]
    seconds: Sequence[float]
    megabytes: Sequence[float]
    accuracy: float | None

    @property
    def steps(self) -> range:
        return range(len(self.losses))

    def smoothed(self) -> list[float]:
        """Return the losses as a running mean: those of single batches jump too much to be compared."""
        return smooth(self.losses) if self.model != "autoencoder" else list(self.losses)

    def first(self, target: float) -> int | None:
        """Return after how many steps the loss was at most ``target``."""
        return next((step for step, loss in enumerate(self.smoothed()) if loss <= target), None)


def smooth(losses: Sequence[float], share: float = SMOOTHING) -> list[float]:
    """Return the mean of all losses so far, older ones with exponentially smaller weights."""
    sums = accumulate(losses, lambda total, loss: share * total + loss, initial=0.0)
    weights = accumulate(losses, lambda total, _: share * total + 1.0, initial=0.0)
    pairs = list(zip(sums, weights, strict=True))[1:]
    return [total / weight for total, weight in pairs]


def train(
    model: str, name: str, choice: Choice, args: argparse.Namespace, steps: int, advance: Callable[[], None]
) -> Curve:
    """Train from the same weights as the others; all figures are exchanged afterwards, to spend nothing on them."""
    problem = make_problem(model, batch_size=args.batch_size)
    warm_up(model, choice, args)
    training = Training(problem, choice, args.seed)
    wire = WireMeter()
    losses, seconds, sent = [], [], []
    dist.barrier()
    before, began_s = wire.read(), time.monotonic()
    for _ in range(steps):
        seconds.append(time.monotonic() - began_s)
        losses.append(training.step())
        sent.append(wire.of_step(before, training, choice.options))
        before = wire.read()
        advance()
    accuracy = None if model == "autoencoder" else training.accuracy()
    training.close()
    bytes_so_far = accumulate(mean_over_ranks(torch.tensor(sent, dtype=torch.float64)), initial=0.0)
    return Curve(
        model,
        name,
        choice.as_json(),
        mean_over_ranks(torch.stack(losses)),
        seconds,
        [total / 1e6 for total in bytes_so_far][:-1],
        accuracy,
    )


def warm_up(model: str, choice: Choice, args: argparse.Namespace) -> None:
    """Train another model for some steps, so that no clock meets what is done only once in a process."""
    training = Training(make_problem(model, batch_size=args.batch_size), choice, args.seed + 1)
    for _ in range(WARM_UP_STEPS):
        training.step()
    training.close()


def sheet_of(study: Mapping[str, Any]) -> Sheet:
    """Return each optimizer's best configuration in the JSON of optimizer_study.py."""
    return {
        result["optimizer"]: Choice(result["choice"]["optimizer"], result["choice"]["options"])
        for result in study["results"]
        if result["choice"]["optimizer"] in ("sgd", "adam", "kfac")
    }


def plan(args: argparse.Namespace) -> list[tuple[str, Sheet, int]]:
    """Return what to train: the model, its optimizers, and for how many steps."""
    if args.from_study is None:
        return [(model, DEFAULTS[model], args.steps or 200) for model in args.model]
    study = json.loads(args.from_study.read_text())
    if args.model != [study["study"]]:
        raise ValueError(
            f"expected --model {study['study']} with {args.from_study}, got {' '.join(args.model)}; "
            "a study has one model"
        )
    if args.target is None and study["unit"] == "steps":
        args.target = study["target"]
    # The loss is measured before each step, and the study measures it after its last one, too.
    steps = study["budget"] + 1 if study["unit"] == "steps" else 200
    return [(study["study"], sheet_of(study), args.steps or steps)]


def spent(curve: Curve, target: float | None) -> dict[str, float | None]:
    """Return what the target took in steps, seconds and megabytes; None where it was not met."""
    step = None if target is None else curve.first(target)
    if step is None:
        return {"steps": None, "seconds": None, "megabytes": None}
    return {"steps": step, "seconds": curve.seconds[step], "megabytes": curve.megabytes[step]}


def cells(curve: Curve, target: float | None) -> Cells:
    """What the table says of a curve."""
    last = max(1, len(curve.losses) - 1)
    found: dict[str, Cell] = {
        "model": curve.model,
        "optimizer": curve.optimizer,
        "loss at the end": f"{curve.smoothed()[-1]:.4f}",
        "test accuracy": None if curve.accuracy is None else f"{curve.accuracy:.1%}",
        "ms per step": f"{1e3 * curve.seconds[-1] / last:.1f}",
        "MB per step": curve.megabytes[-1] / last,
    }
    to_target = spent(curve, target) if target else {}
    for name, value in to_target.items():
        found[f"{name} to target"] = None if value is None else f"{value:.4g}"
    return found


def draw_picture(curves: Sequence[Curve], target: float | None, source: str, path: Path) -> None:
    """Draw a row for each model: the loss over steps, over seconds, over bytes."""
    from matplotlib.figure import Figure

    models = list(dict.fromkeys(curve.model for curve in curves))
    figure = Figure(figsize=(12, 3.4 * len(models)), layout="constrained")
    rows = figure.subplots(len(models), len(PANELS), squeeze=False, sharey="row")
    for model, row in zip(models, rows, strict=True):
        for (quantity, label), panel in zip(PANELS, row, strict=True):
            for curve in curves:
                if curve.model == model:
                    panel.plot(getattr(curve, quantity), curve.smoothed(), label=curve.optimizer, lw=1.3)
            if target:
                panel.axhline(target, color="black", ls=":", lw=1)
            panel.set(xlabel=label + (f" ({source})" if quantity == "megabytes" else ""), yscale="log")
        row[0].set_ylabel(f"{model}: training loss")
        row[0].legend(fontsize=8)
    figure.savefig(path, dpi=110)


def report(curves: Sequence[Curve], args: argparse.Namespace, console: Console) -> dict[str, Any]:
    source = WireMeter().source
    found = {
        "world_size": dist.get_world_size(),
        "torch": torch.__version__,
        "bytes": source,
        "target": args.target,
        "curves": [{**asdict(curve), "to_target": spent(curve, args.target)} for curve in curves],
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "second_order.json").write_text(json.dumps(found, default=list) + "\n")
    draw_picture(curves, args.target, source, args.out / "second_order.png")
    title = "Digits: what each optimizer spent" + (f" to loss {args.target:.3f}" if args.target else "")
    show_table(console, title, (cells(curve, args.target) for curve in curves))
    console.print(f"{args.out / 'second_order.json'}, {args.out / 'second_order.png'}; bytes are {source}")
    return found


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", nargs="+", choices=sorted(DEFAULTS), default=["cnn", "vit"])
    parser.add_argument("--optimizer", nargs="+", help="only these, by the names in the table (default: all)")
    parser.add_argument("--steps", type=int, help="of each training (default 200, or the study's budget)")
    parser.add_argument("--batch-size", type=int, help="per rank (default 32; autoencoder: all images)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and order of images (default 0)")
    parser.add_argument("--from-study", type=Path, help="JSON of optimizer_study.py: its best configurations")
    parser.add_argument("--target", type=float, help="loss to be met (default: the study's)")
    parser.add_argument("--out", type=Path, default=Path("runs/second-order"), help="directory")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    planned = [
        (model, name, choice, steps)
        for model, sheet, steps in plan(args)
        for name, choice in sheet.items()
        if args.optimizer is None or name in args.optimizer
    ]
    with one_job():
        leads = dist.get_rank() == 0
        console = Console(stderr=True, quiet=not leads)
        curves = []
        with Progress(console=console) as progress:
            task = progress.add_task("", total=sum(steps for *_, steps in planned))
            for model, name, choice, steps in planned:
                progress.update(task, description=f"{model}, {name}")
                curves.append(train(model, name, choice, args, steps, lambda: progress.advance(task)))
        if leads:
            report(curves, args, Console(width=None if console.is_terminal else 140))


if __name__ == "__main__":
    main()

"""The command line of train.py."""

import argparse
import ast
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from _models import PRESETS


def parse_arguments(
    argv: Sequence[str] | None, hooks: Iterable[str], description: str | None = None
) -> argparse.Namespace:
    """Parse train.py's arguments. ``--preset`` sets defaults, which other arguments override."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model_arguments(parser.add_argument_group("model and data"))
    add_training_arguments(parser.add_argument_group("training"))
    add_averaging_arguments(
        parser.add_argument_group("averaging, for --hook local_sgd and elastic")
    )
    add_kfac_arguments(parser.add_argument_group("K-FAC, for --hook kfac"))
    add_run_arguments(parser.add_argument_group("devices, communication, files"), hooks)
    if preset := parser.parse_known_args(argv)[0].preset:
        parser.set_defaults(**vars(PRESETS[preset]))
    args = parser.parse_args(argv)
    args.model_options = {**args.model_options, **dict(args.model_option)}
    for name in ("batch_size", "accumulate", "log_every"):
        if getattr(args, name) < 1:
            parser.error(f"expected {name} >= 1, got {name}={getattr(args, name)}")
    if args.resume and args.checkpoint is None:
        parser.error(
            "expected --checkpoint PATH with --resume, got none; give the file to resume from"
        )
    if (args.hook == "muon") > (args.optimizer == "muon"):
        parser.error(f"expected --optimizer muon with --hook muon, got {args.optimizer}; give both")
    if args.optimizer == "muon" and args.hook in ("decoupled", "kfac"):
        parser.error(
            f"expected one optimizer for --hook {args.hook}, got muon, which is two; "
            "take --hook muon"
        )
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("expected a CUDA device, got none; leave --device out to train on the CPU")
    return args


def add_model_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--preset", choices=sorted(PRESETS), help="defaults for measuring: see _models.py"
    )
    group.add_argument(
        "--model", default="timm:resnet18", help="timm:NAME, torchvision:NAME, NAME, or gpt"
    )
    group.add_argument(
        "--model-option",
        action="append",
        default=[],
        type=key_and_value,
        metavar="KEY=VALUE",
        help="given to the model's constructor, e.g. depth=6; may be repeated",
    )
    group.set_defaults(model_options={})
    group.add_argument(
        "--data-dir", type=Path, help="images in train/CLASS and val/CLASS; default: digits"
    )
    group.add_argument(
        "--image-size", type=int, default=64, help="height and width in pixels (default 64)"
    )
    group.add_argument("--channels", type=int, default=3, help="1 for grey images (default 3)")
    group.add_argument(
        "--context", type=int, default=128, help="words per sample of the GPT (default 128)"
    )
    group.add_argument(
        "--vocabulary", type=int, default=2048, help="words the GPT knows (default 2048)"
    )
    group.add_argument(
        "--workers", type=int, default=0, help="processes that load data (default 0)"
    )


def add_training_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--epochs", type=int, default=5, help="(default 5)")
    group.add_argument("--steps", type=int, help="optimizer steps in all, instead of --epochs")
    group.add_argument(
        "--batch-size", type=int, default=32, help="per rank and backward (default 32)"
    )
    group.add_argument(
        "--accumulate", type=int, default=1, help="backwards per optimizer step (default 1)"
    )
    group.add_argument(
        "--optimizer", choices=("sgd", "adamw", "muon"), default="sgd", help="(default sgd)"
    )
    group.add_argument(
        "--lr", type=float, help="the highest (default 0.05 for sgd, 0.001 for adamw, muon)"
    )
    group.add_argument("--warmup-steps", type=int, default=10, help="(default 10)")
    group.add_argument("--eval-every", type=int, default=1, help="epochs; 0 for never (default 1)")
    group.add_argument("--amp", action="store_true", help="compute in bfloat16 where that is safe")
    group.add_argument(
        "--seed", type=int, default=0, help="of weights, samples, dropout (default 0)"
    )
    group.add_argument(
        "--deterministic", action="store_true", help="refuse operations that are not (GPU)"
    )


def add_averaging_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--sync-every", type=int, default=4, help="steps between two exchanges (default 4)"
    )
    group.add_argument(
        "--delay", type=int, default=0, help="steps that an exchange may take (default 0)"
    )
    group.add_argument(
        "--fragments", type=int, default=1, help="slices that leave one by one (default 1)"
    )
    group.add_argument(
        "--local-after", type=int, default=0, help="steps as by DDP before (default 0)"
    )
    group.add_argument(
        "--elastic-mode", choices=("sync", "async", "wild"), default="async", help="(default async)"
    )


def add_kfac_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--damping", type=float, default=0.001, help="of the factors (default 0.001)"
    )
    group.add_argument(
        "--kl-clip", type=float, default=0.001, help="bound of a step; 0: none (default 0.001)"
    )
    group.add_argument(
        "--factor-update-steps", type=int, default=1, help="steps between factors (default 1)"
    )
    group.add_argument(
        "--inv-update-steps", type=int, default=10, help="steps between solvers (default 10)"
    )
    group.add_argument(
        "--factors",
        choices=("global", "local"),
        default="global",
        help="of all ranks' data, or of the layer owner's alone, without traffic (default global)",
    )


def add_run_arguments(group: argparse._ArgumentGroup, hooks: Iterable[str]) -> None:
    group.add_argument(
        "--hook", choices=("none", *hooks), default="none", help="how gradients are exchanged"
    )
    group.add_argument(
        "--bucket-cap-mb",
        type=float,
        help="size of DDP's buckets (default: DDP's own; for decoupled a sixteenth of the model)",
    )
    group.add_argument(
        "--codec",
        choices=("int8", "int4", "half", "sidco", "powersgd"),
        help="of --hook compressed (default int8), decoupled and local_sgd (default none)",
    )
    group.add_argument(
        "--backend", choices=("gloo", "nccl"), help="(default: nccl for a GPU of each rank's own)"
    )
    group.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default auto)"
    )
    group.add_argument("--threads", type=int, help="of torch on the CPU (default: torch's choice)")
    group.add_argument(
        "--checkpoint", type=Path, help="file to save to, after every epoch and at the end"
    )
    group.add_argument(
        "--checkpoint-every", type=int, help="steps between checkpoints, instead of an epoch"
    )
    group.add_argument(
        "--resume", action="store_true", help="continue from --checkpoint if it exists"
    )
    group.add_argument(
        "--stop-after", type=int, metavar="N", help="stop after N steps of this run, to be resumed"
    )
    group.add_argument(
        "--log-json", help="file for one JSON object per line; {rank} stands for the rank"
    )
    group.add_argument(
        "--log-every", type=int, default=10, help="steps per line of output (default 10)"
    )


def key_and_value(text: str) -> tuple[str, Any]:
    """Parse ``depth=6`` or ``channels=(24,48)``. A value that is no Python literal is a string."""
    key, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE, got {text!r}")
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value

"""``crossover-ddp plan``: plans the stages, devices and order of micro-batches for a model."""

import argparse
import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from crossover_ddp.errors import CrossoverError

from .output import FINE, FOUND, USAGE, declare, say, whole

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from crossover_ddp.pipeline import Cluster, Profile

_MEASURE: Final = "measure"
"""The value of --cluster that stands for no file."""
_DTYPES: Final = ("float64", "float32", "bfloat16", "float16")
_EXAMPLES = """\
examples:
  crossover-ddp plan torchvision:vgg19 --cluster c.json --microbatches 16
  crossover-ddp plan mymodel:blocks --input 4,512 --cluster c.json --microbatches 8 --csv
  crossover-ddp plan mylm:blocks --tokens 4,512 --dtype bfloat16 --cluster c.json --microbatches 8
  torchrun --nproc-per-node 8 -m crossover_ddp.cli plan mylm:blocks --tokens 4,512 --device cuda \
    --cluster measure --microbatches 8
c.json for two nodes of two devices:
{"devices": [{"node": "a"}, {"node": "a"}, {"node": "b"}, {"node": "b"}],
"bandwidth_gbit": 100, "cards_gbit": {"a": 10, "b": 10}}
c.json for four equal devices: {"devices": 4, "bandwidth_gbit": 10}
MODEL is timm:NAME, torchvision:NAME, module:function that returns a list of layers, or the file of
a saved profile.
exit codes: 0 fine; 1 no plan: the model is no chain, or does not fit; 2 wrong usage
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the sub-command and its arguments."""
    about = (
        "Find stages, replicas, devices and the order of micro-batches, "
        "and compare with known designs."
    )
    command = declare(
        commands, "plan", run, "cut a model in pipeline stages for a cluster", about, _EXAMPLES
    )
    command.add_argument("model", metavar="MODEL")
    command.add_argument(
        "--cluster",
        required=True,
        metavar="FILE",
        help="JSON file of devices and bandwidths, or 'measure' under torchrun",
    )
    command.add_argument(
        "--microbatches",
        type=_counts,
        required=True,
        metavar="M",
        help="of a step; 4,8,16 tries these numbers for one batch, --input is for the first",
    )
    sample = command.add_mutually_exclusive_group()
    sample.add_argument(
        "--input", type=_shape, default=(2, 3, 224, 224), help="a micro-batch (2,3,224,224)"
    )
    sample.add_argument(
        "--tokens", type=_tokens, metavar="BATCH,LENGTH", help="a micro-batch of tokens"
    )
    command.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the layers")
    command.add_argument("--dtype", choices=_DTYPES, help="of parameters and inputs")
    command.add_argument("--autocast", choices=_DTYPES[2:], help="dtype for torch.autocast")
    command.add_argument("--stages", type=whole(1), help="the exact number of stages")
    command.add_argument("--max-stages", type=whole(1), help="default: as many as pay")
    command.add_argument("--max-replicas", type=whole(1), help="devices of one stage")
    command.add_argument(
        "--split", action="store_true", help="try a split backward, for torch's schedules"
    )
    command.add_argument(
        "--runtime",
        choices=("any", "torch"),
        default="any",
        help="torch: as many replicas of all stages (any)",
    )
    command.add_argument(
        "--recompute", action="store_true", help="layers may recompute forward in backward"
    )
    command.add_argument("--csv", action="store_true", help="torch's schedule; one device a stage")
    command.add_argument("--save", type=Path, metavar="FILE", help="write the plan as JSON")
    command.add_argument(
        "--save-profile", type=Path, metavar="FILE", help="write the measured profile"
    )


def _shape(text: str) -> tuple[int, ...]:
    sizes = text.split(",")
    if not all(size.isdecimal() and int(size) for size in sizes):
        raise argparse.ArgumentTypeError(f"expected sizes such as 2,3,224,224, got {text!r}")
    return tuple([int(size) for size in sizes])


def _counts(text: str) -> tuple[int, ...]:
    counts = text.split(",")
    if not all(count.isdecimal() and int(count) for count in counts):
        raise argparse.ArgumentTypeError(f"expected numbers such as 8 or 4,8,16, got {text!r}")
    return tuple([int(count) for count in counts])


def _tokens(text: str) -> tuple[int, ...]:
    shape = _shape(text)
    if len(shape) != 2:
        raise argparse.ArgumentTypeError(f"expected BATCH,LENGTH such as 4,512, got {text!r}")
    return shape


def run(parsed: argparse.Namespace) -> int:
    """Create a plan, print it, and save it if asked to. Return the exit code.

    Under torchrun, all ranks measure, and rank 0 does the rest.
    """
    is_first = os.environ.get("RANK", "0") == "0"
    if parsed.cluster == _MEASURE and "WORLD_SIZE" not in os.environ:
        say(
            "crossover-ddp plan: expected ranks to measure the links between them, got none; use "
            "torchrun -m crossover_ddp.cli plan, or give --cluster a file"
        )
        return USAGE
    try:
        with _ranks(parsed.device) as group, _progress(is_first):
            profiles = _profiles(parsed, group)
            cluster = _cluster(parsed, group)
        if is_first:
            _plan(parsed, profiles, cluster)
    except (OSError, ValueError, TypeError, CrossoverError) as error:
        say(f"crossover-ddp plan: {error}")
        return USAGE if isinstance(error, OSError) else FOUND
    return FINE


@contextlib.contextmanager
def _ranks(device: str) -> "Iterator[ProcessGroup | None]":
    """Yield the process group of the ranks that torchrun has started, or None without torchrun."""
    import torch
    import torch.distributed as dist

    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("expected a CUDA device, got none; use --device cpu")
    if "WORLD_SIZE" not in os.environ:
        yield None
        return
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


class _Lines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage())


@contextlib.contextmanager
def _progress(is_first: bool) -> Iterator[None]:
    """Write a line to standard error for each layer that rank 0 has measured."""
    logger = logging.getLogger("crossover_ddp.pipeline.profile")
    handler, level = _Lines(), logger.level
    if is_first:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _profiles(parsed: argparse.Namespace, group: "ProcessGroup | None") -> "dict[int, Profile]":
    """Return a profile for each number of micro-batches."""
    from crossover_ddp.pipeline import Profile

    first, *others = parsed.microbatches
    if parsed.model.endswith(".json"):
        if others:
            raise ValueError(
                f"expected one number of micro-batches for a saved profile, got {1 + len(others)}; "
                "give the model instead, or plan once for each profile"
            )
        return {first: Profile.load(parsed.model)}
    size, *rest = parsed.tokens or parsed.input
    batch = size * first
    profiles = {}
    for count in parsed.microbatches:
        if batch % count:
            raise ValueError(
                f"expected numbers of micro-batches that divide the batch of {batch}, got {count}; "
                "change --microbatches, or the first size of the sample"
            )
        profiles[count] = _profile(parsed, (batch // count, *rest), group)
    return profiles


def _profile(
    parsed: argparse.Namespace, shape: tuple[int, ...], group: "ProcessGroup | None"
) -> "Profile":
    import torch

    from crossover_ddp.pipeline import Profile
    from crossover_ddp.pipeline.chain import named_chain

    layers, sample = named_chain(parsed.model, shape, tokens=parsed.tokens is not None)
    return Profile.measure(
        layers,
        sample,
        device=parsed.device,
        dtype=getattr(torch, parsed.dtype) if parsed.dtype else None,
        autocast=getattr(torch, parsed.autocast) if parsed.autocast else None,
        process_group=group,
    )


def _cluster(parsed: argparse.Namespace, group: "ProcessGroup | None") -> "Cluster":
    from crossover_ddp.pipeline import Cluster

    if parsed.cluster == _MEASURE:
        return Cluster.measure(group)
    return Cluster.load(parsed.cluster)


def _plan(parsed: argparse.Namespace, profiles: "dict[int, Profile]", cluster: "Cluster") -> None:
    from crossover_ddp.pipeline import plan_pipeline

    if parsed.save_profile:
        profiles[parsed.microbatches[0]].save(parsed.save_profile)
    plan = plan_pipeline(
        profiles,
        cluster,
        stages=parsed.stages,
        max_stages=parsed.max_stages,
        max_replicas=1 if parsed.csv else parsed.max_replicas,
        split=parsed.split,
        runtime=parsed.runtime,
        recompute=parsed.recompute,
    )
    if parsed.save:
        plan.save(parsed.save)
    sys.stdout.write(plan.csv() if parsed.csv else f"{plan}\n")

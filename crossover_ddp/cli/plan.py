"""``crossover-ddp plan``: plans the stages, devices and order of micro-batches for a model."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from .output import FINE, FOUND, USAGE, declare, say, whole

if TYPE_CHECKING:
    from crossover_ddp.pipeline import Profile

_EXAMPLES = """\
examples:
  crossover-ddp plan torchvision:vgg19 --cluster c.json --microbatches 16
  crossover-ddp plan mymodel:blocks --input 4,512 --cluster c.json --microbatches 8 --csv
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
        "--cluster", type=Path, required=True, help="JSON file of devices and bandwidths"
    )
    command.add_argument("--microbatches", type=whole(1), required=True, help="of a step")
    command.add_argument(
        "--input", type=_shape, default=(2, 3, 224, 224), help="a micro-batch (2,3,224,224)"
    )
    command.add_argument("--max-stages", type=whole(1), help="default: as many as pay")
    command.add_argument("--max-replicas", type=whole(1), help="devices of one stage")
    command.add_argument(
        "--split", action="store_true", help="try a split backward, for torch's schedules"
    )
    command.add_argument("--csv", action="store_true", help="torch's schedule; one device a stage")
    command.add_argument("--save", type=Path, metavar="FILE", help="write the plan for Runner")
    command.add_argument(
        "--save-profile", type=Path, metavar="FILE", help="write the measured profile"
    )


def _shape(text: str) -> tuple[int, ...]:
    sizes = text.split(",")
    if not all(size.isdecimal() and int(size) for size in sizes):
        raise argparse.ArgumentTypeError(f"expected sizes such as 2,3,224,224, got {text!r}")
    return tuple([int(size) for size in sizes])


def run(parsed: argparse.Namespace) -> int:
    """Create a plan, print it, and save it if asked to. Return the exit code."""
    from crossover_ddp.pipeline import Cluster, plan_pipeline

    try:
        plan = plan_pipeline(
            _profile(parsed),
            Cluster.load(parsed.cluster),
            microbatches=parsed.microbatches,
            max_stages=parsed.max_stages,
            max_replicas=1 if parsed.csv else parsed.max_replicas,
            split=parsed.split,
        )
        if parsed.save:
            plan.save(parsed.save)
        sys.stdout.write(plan.csv() if parsed.csv else f"{plan}\n")
    except (OSError, ValueError, TypeError) as error:
        say(f"crossover-ddp plan: {error}")
        return USAGE if isinstance(error, OSError) else FOUND
    return FINE


def _profile(parsed: argparse.Namespace) -> "Profile":
    from crossover_ddp.pipeline import Profile

    if parsed.model.endswith(".json"):
        return Profile.load(parsed.model)
    from crossover_ddp.pipeline.chain import named_chain

    profile = Profile.measure(*named_chain(parsed.model, parsed.input))
    if parsed.save_profile:
        profile.save(parsed.save_profile)
    return profile

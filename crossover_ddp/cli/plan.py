"""``crossover-ddp plan``: stages, devices and the order of micro-batches for a model on a cluster."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from crossover_ddp._timeline import picture as timeline_picture
from crossover_ddp._timeline.spans import TimelineSpan

from .output import FINE, FOUND, USAGE, add_command, whole, write_json

if TYPE_CHECKING:
    from crossover_ddp.pipeline import Plan, Profile

_EXAMPLES = """\
examples:
  crossover-ddp plan torchvision:vgg19 --cluster c.json --microbatches 16
  crossover-ddp plan timm:resnet50 --cluster c.json --microbatches 16 --input 8,3,224,224 --picture plan.png
  crossover-ddp plan mymodel:blocks --input 4,512 --cluster c.json --microbatches 8 --csv
  crossover-ddp plan profile.json --cluster c.json --microbatches 16 --save plan.json

c.json for two nodes of two devices: {"devices": [{"node": "a"}, {"node": "a"}, {"node": "b"}, {"node": "b"}],
"bandwidth_gbit": 100, "cards_gbit": {"a": 10, "b": 10}}; for four alike: {"devices": 4, "bandwidth_gbit": 10}.
MODEL is timm:NAME, torchvision:NAME, module:function that returns a list of layers, or a profile that was saved.
exit codes: 0 fine; 1 no plan: the model is no chain, or does not fit; 2 wrong usage
"""
_KINDS = {"F": "forward", "B": "backward", "I": "backward", "W": "weights", "G": "gradients"}


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command."""
    command = add_command(
        commands,
        "plan",
        run,
        help="cut a model in pipeline stages for a cluster",
        description="Find stages, replicas, devices and the order of micro-batches, and compare with known designs.",
        examples=_EXAMPLES,
        json_help="the whole plan as JSON",
    )
    command.add_argument("model", metavar="MODEL")
    command.add_argument("--cluster", type=Path, required=True, help="JSON file of devices and bandwidths")
    command.add_argument("--microbatches", type=whole(1), required=True, help="of a step")
    command.add_argument(
        "--input", type=_shape, default=(2, 3, 224, 224), help="shape of one micro-batch; default 2,3,224,224"
    )
    command.add_argument("--max-stages", type=whole(1), help="default: as many as pay")
    command.add_argument(
        "--max-replicas", type=whole(1), help="devices of one stage; 1 for torch's own schedules"
    )
    command.add_argument(
        "--split", action="store_true", help="try a split backward too (zero bubble): for torch's schedules"
    )
    command.add_argument(
        "--csv", action="store_true", help="the compute-only schedule that torch reads; one device a stage"
    )
    command.add_argument("--picture", type=Path, metavar="FILE", help="draw the simulated step (.png, .svg)")
    command.add_argument("--save", type=Path, metavar="FILE", help="write the plan for Runner")
    command.add_argument("--save-profile", type=Path, metavar="FILE", help="write what was measured")


def _shape(text: str) -> tuple[int, ...]:
    try:
        shape = tuple([int(each) for each in text.split(",")])
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise argparse.ArgumentTypeError(f"expected sizes such as 2,3,224,224, got {text!r}")
    return shape


def run(parsed: argparse.Namespace) -> int:
    """Plan, and print, draw and save the plan; return the exit code."""
    if parsed.csv and (parsed.json or (parsed.max_replicas or 1) > 1):
        sys.stderr.write(
            "crossover-ddp plan: expected --csv with one device a stage and without --json, got --json or "
            "--max-replicas; torch's schedules know no replicas, and one output is enough\n"
        )
        return USAGE
    if parsed.picture and parsed.picture.suffix not in timeline_picture.FORMATS:
        sys.stderr.write(
            f"crossover-ddp plan: expected a picture of {' or '.join(timeline_picture.FORMATS)}, got {parsed.picture}\n"
        )
        return USAGE
    from crossover_ddp.pipeline import Cluster, plan_pipeline

    try:
        cluster = Cluster.load(parsed.cluster)
        profile = _profile(parsed)
        plan = plan_pipeline(
            profile,
            cluster,
            microbatches=parsed.microbatches,
            max_stages=parsed.max_stages,
            max_replicas=1 if parsed.csv else parsed.max_replicas,
            split=parsed.split,
        )
        _show(plan, parsed)
    except OSError as error:
        sys.stderr.write(f"crossover-ddp plan: expected files that can be read and written, got {error}\n")
        return USAGE
    except ImportError:
        sys.stderr.write(f"crossover-ddp plan: {timeline_picture.MISSING_MATPLOTLIB}\n")
        return USAGE
    except (ValueError, TypeError) as error:
        sys.stderr.write(f"crossover-ddp plan: {error}\n")
        return FOUND
    return FINE


def _profile(parsed: argparse.Namespace) -> "Profile":
    from crossover_ddp.pipeline import Profile

    if parsed.model.endswith(".json"):
        return Profile.load(parsed.model)
    from .chains import load_chain

    layers, sample = load_chain(parsed.model, parsed.input)
    sys.stderr.write(
        f"timing {len(layers)} layers on this machine, a micro-batch of {list(parsed.input)} …\n"
    )
    profile = Profile.measure(layers, sample)
    if parsed.save_profile:
        profile.save(parsed.save_profile)
    return profile


def _show(plan: "Plan", parsed: argparse.Namespace) -> None:
    text = plan.csv() if parsed.csv else f"{plan}\n"
    if parsed.picture:
        title = f"{len(plan.stages)} stages, {plan.microbatches} micro-batches, {plan.step_s:.4g} s a step, simulated"
        timeline_picture.draw(timeline_spans(plan), parsed.picture, title=title, window_s=(0.0, None))
    if parsed.save:
        plan.save(parsed.save)
    if parsed.json:
        write_json(plan.to_json())
    else:
        sys.stdout.write(text)


def timeline_spans(plan: "Plan") -> list[TimelineSpan]:
    """Return the simulated step for the timeline's picture: forward and backward in colours of their own."""
    return [
        TimelineSpan(
            _KINDS[span.action.kind],
            span.device,
            plan.devices[span.device],
            "exchange" if span.sends else "compute",
            span.begin_s,
            span.end_s,
            {"action": str(span.action)},
        )
        for span in plan.spans
    ]

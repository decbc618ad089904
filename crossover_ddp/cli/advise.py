"""``crossover-ddp advise``: measures C, N and M over some steps of a job, and predicts speed-ups.

C  compute time of a step, on the slowest rank
N  exposed communication: the rest of the step
M  time for which the step's gradients are on the wire
"""

import argparse
import json
import math
import os
import re
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final, NamedTuple

from crossover_ddp._system import environment

from . import rehearsal, step_meter
from .jobs import JobProcess, run_until, signals_blocked
from .output import FINE, FOUND, USAGE, columns, declare, say, whole, write_json
from .run import command_words

_EXAMPLES = """\
examples:
  crossover-ddp advise -- torchrun --nproc-per-node 2 train.py --lr 0.1   runs some steps of it
  crossover-ddp advise --link 10gbit --model torchvision:resnet50 --ranks 8   without a run

The script needs no hook: its steps are those of plain DDP, a hook that it registers is left out.
exit codes: 0 there is advice, also if it is "do not bother"; 1 nothing could be measured;
2 wrong usage
"""
_REHEARSAL_S: Final = 120.0
"""How long ranks may take to rehearse."""
_WORTH: Final = 1.05
"""The least speed-up that is worth a change.

It is also the least ratio of the step time to C for which any change is advised.
"""
_BACKWARD_SHARE: Final = 2 / 3
"""The part of C that is assumed to be backward where it is not measured."""
_INT8_BYTES: Final = 0.26
"""The bytes on the wire with `Int8`, divided by the bytes with plain DDP."""
_WIRE_OVER_COMPUTE: Final = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)  # the rows of docs/choosing.md
_UNITS: Final = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}


_ACCUMULATION: Final = "accumulation"
_ONCE: Final = (
    "gradients travel once in several micro-batches, so M is to be compared with all of C"
)


class Figures(NamedTuple):
    """The figures of one job's step. Times are in seconds."""

    compute_s: float
    exposed_s: float
    wire_s: float
    size_bytes: float
    ranks: int
    # The part of C that is the last backward. Communication can hide behind it.
    backward_share: float = _BACKWARD_SHARE
    # The training forwards of a step, more than one if gradients are accumulated.
    forwards: float = 1.0
    # GradScaler and the like that the script uses; see `step_meter`.
    seen: tuple[str, ...] = ()
    # The time of a stub's step with each way of `rehearsal.py`; empty without a rehearsal.
    rehearsed: Mapping[str, float] = {}
    # The nodes, if each has several ranks and as many as the others; otherwise as many as ranks.
    nodes: int = 0
    # Whether FSDP2 shards the model inside of each node. Then M is of the hop between nodes.
    sharded: bool = False

    @property
    def step_s(self) -> float:
        """The time of a step, C + N."""
        return self.compute_s + self.exposed_s

    @property
    def hooks_wire_s(self) -> float:
        """M with this package's hooks without a codec, see docs/nodes.md."""
        if self.sharded or not 1 < self.nodes < self.ranks:
            return self.wire_s
        return self.wire_s * (1 - 1 / self.nodes) / (1 - 1 / self.ranks)

    def speedup(self, compute_s: float, wire_s: float) -> float:
        """Return the speed-up if a step takes the longer of these two times. It is at least 1."""
        return self.step_s / min(self.step_s, max(compute_s, wire_s))

    @property
    def backward_s(self) -> float:
        """The time of the last backward, the only one that can hide reduce-scatters."""
        return self.backward_share * self.compute_s

    @property
    def forward_s(self) -> float:
        """The time of the first forward, the only one that can hide gathers."""
        return max(0.0, self.compute_s / max(1.0, self.forwards) - self.backward_s)

    def deferred_s(self) -> float:
        """Return the step time if reduce-scatters overlap backward and gathers overlap forward."""
        half_s = self.hooks_wire_s / 2
        hidden_s = max(self.backward_s, half_s) + max(self.forward_s, half_s)
        return hidden_s + self.compute_s - self.backward_s - self.forward_s

    def behind_backward_s(self, wire_s: float) -> float:
        """Return the step time if gradients are on the wire for ``wire_s``, starting with backward."""
        return self.compute_s - self.backward_s + wire_s

    def after_rehearsal_s(self, way: str) -> float:
        """Return the step time with a way that was rehearsed: it saves as much as for the stub."""
        saved_s = self.rehearsed[rehearsal.WHOLE] - self.rehearsed[way]
        return max(self.compute_s, self.step_s - saved_s)


class Method(NamedTuple):
    """A method that hides or shortens communication."""

    name: str
    # Returns how many times faster steps can become, at best.
    bound: Callable[[Figures], float]
    # The part of the bound that measurements have reached (docs/measurements.md).
    reached: float
    # The line to paste into the script.
    line: str
    caveat: str
    # The method's name in `rehearsal.py`; None if it is not rehearsed.
    way: str | None = None
    # The effects on this method of names in ``seen``.
    notes: Mapping[str, str] = {}

    def expected(self, figures: Figures) -> float:
        """Return how many times faster steps are expected to become.

        It is below 1 if the processor time of messages costs more than is hidden.
        """
        if self.way is None or not figures.rehearsed:
            return self.reached * self.bound(figures)
        return min(self.bound(figures), figures.step_s / figures.after_rehearsal_s(self.way))

    def pays_from(self, figures: Figures) -> float:
        """Return the N/C from which on it is worth it, if all else is as in ``figures``."""
        step_s = figures.step_s / self.expected(figures)
        return max(_WORTH - 1, _WORTH * step_s / figures.compute_s - 1)


def _split_bound(figures: Figures) -> float:
    return figures.speedup(figures.compute_s, figures.behind_backward_s(figures.hooks_wire_s))


def _crossover_bound(figures: Figures) -> float:
    pair_s = max(
        2 * figures.compute_s, figures.step_s, 2 * min(figures.hooks_wire_s, figures.step_s)
    )
    return 2 * figures.step_s / pair_s


def _decoupled_bound(figures: Figures) -> float:
    return figures.speedup(figures.compute_s, figures.deferred_s())


def _half_bound(figures: Figures) -> float:
    return figures.speedup(figures.compute_s, figures.behind_backward_s(figures.wire_s / 2))


def _int8_bound(figures: Figures) -> float:
    return figures.speedup(
        figures.compute_s, figures.behind_backward_s(_INT8_BYTES * figures.hooks_wire_s)
    )


CROSSOVER: Final = Method(
    "crossover (two sibling jobs)",
    _crossover_bound,
    0.97,  # 2 of 17 measured rows are more than a tenth off
    "model.register_comm_hook(CrossoverState(), crossover_hook)",
    "over one job after the other; needs a second job of yours on the same devices, "
    "and memory for both",
)
DECOUPLED: Final = Method(
    "decoupled training",
    _decoupled_bound,
    0.93,  # all but 4 of 21 measured rows are within 12 %
    "model.register_comm_hook(AutoState(optimizer), auto_hook)",
    "it compares itself with plain DDP in the first steps; see docs/auto.md",
    rehearsal.DEFERRED,
    {
        "GradScaler": "steps stay deferred",
        "clipping": "steps stay deferred",
        "EMA": "an average that is updated after step() makes updates wait; call state.follow(ema)",
        _ACCUMULATION: "hides communication behind the first forward and the last backward only",
        "torch.compile": 'compile with backend=crossover_ddp.compiled("inductor"), or forward '
        "begins when all updates have arrived",
        "torch.compile of parts": "each part begins when its own updates have arrived",
    },
)
HALF: Final = Method(
    "torch's fp16_compress_hook",
    _half_bound,
    0.94,  # measured with one model
    "model.register_comm_hook(None, fp16_compress_hook)",
    "from torch.distributed.algorithms.ddp_comm_hooks.default_hooks; "
    "rounds gradients to half precision",
    rehearsal.HALF,
    notes={
        "GradScaler": "gradients travel scaled, so some overflow in half precision",
        _ACCUMULATION: _ONCE,
    },
)
INT8: Final = Method(
    "a codec, Int8()",
    _int8_bound,
    0.9,  # two models reached 0.87 and 0.98
    "model.register_comm_hook(CompressedState(codec=Int8()), compressed_hook)",
    "rounds gradients; changes the losses a little",
    rehearsal.INT8,
    notes={
        "GradScaler": "pass loss_scale=scaler.get_scale to CompressedState",
        _ACCUMULATION: _ONCE,
    },
)
METHODS: Final = (CROSSOVER, DECOUPLED, HALF, INT8)

_BETWEEN: Final = 'process_group=mesh["between"].get_group()'
_HOOK_OF_FSDP: Final = "crossover_ddp.fsdp.register_comm_hook(model, {}); see docs/fsdp.md"
_SPLIT_OF_FSDP: Final = Method(
    "the split between nodes",
    _split_bound,
    0.9,
    _HOOK_OF_FSDP.format('mesh["between"].get_group(), reduce_scatter_all_gather_hook'),
    "the same gradients; on CPUs they travel while backward continues, with NCCL nothing changes",
)
_METHODS_OF_FSDP: Final = (
    CROSSOVER._replace(line=_HOOK_OF_FSDP.format(f"CrossoverState({_BETWEEN}), crossover_hook")),
    _SPLIT_OF_FSDP,
    INT8._replace(
        line=_HOOK_OF_FSDP.format(f"CompressedState(Int8(), {_BETWEEN}), compressed_hook"),
        way=None,
    ),
)


def methods_for(figures: Figures) -> Sequence[Method]:
    """Return the methods for a job, those that keep its results first."""
    return _METHODS_OF_FSDP if figures.sharded else METHODS


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the sub-command and its arguments."""
    about = (
        "Measure a job's compute, exposed communication and wire time; "
        "predict what would make it faster."
    )
    parser = declare(commands, "advise", run, "what would make this job faster?", about, _EXAMPLES)
    parser.usage = (
        "crossover-ddp advise [--json] [--steps N] -- COMMAND | --link RATE --model M --ranks N"
    )
    parser.add_argument(
        "--steps", type=whole(17), default=41, metavar="N", help="end after about N (41)"
    )
    parser.add_argument(
        "--link", type=_rate, metavar="RATE", help="of a node's card: 10gbit, 100mbit"
    )
    parser.add_argument(
        "--model",
        type=_model,
        metavar="MODEL",
        help="torchvision:NAME or timm:NAME; or its parameters of 4 bytes, 25.6M, or bytes, 102MB",
    )
    parser.add_argument("--ranks", type=whole(2), metavar="N")
    parser.add_argument(
        "--nodes",
        type=whole(2),
        metavar="N",
        help="nodes with several ranks each (as many as ranks)",
    )
    parser.add_argument("--json", action="store_true", help="figures and factors as JSON")


def _number(text: str, unit: str, such_as: str) -> float:
    found = re.fullmatch(rf"(\d+\.?\d*)([kmg]?){unit}", text.lower())
    if not found or not float(found[1]):
        raise argparse.ArgumentTypeError(f"expected a {such_as}, got {text!r}")
    return float(found[1]) * _UNITS[found[2]]


def _rate(text: str) -> float:
    """Parse a rate such as ``10gbit``, and return it in bytes per second."""
    return _number(text, "bit", "rate such as 10gbit or 100mbit") / 8


def _model(text: str) -> str | float:
    """Parse a model's name or size. Return the name, or the size in bytes."""
    if ":" in text:
        return text
    such_as = "model such as timm:resnet50, or its size: 25.6M (parameters) or 102MB"
    if text.lower().endswith("b"):
        return _number(text, "b", such_as)
    return 4 * _number(text, "", such_as)


def run(arguments: argparse.Namespace) -> int:
    """Print the advice for a measured or a described job, and return the exit code."""
    described = [
        each for each in (arguments.link, arguments.model, arguments.ranks) if each is not None
    ]
    commands = [words for words in arguments.groups if words]
    if len(commands) + len(described) / 3 != 1:
        say(
            "crossover-ddp advise: expected -- COMMAND, or --link, --model and --ranks, "
            "got neither or both"
        )
        return USAGE
    try:
        if described:
            nodes = arguments.nodes or arguments.ranks
            sys.stdout.write(_table(arguments.link, arguments.model, arguments.ranks, nodes))
            return FINE
        words = command_words(commands[0][0]) if len(commands[0]) == 1 else commands[0]
        found = _measured(words, arguments.steps)
    except (OSError, ValueError) as error:
        say(f"crossover-ddp advise: {error}")
        return FOUND
    if arguments.json:
        factors = {
            each.name: {"expected": each.expected(found), "bound": each.bound(found)}
            for each in methods_for(found)
        }
        write_json({"figures": found._asdict(), "factors": factors, "verdict": verdict(found)})
    else:
        sys.stdout.write(_report(found))
    return FINE


# --- measuring ------------------------------------------------------------------------------------


def metered(directory: Path, setting: str, value: object) -> dict[str, str]:
    """Copy the step meter to ``directory``, and return the variables that make a job run it.

    ``setting`` is the name of a file that the meter reads, and ``value`` its text. Delete the
    recordings of earlier runs in that directory.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for old in directory.glob("rank-*.jsonl"):
        old.unlink()
    shutil.copy(step_meter.__file__, directory / "sitecustomize.py")
    (directory / setting).write_text(str(value))
    path = os.pathsep.join(filter(None, [str(directory), os.environ.get("PYTHONPATH")]))
    return {"PYTHONPATH": path}


def measuring(directory: Path, blocks: int = 0) -> dict[str, str]:
    """Return the variables that make a job measure itself, and record to ``directory``.

    After this number of ``blocks`` the job rehearses each way to exchange gradients; if it is 0, it
    does not.
    """
    # With DISABLE, the states of this package leave the optimizer alone.
    return {**metered(directory, step_meter.BLOCKS, blocks), environment.DISABLE: "1"}


def _blocks(directory: Path) -> list[list[dict[str, Any]]]:
    """Return the blocks of each rank that has recorded blocks of both kinds."""
    ranks = [[line for line in lines if "apart" in line] for lines in recorded(directory)]
    return [blocks for blocks in ranks if any(block["apart"] for block in blocks)]


def _rehearsals(directory: Path) -> list[dict[str, float] | None]:
    """Return the rehearsal of each rank that has ended it. None stands for one that failed."""
    lines = [line for lines in recorded(directory) for line in lines]
    return [line["rehearsed"] for line in lines if "rehearsed" in line]


def recorded(directory: Path) -> list[list[dict[str, Any]]]:
    """Return the lines that each rank has recorded."""
    texts = [path.read_text() for path in directory.glob("rank-*.jsonl")]
    # A line without a closing brace is still being written.
    return [
        [json.loads(line) for line in text.splitlines() if line.endswith("}")] for text in texts
    ]


def figures(directory: Path) -> Figures:
    """Return a job's figures, computed from what its ranks on this machine have recorded.

    Raises ``ValueError`` if there are too few steps, or fewer than two ranks.
    """
    ranks = _blocks(directory)
    if not ranks:
        least = step_meter.WARM_UP_STEPS + 2 * step_meter.BLOCK_STEPS
        raise ValueError(
            f"expected {least} steps of a script that trains with DistributedDataParallel, or with "
            "fully_shard on a mesh of two dimensions, got fewer: other wrappers are not measured, "
            "and python -I or -E keeps the meter out"
        )
    if max(block["ranks"] for blocks in ranks for block in blocks) < 2:
        raise ValueError("expected at least two ranks, got one, which exchanges nothing")
    # The slowest rank determines the step time and C. M comes from the rank with the least M.
    step_s = max(
        median(block["step_s"] for block in blocks if not block["apart"]) for blocks in ranks
    )
    apart = [[block for block in blocks if block["apart"]] for blocks in ranks]
    computed_s = [
        [block["step_s"] - block["met_s"] - block["wire_s"] for block in blocks] for blocks in apart
    ]
    compute_s = max(map(median, computed_s))
    backward_s = sum(block["backward_s"] for blocks in apart for block in blocks)
    measured_share = backward_s / sum(map(sum, computed_s))
    last = apart[0][-1]
    seen = {each for blocks in ranks for each in blocks[-1]["seen"]}
    if last["forwards"] > 1:
        seen.add(_ACCUMULATION)
    return Figures(
        compute_s=min(compute_s, step_s),
        exposed_s=max(0.0, step_s - compute_s),
        wire_s=min(median(block["wire_s"] for block in blocks) for blocks in apart),
        size_bytes=last["bytes"],
        ranks=last["ranks"],
        nodes=last["nodes"],
        sharded=last["sharded"],
        # The measured share is 0 if the script does not call DDP's own forward.
        backward_share=measured_share or _BACKWARD_SHARE,
        forwards=last["forwards"],
        seen=tuple(sorted(seen)),
        rehearsed=_means(_rehearsals(directory)) if measured_share else {},
    )


def _means(ranks: Sequence[Mapping[str, float] | None]) -> dict[str, float]:
    """Return the means over ranks; nothing if a rank has not rehearsed."""
    known = [each for each in ranks if each]
    if not known or len(known) < len(ranks):
        return {}
    return {way: fmean([each[way] for each in known]) for way in known[0]}


def _steps(blocks: int) -> int:
    return step_meter.WARM_UP_STEPS + blocks * step_meter.BLOCK_STEPS


def _measured(words: Sequence[str], steps: int) -> Figures:
    """Run a command until it has recorded enough steps, then end all its processes."""
    wanted = 2 * round((steps - step_meter.WARM_UP_STEPS) / (2 * step_meter.BLOCK_STEPS))
    # Use a new group: the job must not take turns with siblings.
    group = f"advise-{os.getpid()}-{secrets.token_hex(3)}"
    with (
        signals_blocked() as numbers,
        tempfile.TemporaryDirectory(prefix="crossover-advise-") as name,
    ):
        directory = Path(name)
        variables = {**os.environ, environment.GROUP: group, **measuring(directory, wanted)}
        job = JobProcess(words, variables, directory / "log")
        shown = 0
        end_s = math.inf

        def is_over() -> bool:
            """Show the progress, and return whether all ranks have rehearsed."""
            nonlocal shown, end_s
            done = min(wanted, min(map(len, _blocks(directory)), default=0))
            if done > shown:
                say(f"{_steps(done)} of {_steps(wanted)} steps")
                if done == wanted:
                    say("rehearsing each way with a stub of the model, if it is one of DDP")
                    end_s = time.monotonic() + _REHEARSAL_S
            shown = done
            rehearsed = len(_rehearsals(directory)) >= len(_blocks(directory)) > 0
            return rehearsed or time.monotonic() >= end_s

        code = run_until(job, numbers, is_over)
        how = job.how_it_ended(code)
        try:
            found = figures(directory)
        except ValueError as error:
            raise ValueError(f"{error}\n{how}") from error
        if code:
            say(how)
        return found


# --- advising -------------------------------------------------------------------------------------


def verdict(found: Figures) -> str:
    """Return the advice.

    A method that changes the results is advised only if no other method is worth it.
    """
    if found.step_s < _WORTH * found.compute_s:
        return (
            f"do not bother: communication costs only {found.exposed_s / found.step_s:.1%} of a "
            f"step, N/C {found.exposed_s / found.compute_s:.2f}; nothing pays below {_WORTH - 1:.2f}"
        )

    def expected(method: Method) -> float:
        return method.expected(found)

    methods = methods_for(found)
    best = max(methods[:2], key=expected)  # these keep the results
    if expected(best) < _WORTH:
        best = max(methods[2:], key=expected)
    if expected(best) < _WORTH:
        return "do not bother: none of these is expected to bring 5 %"
    return f"{best.name}: {expected(best):.2f}× expected, {best.bound(found):.2f}× at best"


def _report(found: Figures) -> str:
    rows = [
        [
            each.name,
            f"{each.expected(found):.2f}×",
            f"{each.bound(found):.2f}×",
            f"{each.pays_from(found):.2f}",
        ]
        for each in methods_for(found)
    ]
    advice = verdict(found)
    lines = ""
    for method in methods_for(found):
        if method.expected(found) >= _WORTH and not advice.startswith("do not"):
            lines += f"{method.name}: {method.caveat}\n    {method.line}\n"
    assumed = ", assumed" if found.backward_share == _BACKWARD_SHARE else ""
    return (
        f"{found.ranks} ranks, {found.size_bytes / 1e6:.3g} MB of gradients\n"
        f"a step {_ms(found.step_s)} = C {_ms(found.compute_s)} compute "
        f"({found.backward_share:.0%} backward{assumed}) + N {_ms(found.exposed_s)} exposed "
        f"communication ({found.exposed_s / found.step_s:.0%}); M {_ms(found.wire_s)} on the wire\n"
        f"N/C {found.exposed_s / found.compute_s:.2f}, M/C {found.wire_s / found.compute_s:.2f}\n"
        f"\n{columns(['what', 'expected', 'at best', 'pays from N/C'], rows)}\n"
        f"{_seen(found)}{lines}→ {advice}\n"
    )


def _seen(found: Figures) -> str:
    """Return the names in ``seen``, each with its effect on the methods."""
    text = ""
    for each in found.seen:
        micro_batches = f" ({found.forwards:.3g} micro-batches)" if each == _ACCUMULATION else ""
        noted = [
            f"    {method.name}: {method.notes[each]}"
            for method in methods_for(found)
            if each in method.notes
        ]
        text += "\n".join([f"the script uses {each}{micro_batches}", *noted]) + "\n"
    return text


def _ms(length_s: float) -> str:
    """Return a time in milliseconds with three digits, so that C and N add up to a step."""
    return f"{length_s * 1e3:.{0 if length_s >= 0.1 else 1 if length_s >= 0.01 else 2}f} ms"


def _table(bytes_per_s: float, model: str | float, ranks: int, nodes: int) -> str:
    """Return a table of predictions for a model on a link, with one row for each ratio M/C.

    Raises ``ValueError`` if nodes cannot have equally many ranks.
    """
    if ranks % nodes:
        raise ValueError(
            f"expected equally many ranks on each node, got {ranks} ranks on {nodes} nodes; with other numbers all "
            "ranks exchange gradients directly: leave --nodes out"
        )
    sizes = []
    if isinstance(model, str):
        from crossover_ddp.pipeline.chain import gradient_sizes  # needs torch

        sizes = gradient_sizes(model)
    size_bytes = model if isinstance(model, float) else sum(sizes)
    wire_s = 2 * (ranks - 1) / ranks * size_bytes / bytes_per_s
    rows = []
    for ratio in _WIRE_OVER_COMPUTE:
        compute_s = wire_s / ratio
        waited_s = max(0.0, wire_s - _BACKWARD_SHARE * compute_s)
        found = Figures(compute_s, waited_s, wire_s, size_bytes, ranks, nodes=nodes)
        factors = [f"{each.expected(found):.2f}× ({each.bound(found):.2f}×)" for each in METHODS]
        rows.append([f"{ratio:g}", _ms(compute_s), _ms(found.step_s), *factors])
    gradients = f"{len(sizes)} gradients of {model}" if sizes else "gradients"
    on_nodes = f" on {nodes} nodes (M {_ms(found.hooks_wire_s)} with the hooks)" * (nodes < ranks)
    return (
        f"M {_ms(wire_s)}: {size_bytes / 1e6:.3g} MB of {gradients}, {ranks} ranks{on_nodes}, "
        f"{bytes_per_s * 8 / 1e9:g} Gbit/s\n"
        f"by the compute C of a step; expected (at best):\n\n"
        f"{columns(['M/C', 'C', 'plain DDP', *(each.name for each in METHODS)], rows)}"
    )

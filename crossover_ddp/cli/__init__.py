"""The ``crossover-ddp`` command: inspects this machine and the jobs that take turns on it."""

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from itertools import pairwise

from crossover_ddp import __version__
from crossover_ddp.cli import advise, compare, doctor, plan, run, status, timeline
from crossover_ddp.cli.output import FINE, INTERRUPTED

_EXAMPLES = """\
examples:
  crossover-ddp doctor           is this machine ready?
  crossover-ddp advise -- torchrun --nproc-per-node 2 train.py   what would make this job faster?
  crossover-ddp compare -- 'torchrun old.py' -- 'torchrun new.py'   did a change help?
  crossover-ddp run -- 'torchrun train.py --lr 0.1' -- 'torchrun train.py --lr 0.2'
  crossover-ddp run --commands sweep.txt --gpus-each 1   each job on its own GPU
  crossover-ddp status           who computes, who queues?
  crossover-ddp timeline DIR     who computed, who communicated when
  crossover-ddp plan torchvision:vgg19 --cluster c.json --microbatches 16   pipeline stages

exit codes: 0 fine; 1 something to fix, or nothing found; 2 wrong usage;
run: see crossover-ddp run --help
"""
_WITH_COMMANDS = ("advise", "compare", "run")


def parser() -> argparse.ArgumentParser:
    """Return the parser for the command and all its sub-commands."""
    parser = argparse.ArgumentParser(
        prog="crossover-ddp",
        description="Jobs that take turns on shared devices: look at them, and at the machine.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"crossover-ddp {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (status, doctor, run, timeline, advise, compare, plan):
        module.add_parser(commands)
    return parser


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments. In ``_WITH_COMMANDS``, the words after each ``--`` form a group."""
    # argparse knows only one "--", and its versions treat that one differently.
    bounds = [len(words)]
    if words[:1] and words[0] in _WITH_COMMANDS:
        bounds = [place for place, word in enumerate(words) if word == "--"] + bounds
    groups = [list(words[begin + 1 : end]) for begin, end in pairwise(bounds)]
    return parser().parse_args(words[: bounds[0]], argparse.Namespace(groups=groups))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    ``arguments`` defaults to the arguments of this process. Like argparse, raise ``SystemExit(2)``
    on wrong usage.
    """
    _reopen_closed_streams()
    if "_ARGCOMPLETE" in os.environ:  # the shell asks for completions
        with contextlib.suppress(ImportError):
            import argcomplete

            argcomplete.autocomplete(parser())
    parsed = parse(list(sys.argv[1:] if arguments is None else arguments))
    try:
        code: int = parsed.run(parsed)
        sys.stdout.flush()  # here, because Python's own flush at exit cannot change the exit code
    except BrokenPipeError:  # the reader has closed the pipe, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FINE
    except KeyboardInterrupt:  # pressed before there was anything to show
        return INTERRUPTED
    return code


def _reopen_closed_streams() -> None:
    """Reopen closed standard streams on /dev/null. For example, ``2>&-`` closes one.

    Otherwise the next file to be opened would get descriptor 0, 1 or 2, and receive output.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)

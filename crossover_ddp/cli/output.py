"""Output of commands: JSON, which needs nothing else installed, tables, which need rich, and exit codes."""

import argparse
import contextlib
import dataclasses
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from crossover_ddp._turns.slots import GROUP_NAME

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

FINE: Final = 0
FOUND: Final = 1
"""Something to mend was found, or nothing was there to show."""
USAGE: Final = 2
"""The command was called wrongly, or a library that it needs is missing."""
INTERRUPTED: Final = 130
"""Ctrl-C, as shells number it."""


def add_command(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    run: Callable[[argparse.Namespace], int],
    *,
    help: str,
    description: str,
    examples: str,
    json_help: str = "JSON instead of a table",
) -> argparse.ArgumentParser:
    """Declare a sub-command with ``--json``; ``run`` returns its exit code. Returns its parser, to add arguments to."""
    parser = commands.add_parser(
        name,
        help=help,
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help=json_help)
    parser.set_defaults(run=run)
    return parser


def declare(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    run: Callable[[argparse.Namespace], int],
    help: str,
    about: str,
    examples: str,
) -> argparse.ArgumentParser:
    """Declare a sub-command; ``run`` returns its exit code. Returns its parser, to add arguments to."""
    form = argparse.RawDescriptionHelpFormatter
    parser = commands.add_parser(name, help=help, description=about, epilog=examples, formatter_class=form)
    parser.set_defaults(run=run)
    return parser


class _Gone(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        what = f"{option_string} does nothing any more, and goes in the next version: {self.const}"
        sys.stderr.write(f"{parser.prog}: {what}\n")


def forget(parser: argparse.ArgumentParser, gone: Mapping[str, str], flags: Sequence[str] = ()) -> None:
    """Accept options that have gone for one version; who gives one is told what happens instead.

    Args:
        parser: of the command.
        gone: options, and what happens instead of each.
        flags: those among them that have no value.
    """
    for option, instead in gone.items():
        nargs = 0 if option in flags else "?"
        parser.add_argument(option, action=_Gone, nargs=nargs, const=instead, help=argparse.SUPPRESS)


def say(text: str) -> None:
    """Write a line to standard error; where nobody can read it (a full disk, a terminal that is gone) nothing ends."""
    with contextlib.suppress(OSError):
        os.write(sys.stderr.fileno(), f"{text}\n".encode(errors="replace"))


def columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows below their head, in columns."""
    widths = [max(len(row[place]) for row in [head, *rows]) for place in range(len(head))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [head, *rows]
    ]
    return "".join(f"{line.rstrip()}\n" for line in lines)


def group_name(text: str) -> str:
    """Read the name of a group; for ``type=``."""
    if not GROUP_NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"expected 1-64 letters, digits, '.', '_', '-', as in CROSSOVER_GROUP, got {text!r}"
        )
    return text


def seconds(least: float = -math.inf, most: float = math.inf) -> Callable[[str], float]:
    """Return a reader of an argument in seconds, from ``least`` to ``most``; for ``type=``."""
    wanted = f"{least:g} to {most:g} seconds" if math.isfinite(most) else "a number of seconds"

    def read(text: str) -> float:
        try:
            found = float(text)
        except ValueError:
            found = math.nan  # in no range
        if not least <= found <= most:
            raise argparse.ArgumentTypeError(f"expected {wanted}, got {text!r}")
        return found

    return read


def whole(least: int) -> Callable[[str], int]:
    """Return a reader of an argument that is a whole number from ``least`` on; for ``type=``."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected a whole number from {least} on, got {text!r}")
        return int(text)

    return read


class MissingPackageError(Exception):
    """A package of the extra ``cli`` is missing; the text says what to do."""


def require(name: str) -> None:
    """Raise `MissingPackageError` if a package of the extra ``cli`` is not there: rich for tables, or psutil."""
    try:
        __import__(name)
    except ImportError as error:
        raise MissingPackageError(
            f"crossover-ddp: expected the package {name}, got none; pip install 'crossover_ddp[cli]' (or pip install "
            f"{name})" + ", or use --json" * (name == "rich")
        ) from error


def console() -> "Console":
    """Return the console for tables."""
    require("rich")
    from rich.console import Console

    return Console(highlight=False)


def new_table(left: Sequence[str], right: Sequence[str], title: str = "") -> "Table":
    """Return an empty table: columns of text, then columns of figures."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title) if title else None, title_justify="left", box=box.SIMPLE_HEAD)
    for name in (*left, *right):
        table.add_column(name, justify="left" if name in left else "right")
    return table


def write_json(document: Any, *, indent: int | None = 2) -> None:
    """Write one JSON document, or one line of several, to standard output."""
    sys.stdout.write(json_text(document, indent=indent))
    sys.stdout.flush()


def json_text(document: Any, *, indent: int | None = 2) -> str:
    """Return one JSON document as lines."""
    if dataclasses.is_dataclass(document) and not isinstance(document, type):
        document = dataclasses.asdict(document)
    return json.dumps(document, indent=indent, allow_nan=False) + "\n"

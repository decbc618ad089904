"""The parts that all commands share: their declaration, output and exit codes."""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

FINE: Final = 0
FOUND: Final = 1
"""There is something to fix, or nothing to show."""
USAGE: Final = 2
"""The command was called wrongly."""
INTERRUPTED: Final = 130
"""Ctrl-C was pressed. This is the exit code that shells use."""

REMOVED_OPTIONS: Final = {
    "advise": ("--seconds S", "--startup S", "--verbose"),
    "doctor": ("--json", "--sweep"),
    "plan": ("--json", "--picture FILE"),
    "run": ("--name N", "--group G", "--grace S", "--fail-fast", "--try-first S", "--json"),
    "status": ("--watch S", "--group G"),
    "timeline": ("--picture FILE", "--from S", "--to S", "--json"),
}
"""Options that no longer have an effect. They are accepted for one more version."""


class _RemovedOption(argparse.Action):
    def __call__(
        self, parser: Any, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        sys.stderr.write(
            f"{parser.prog}: {option_string} does nothing any more, and goes in the next version; "
            "see CHANGELOG.md\n"
        )


def declare(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    run: Callable[[argparse.Namespace], int],
    help: str,
    about: str,
    examples: str,
) -> argparse.ArgumentParser:
    """Declare a sub-command, and return its parser so that arguments can be added.

    ``run`` executes the command and returns the exit code.
    """
    parser = commands.add_parser(
        name,
        help=help,
        description=about,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    for option in REMOVED_OPTIONS.get(name, ()):
        word, *value = option.split()
        parser.add_argument(
            word, action=_RemovedOption, nargs="?" if value else 0, help=argparse.SUPPRESS
        )
    return parser


def say(text: str) -> None:
    """Write a line to standard error.

    Ignore errors, since a full disk must not end a command.
    """
    with contextlib.suppress(OSError):
        os.write(sys.stderr.fileno(), f"{text}\n".encode(errors="replace"))


def duration(length_s: float) -> str:
    """Return a length of time for people, in the largest unit of which it has two."""
    for unit, unit_s in (("h", 3600), ("min", 60)):
        if length_s >= 2 * unit_s:
            return f"{length_s / unit_s:.0f} {unit}"
    return f"{length_s:.0f} s"


def columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table with aligned columns."""
    table = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
    return "\n".join(lines) + "\n"


def whole(least: int) -> Callable[[str], int]:
    """Return a parser for whole numbers from ``least`` on. Pass it as ``type=`` of an argument."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(
                f"expected a whole number from {least} on, got {text!r}"
            )
        return int(text)

    return read


def write_json(document: Any) -> None:
    """Write one JSON document to standard output."""
    sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")

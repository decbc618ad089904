"""What all commands share: how they are declared, what they write, and their exit codes."""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

FINE: Final = 0
FOUND: Final = 1
"""Something to mend was found, or nothing was there to show."""
USAGE: Final = 2
"""The command was called wrongly."""
INTERRUPTED: Final = 130
"""Ctrl-C, as shells number it."""

_GONE: Final = {
    "advise": ("--seconds S", "--startup S", "--verbose"),
    "doctor": ("--json", "--sweep"),
    "plan": ("--json", "--picture FILE"),
    "run": ("--name N", "--group G", "--grace S", "--fail-fast", "--try-first S", "--json"),
    "status": ("--watch S", "--group G"),
    "timeline": ("--picture FILE", "--from S", "--to S", "--json"),
}
"""Options that are accepted for one more version."""


class _Gone(argparse.Action):
    def __call__(
        self, parser: Any, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        what = (
            f"{option_string} does nothing any more, and goes in the next version; see CHANGELOG.md"
        )
        sys.stderr.write(f"{parser.prog}: {what}\n")


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
    parser = commands.add_parser(
        name, help=help, description=about, epilog=examples, formatter_class=form
    )
    parser.set_defaults(run=run)
    for option in _GONE[name]:
        word, *value = option.split()
        parser.add_argument(word, action=_Gone, nargs="?" if value else 0, help=argparse.SUPPRESS)
    return parser


def say(text: str) -> None:
    """Write a line to standard error; where nobody can read it (a full disk, a terminal that is gone) nothing ends."""
    with contextlib.suppress(OSError):
        os.write(sys.stderr.fileno(), f"{text}\n".encode(errors="replace"))


def columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows below their head, in columns."""
    table = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
    return "\n".join(lines) + "\n"


def whole(least: int) -> Callable[[str], int]:
    """Return a reader of an argument that is a whole number from ``least`` on; for ``type=``."""

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

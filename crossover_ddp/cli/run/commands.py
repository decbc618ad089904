"""The commands that ``crossover-ddp run`` is to start, their names and variables. Pure: starts and reads nothing.

[Note: no shell]
A command given as one text is cut into words as a shell would cut it, but no shell runs it: so torchrun's own
arguments can be read, and signals reach the job instead of a shell. Syntax that only a shell understands is refused,
never passed on as plain text. Our design.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import NamedTuple

NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,31}")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_EXPANDED = "$`"
_OPERATORS = "|&;<>()"


class CommandError(ValueError):
    """A command that cannot be started; no job has been started."""


class Command(NamedTuple):
    """One job to start."""

    name: str
    words: tuple[str, ...]
    environment: Mapping[str, str]
    """Variables of this job alone."""


class Entry(NamedTuple):
    """A command that lacks a name."""

    words: Sequence[str]
    environment: Mapping[str, str]


def split_groups(arguments: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Return the arguments before the first ``--``, and the words after each ``--``."""
    parts: list[list[str]] = [[]]
    for word in arguments:
        if word == "--":
            parts.append([])
        else:
            parts[-1].append(word)
    return parts[0], parts[1:]


def from_groups(groups: Sequence[Sequence[str]]) -> list[Entry]:
    """Read commands that were given after ``--``: one text each, or the words of one."""
    return [
        _entry(group[0] if len(group) == 1 else group, f"command {number}")
        for number, group in enumerate(groups, start=1)
    ]


def from_lines(text: str) -> list[Entry]:
    r"""Read one command per line; ``#`` begins a comment where a shell would see one, a last ``\`` joins lines."""
    entries = []
    lines = text.replace("\\\n", " ").splitlines()
    for number, line in enumerate(lines, start=1):
        if line.strip() and not line.lstrip().startswith("#"):
            entries.append(_entry(line, f"line {number}"))
    return entries


def _entry(command: str | Sequence[str], where: str) -> Entry:
    words = _words(command, where) if isinstance(command, str) else list(command)
    variables = {}
    while words and (found := _ASSIGNMENT.fullmatch(words[0])):
        variables[found[1]] = found[2]
        words = words[1:]
    if not words or not words[0]:
        raise CommandError(f"{where}: expected a command, got none")
    return Entry(words, variables)


def _words(text: str, where: str) -> list[str]:
    """See [Note: no shell]."""
    syntax = shell_syntax(text)
    if syntax is not None:
        raise CommandError(
            f"{where}: expected a command without shell syntax, got {syntax!r} in {text!r}: no shell runs it; put "
            "it in single quotes if it is plain text, or let a shell run it: bash -c '…'"
        )
    try:
        return shlex.split(text, comments=True)
    except ValueError as error:
        raise CommandError(f"{where}: expected closed quotes, got {text!r} ({error})") from error


def shell_syntax(text: str) -> str | None:
    """Return the first syntax in ``text`` on which only a shell would act, or None; wildcards do not count."""
    quote, last = "", " "
    letters = iter(text)
    for letter in letters:
        if quote == "'":
            quote = "" if letter == "'" else quote
        elif letter == "\\":
            next(letters, None)
        elif letter in _EXPANDED:
            return letter
        elif quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter in _OPERATORS or (letter == "~" and last.isspace()):
            return letter
        elif letter == "#" and last.isspace():
            return None
        last = letter
    return None


def default_name(index: int) -> str:
    """Return a, b, …, z, aa, ab and so on."""
    name = ""
    index += 1
    while index:
        index, letter = divmod(index - 1, len(_LETTERS))
        name = _LETTERS[letter] + name
    return name


def named(entries: Sequence[Entry], names: Sequence[str] = ()) -> tuple[Command, ...]:
    """Give every command its name.

    Args:
        entries: the commands in their order.
        names: one for each; default a, b, …
    """
    if not entries:
        raise CommandError("expected commands after -- or in --commands FILE, got none")
    if names and len(names) != len(entries):
        raise CommandError(f"expected one --name per command, got {len(names)} for {len(entries)}")
    chosen = list(names) or [default_name(index) for index in range(len(entries))]
    for index, name in enumerate(chosen):
        if not NAME.fullmatch(name):
            raise CommandError(
                f"expected a name of 1-32 letters, digits, '.', '_', '-' (no '.' first), got {name!r}"
            )
        if name in chosen[:index]:
            raise CommandError(f"expected different names, got {name!r} twice; choose others with --name")
    return tuple(
        [
            Command(name, tuple(entry.words), dict(entry.environment))
            for name, entry in zip(chosen, entries, strict=True)
        ]
    )

"""The commands that ``crossover-ddp run`` is to start, their names and variables. Pure: starts and reads nothing.

[Note: no shell]
A command given as one text is cut into words as a shell would cut it, but no shell runs it: so torchrun's own
arguments can be read, and signals reach the job instead of a shell. Syntax that only a shell understands is refused,
never passed on as plain text. Our design.
"""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,31}")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_EXPANDED = "$`"
_OPERATORS = "|&;<>()"
_ENTRY = '"COMMAND" or {"command": …, "name": …, "env": {…}}'


class CommandError(ValueError):
    """A command that cannot be started; no job has been started."""


class Command(NamedTuple):
    """One job to start."""

    name: str
    words: tuple[str, ...]
    environment: Mapping[str, str]
    """Variables of this job alone."""


class Entry(NamedTuple):
    """A command that may still lack a name."""

    words: Sequence[str]
    environment: Mapping[str, str]
    name: str | None = None


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


def from_json(text: str) -> list[Entry]:
    """Read a JSON list of commands: texts, or objects with ``command`` (text or list), ``name`` and ``env``."""
    try:
        document = json.loads(text)
    except ValueError as error:
        raise CommandError(f"expected a JSON list of commands, got text that is no JSON: {error}") from error
    if not isinstance(document, list):
        raise CommandError(f"expected a JSON list of commands, got {type(document).__name__}")
    return [_json_entry(each, f"entry {number}") for number, each in enumerate(document, start=1)]


def _json_entry(each: Any, where: str) -> Entry:
    if isinstance(each, str):
        return _entry(each, where)
    if not isinstance(each, dict) or "command" not in each or each.keys() - {"command", "name", "env"}:
        raise CommandError(f"{where}: expected {_ENTRY}, got {json.dumps(each)}")
    command, name, variables = each["command"], each.get("name"), each.get("env", {})
    texts = command if isinstance(command, list) else [command]
    if not all(isinstance(text, str) for text in texts) or not isinstance(name, str | None):
        raise CommandError(f"{where}: expected texts, got {json.dumps(each)}")
    if not isinstance(variables, dict) or not all(isinstance(value, str) for value in variables.values()):
        raise CommandError(f"{where}: expected env to map names to texts, got {json.dumps(variables)}")
    entry = _entry(command, where)
    return entry._replace(environment={**variables, **entry.environment}, name=name)


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
        names: one for each; default those in the entries, else a, b, …
    """
    if not entries:
        raise CommandError("expected commands after -- or in --commands FILE, got none")
    if names and len(names) != len(entries):
        raise CommandError(f"expected one --name per command, got {len(names)} for {len(entries)}")
    chosen = [
        names[index] if names else entry.name if entry.name is not None else default_name(index)
        for index, entry in enumerate(entries)
    ]
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

"""Seeded faults: the format of their tables, and how to seed one into a copy of the tree.

A table, ``faults/*.txt``, holds mutations of functions. Its lines begin with one of these:

- ``@`` names the target of the following mutations: a function, method or class as in a traceback
  (``Bucket.end``), or a file (for code outside of functions, and for C++).
- ``#`` begins a fault and describes it.
- ``$`` gives pytest's arguments, if they differ from those of the fault above. At least one of the
  tests must fail.
- A space, ``-`` or ``+`` begins a line of a fragment of code, as in a diff.

[Note: fragments] A fragment is compared token by token. Line breaks, comments, indentation,
trailing commas, the parentheses around a wrapped expression and the file of the function do not
matter. So a fault survives reformatting and moves. After a rename apply it to the tables as well.
"""

import ast
import functools
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SEARCHED = ("crossover_ddp", "recipes", "tests/harness")

_TOKEN = re.compile(
    r"""
    (?P<skipped> \s+ | \#[^\n]* | \\\n )
    | (?P<token>
        [A-Za-z]{0,2}(?: \"{3}.*?\"{3} | '{3}.*?'{3} | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*' )
        | \w[\w.]* | [-+*/%@&|^<>=!:]= | \*\* | // | -> | .
    )
    """,
    re.VERBOSE | re.DOTALL,
)


class Token(NamedTuple):
    text: str
    begin: int  # offsets
    end: int


class Scope(NamedTuple):
    path: str  # from the root of the tree
    begin: int  # offsets in the file
    end: int


@dataclass
class Fault:
    """A mistake that a developer could make, or has made, at one place of a function."""

    target: str  # a qualified name, or a path from the root of the tree
    why: str  # describes the mistake
    tests: list[str] = field(default_factory=list)  # pytest's arguments
    diff: list[str] = field(default_factory=list)  # lines of code, each with its sign

    def seeded(self, root: Path) -> tuple[str, str]:
        """Return the path of the fault's file, from ``root``, and its text with the fault."""
        old = self._side(without="+")
        new = self._side(without="-")
        wanted = [token.text for token in tokens(old)]
        matches = []
        for scope in scopes(root, self.target):
            matches += [(scope, *match) for match in found(wanted, root, scope)]
        if len(matches) != 1 or old == new:
            raise ValueError(
                f"expected the code of the fault {self.why!r} once in {self.target}, "
                f"found it {len(matches)} times; seed the same mistake into today's code"
            )
        scope, begin, end = matches[0]
        text = (root / scope.path).read_text()
        # Indent the new lines as the code that they replace.
        column = begin - (text.rfind("\n", 0, begin) + 1)
        shift = column - _indent(old)
        lines = [" " * max(0, _indent(line) + shift) + line.lstrip() for line in new.split("\n")]
        seeded = text[:begin] + "\n".join(lines).lstrip() + text[end:]
        if not new and scope.path.endswith(".py") and not is_valid(seeded):
            seeded = text[:begin] + "pass" + text[end:]  # the block would be empty
        return scope.path, seeded

    def missing(self, root: Path) -> list[str]:
        """Return those of the fault's tests that do not exist."""

        def exists(test: str) -> bool:
            file, _, function = test.partition("::")
            path = root / file
            name = function.partition("[")[0]
            return path.exists() and (not name or f"def {name}(" in path.read_text())

        return [test for test in self.tests if test.startswith("tests/") and not exists(test)]

    def _side(self, *, without: str) -> str:
        """Return the code before or after the mutation: the lines without one of the signs."""
        return "\n".join(line[1:] for line in self.diff if line[0] != without).rstrip(", ")


def _indent(text: str) -> int:
    return len(text) - len(text.lstrip())


def is_valid(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def tokens(text: str) -> list[Token]:
    """Return the tokens of a piece of code, without comments and trailing commas."""
    matches = (match for match in _TOKEN.finditer(text) if match["token"])
    with_commas = [Token(match["token"], *match.span()) for match in matches]
    followers = [token.text for token in with_commas[1:]] + [""]
    return [
        token
        for token, follower in zip(with_commas, followers, strict=True)
        if token.text != "," or follower not in ")]}"
    ]


def found(wanted: list[str], root: Path, scope: Scope) -> Iterator[tuple[int, int]]:
    """Yield the places of these tokens in a scope, as offsets in its file."""
    of_scope = tokens((root / scope.path).read_text()[scope.begin : scope.end])
    for first, token in enumerate(of_scope):
        end = _end_of_match(of_scope, first, wanted) if token.text == wanted[0] else None
        if end is not None:
            yield scope.begin + token.begin, scope.begin + of_scope[end - 1].end


def _end_of_match(of_scope: list[Token], position: int, wanted: list[str]) -> int | None:
    """Return the position after the match that begins at ``position``. None if there is no match.

    Parentheses that are not wanted are skipped in pairs: a formatter puts them around an expression
    that it wraps.
    """
    skipped = 0
    for text in [*wanted, None]:  # None: only skipped parentheses may still be closed
        while position < len(of_scope) and of_scope[position].text != text:
            if of_scope[position].text == "(" and text is not None:
                skipped += 1
            elif of_scope[position].text == ")" and skipped:
                skipped -= 1
            else:
                break
            position += 1
        if text is None:
            return None if skipped else position
        if position == len(of_scope) or of_scope[position].text != text:
            return None
        position += 1
    return None


def scopes(root: Path, target: str) -> list[Scope]:
    """Return the functions and classes with this qualified name, or the file with this path."""
    if (root / target).is_file():
        return [Scope(target, 0, len((root / target).read_text()))]
    return _definitions(root).get(target, [])


@functools.cache
def _definitions(root: Path) -> dict[str, list[Scope]]:
    known: dict[str, list[Scope]] = {}
    for path in sorted(path for directory in SEARCHED for path in (root / directory).rglob("*.py")):
        text = path.read_text()
        begins = [0]
        for line in text.splitlines(keepends=True):
            begins.append(begins[-1] + len(line))
        for name, node in _named(ast.parse(text)):
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            scope = Scope(
                str(path.relative_to(root)), begins[first - 1], begins[node.end_lineno or first]
            )
            known.setdefault(name, []).append(scope)
    return known


def _named(
    node: ast.AST, prefix: str = ""
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield prefix + child.name, child
            yield from _named(child, f"{prefix}{child.name}.")
        else:
            yield from _named(child, prefix)


def read(table: str) -> list[Fault]:
    """Return the faults of a table."""
    target = ""
    faults: list[Fault] = []
    for line in filter(None, table.splitlines()):
        if line[0] == "@":
            target = line[2:]
        elif line[0] == "#":
            faults.append(Fault(target, line[2:], faults[-1].tests if faults else []))
        elif line[0] == "$":
            faults[-1].tests = shlex.split(line[2:])
        else:
            faults[-1].diff.append(line)
    return faults


TABLES = sorted(Path(__file__).parent.glob("faults/*.txt"))
FAULTS = [fault for table in TABLES for fault in read(table.read_text())]


def copy_tree(target: Path) -> None:
    """Copy all files of the tree that git does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.check_output(command, cwd=ROOT, text=True)
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)

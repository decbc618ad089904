"""Which tests know the engine: those whose module, or a helper of theirs, names one of its private modules.

All others are the public net, ``pytest -m "not inside"``: it stays as it is whatever becomes of the engine.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
PACKAGE: Final = "crossover_ddp"
_OF_KFAC: Final = ("factor_traffic", "journeys", "preconditioner")
ENGINE: Final = (
    *("_ddp", "_engine", "_decoupled", "_compression", "_averaging", "_owners.muon"),
    *(f"_kfac.{module}" for module in _OF_KFAC),
)
INSIDE: Final = "tests.harness.inside"  # may know private names for all others


@cache
def is_inside(path: Path, root: Path = ROOT) -> bool:
    """Tell whether a test module names the private engine, by itself or through helpers that it imports or runs."""
    seen: set[Path] = set()
    ahead = [path]
    while ahead:
        module = ahead.pop()
        if module in seen or module == root.joinpath(*INSIDE.split(".")).with_suffix(".py"):
            continue
        seen.add(module)
        names = _names(module, root)
        if any(_is_of_engine(name, root) for name in names):
            return True
        ahead += filter(None, (_file(name, "tests", root) for name in names))
        ahead += (module.parent / name for name in names if (module.parent / name).is_file())
    return False


@cache
def _names(module: Path, root: Path) -> frozenset[str]:
    """Return the dotted names that a file imports, patches, or has in strings, and the scripts in its strings."""
    tree = ast.parse(module.read_text())
    imported: dict[str, str] = {}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = module.relative_to(root).parent.parts[: -node.level + 1 or None] if node.level else ()
            for alias in node.names:
                name = ".".join(filter(None, (*base, node.module, alias.name)))
                imported[alias.asname or alias.name] = name
                found.add(name)
    for text in _strings(tree):
        found.update(re.findall(rf"\b(?:{PACKAGE}|tests)(?:\.\w+)+", text))
        found.update(re.findall(r"^\w+\.py$", text))
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call) and len(node.args) > 1):
        owner, what = call.args[:2]
        if isinstance(owner, ast.Name) and isinstance(what, ast.Constant) and owner.id in imported:
            found.add(f"{imported[owner.id]}.{what.value!s}")
    return frozenset(found)


def _strings(tree: ast.AST) -> Iterator[str]:
    """Iterate over all strings but docstrings."""
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield node.value


@cache
def _is_of_engine(name: str, root: Path) -> bool:
    """Tell whether a dotted name is of the engine, or something of it that a public module has imported."""
    if any(f"{name}.".startswith(f"{PACKAGE}.{module}.") for module in ENGINE):
        return True
    module = _file(name, PACKAGE, root)
    if module is None:
        return False
    known = ".".join(module.relative_to(root).with_suffix("").parts)
    what = name.removeprefix(f"{known}.").partition(".")[0]
    if module.name == "__init__.py" or what in _offered(module):
        return False
    handed_on = (each for each in _names(module, root) if each.rpartition(".")[2] == what and each != name)
    return any(_is_of_engine(each, root) for each in handed_on)


def _offered(module: Path) -> frozenset[str]:
    """Return the names in a module's ``__all__``."""
    for node in ast.parse(module.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return frozenset(ast.literal_eval(node.value))
    return frozenset()


def _file(name: str, top: str, root: Path) -> Path | None:
    """Return the file of the longest part of a dotted name that is a module below ``top``."""
    parts = name.split(".")
    while parts and parts[0] == top:
        place = root.joinpath(*parts)
        for file in (place.with_suffix(".py"), place / "__init__.py"):
            if file.is_file():
                return file
        parts.pop()
    return None

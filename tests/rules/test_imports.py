"""Who may import whom, by path; what is pure; what the package offers."""

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import crossover_ddp

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "crossover_ddp"
HOOKS = ("averaging_hooks", "codecs", "comm_hooks", "kfac_hooks", "muon_hooks")
PUBLIC = {*HOOKS, "errors", "gpu_mutex", "metrics", "pipeline"}
BELOW = {"_owners", "_engine", "_ddp", "_tuning", "_system", "errors", "gpu_mutex"}
# The first part of a module's name is its row. A module may import its own row and what stands here.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "_system": {"errors"},
    "_timeline": set(),
    "_turns": {"_system", "errors"},
    "_ddp": {"_system", "errors"},
    "_engine": {"_ddp", "_system", "_timeline.record", "errors"},
    "_tuning": {"_engine", "_ddp", "_system", "errors"},
    "gpu_mutex": {"_turns", "_system", "errors"},
    "metrics": {"_engine"},
    "_owners": {"_engine", "_ddp", "_tuning", "errors"},
    **dict.fromkeys(("_decoupled", "_kfac", "_averaging", "_compression"), BELOW),
    **{hooks: {*BELOW, f"_{hooks.removesuffix('_hooks')}"} for hooks in HOOKS},
    "averaging_hooks": {*BELOW, "_averaging", "comm_hooks"},
    "comm_hooks": {*BELOW, "_decoupled"},
    "codecs": {*BELOW, "_compression"},
    "pipeline": {*HOOKS, "_tuning", "_ddp", "gpu_mutex", "errors"},
    "cli": {"__init__", "_turns.view", "_timeline", "_system", "pipeline", "errors"},
    "__init__": PUBLIC,
    "recipes": {*PUBLIC, "__init__", "lab"},
    "lab": {*PUBLIC, "__init__", "_timeline"},
    "studies": {*PUBLIC, "__init__", "_timeline", "lab", "recipes"},
}
# What offends today. This shrinks: who mends one removes it.
EXCEPTIONS = {
    "_decoupled.state imports _compression",
    "comm_hooks imports _compression",
    "kfac_hooks imports _compression",
    "pipeline.run imports _engine",
    "studies.run imports cli",
}
# Decisions, tested without processes: no clock, no file, no socket, no tensor.
PURE = {
    "_ddp.layout",
    "_kfac.placement",
    "_owners.assignment",
    "_owners.packing",
    "_tuning.model",
    "_turns.rules",
    "pipeline.model",
    "pipeline.simulate",
}
IMPURE = {"torch", "os", "pathlib", "socket", "subprocess", "threading", "time"}


def sources() -> dict[str, Path]:
    """Return files by module; a wing's own file has the wing's name."""
    found = {}
    for path in (*(ROOT / PACKAGE).rglob("*.py"), *(ROOT / "recipes").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts[1:]
        found[".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)] = path
    return found


SOURCES = sources()


def row(module: str) -> str:
    return "recipes" if SOURCES[module].parent == ROOT / "recipes" else module.partition(".")[0]


def imports(module: str, source: str) -> Iterator[tuple[str, str]]:
    """Yield the dotted names that a module imports anywhere, and the modules among ours that these are or stand in."""
    path = SOURCES[module].relative_to(ROOT)
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = (
                path.parent.parts[: len(path.parent.parts) - node.level + 1] if node.level else ()
            )
            names = [
                ".".join(filter(None, [*base, node.module, alias.name])) for alias in node.names
            ]
        for name in (name.removeprefix("recipes.") for name in names):
            parts = name.removeprefix(f"{PACKAGE}.").split(".")
            known = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
            ours = next((each for each in known if each in SOURCES), "__init__")
            yield name, ours if name.startswith(PACKAGE) or ours != "__init__" else ""


def offences(module: str, source: str) -> Iterator[str]:
    may = {row(module), *MAY_IMPORT.get(row(module), ())}
    for name, ours in imports(module, source):
        if (
            ours
            and row(ours) not in may
            and not any(f"{ours}.".startswith(f"{place}.") for place in may)
        ):
            yield f"{module} imports {ours.partition('.')[0]}"
        if module in PURE and name.partition(".")[0] in IMPURE:
            yield f"{module} is pure and imports {name}"


def test_modules_import_what_their_row_allows_and_known_exceptions_shrink() -> None:
    found = {
        each for module, path in SOURCES.items() for each in offences(module, path.read_text())
    }
    assert sorted(found - EXCEPTIONS) == [], "not allowed by the table"
    assert sorted(EXCEPTIONS - found) == [], "no longer there: remove them from EXCEPTIONS"
    assert sorted({*PURE} - {*SOURCES}) == [], "pure modules that are not there"
    assert sorted({row(module) for module in SOURCES} - {*MAY_IMPORT}) == [], "rooms without a row"


def executed(source: str) -> str:
    """Return a module's statements without those for type checkers alone, which import nothing."""
    tree = ast.parse(source)
    tree.body = [each for each in tree.body if not ast.unparse(each).startswith("if TYPE_CHECKING")]
    return ast.unparse(tree)


def circle(below: Mapping[str, set[str]]) -> list[str]:
    """Return those that are in a circle, or above one."""
    seen: set[str] = set()
    while ready := {module for module, names in below.items() if names <= seen} - seen:
        seen |= ready
    return sorted(below.keys() - seen)


def test_no_module_imports_itself_by_way_of_others() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["a", "b", "c"]
    below = {
        module: {ours for _, ours in imports(module, executed(path.read_text())) if ours} - {module}
        for module, path in SOURCES.items()
    }
    assert circle(below) == []


def test_the_package_offers_public_names_and_nothing_else() -> None:
    nodes = ast.walk(ast.parse((ROOT / PACKAGE / "__init__.py").read_text()))
    offered = {
        name.name for node in nodes if isinstance(node, ast.ImportFrom) for name in node.names
    }
    assert offered - {"TYPE_CHECKING"} == {*crossover_ddp.__all__}
    for name in crossover_ddp.__all__:
        assert getattr(crossover_ddp, name).__module__.startswith(PACKAGE)
    assert crossover_ddp.codecs.Int8 is crossover_ddp.Int8
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        getattr(crossover_ddp, "Nonsense")  # noqa: B009


def test_importing_the_package_imports_no_torch() -> None:
    code = f"import sys; sys.modules['torch'] = None; import {PACKAGE}; print({PACKAGE}.__all__)"
    assert "GPUMutex" in subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True)


@pytest.mark.parametrize(
    ("module", "source", "offence"),
    [
        (
            "_engine.links",
            "import crossover_ddp._timeline.trace",
            "_engine.links imports _timeline",
        ),
        ("cli.run", "def f():\n    from .._engine.buckets import x", "cli.run imports _engine"),
        ("_turns.rules", "import time", "_turns.rules is pure and imports time"),
        ("train", "from studies.run import x", "train imports studies"),
        (
            "studies.run",
            "import torch\nfrom crossover_ddp import GPUMutex\nfrom lab import jobs",
            "",
        ),
    ],
)
def test_an_offence_is_found(module: str, source: str, offence: str) -> None:
    assert list(offences(module, source)) == list(filter(None, [offence]))

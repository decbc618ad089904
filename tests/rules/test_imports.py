"""Which modules may import which, the pure modules, and the package's public names."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import crossover_ddp

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "crossover_ddp"
HOOKS = (
    *("auto_hooks", "averaging_hooks", "codecs", "comm_hooks", "decoupled_hooks", "kfac_hooks"),
    *("muon_hooks", "owner_hooks"),
)
PUBLIC = {*HOOKS, "errors", "fsdp", "gpu_mutex", "metrics", "pipeline", "virtual_ranks"}
BELOW = {"_owners", "_engine", "_ddp", "_tuning", "_system", "errors", "gpu_mutex"}
# The first part of a module's name is its row. A module may import its own row and these.
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
    "_owners": {"_engine", "_ddp", "_system", "_tuning", "errors"},
    **dict.fromkeys(("_decoupled", "_kfac", "_averaging", "_compression"), BELOW),
    **{hooks: {*BELOW, f"_{hooks.removesuffix('_hooks')}"} for hooks in HOOKS},
    "auto_hooks": {*BELOW, "_decoupled", "_compression", "decoupled_hooks"},
    "averaging_hooks": {*BELOW, "_averaging", "_compression", "comm_hooks"},
    "comm_hooks": {*BELOW, "decoupled_hooks"},
    "decoupled_hooks": {*BELOW, "_decoupled", "owner_hooks"},  # the latter for version 0.2's names
    "muon_hooks": {*BELOW, "_compression"},
    "owner_hooks": {*BELOW, "_decoupled", "_compression"},
    "codecs": {*BELOW, "_compression"},
    "_fsdp": {"_engine", "_ddp", "_system", "errors"},
    "_virtual": {"_engine", "_ddp", "_system", "errors"},
    "virtual_ranks": {"_virtual", "_engine", "_ddp", "_system", "errors"},
    "fsdp": {*BELOW, "_fsdp", "averaging_hooks", "codecs", "comm_hooks"},
    "pipeline": {
        *HOOKS,
        "_tuning",
        "_ddp",
        "_engine.exchange",
        "_system.torch_private",
        "gpu_mutex",
        "errors",
    },
    "cli": {"__init__", "_turns.view", "_timeline", "_system", "pipeline", "errors"},
    "__init__": PUBLIC,
    "recipes": {"__init__", "fsdp", "pipeline", "lab"},
    "lab": {"__init__", "pipeline", "_timeline", "_system.children"},
    "studies": {"__init__", "fsdp", "pipeline", "_timeline", "lab", "recipes"},
}
# The violations of today. The set may only shrink: a change that removes one also removes it here.
EXCEPTIONS = {
    "comm_hooks imports _compression",
    "decoupled_hooks imports _compression",
    "kfac_hooks imports _compression",
    "studies.run imports cli",
}
# Decisions that are tested without processes. They use no clock, file, socket or tensor.
PURE = {
    "_ddp.layout",
    "_kfac.placement",
    "_owners.assignment",
    "_owners.packing",
    "_tuning.model",
    "_turns.rules",
    "_virtual.tree",
    "pipeline.model",
    "pipeline.simulate",
}
IMPURE = {"torch", "os", "pathlib", "socket", "subprocess", "threading", "time"}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def sources() -> dict[str, Path]:
    """Return all files by the names of their modules. A wing's ``__init__`` has the wing's name."""
    found = {}
    for path in (*(ROOT / PACKAGE).rglob("*.py"), *(ROOT / "recipes").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts[1:]
        if len(parts) > 1 and parts[-1] == "__init__":
            parts = parts[:-1]
        found[".".join(parts)] = path
    return found


SOURCES = sources()


def row(module: str) -> str:
    return "recipes" if SOURCES[module].parent == ROOT / "recipes" else module.partition(".")[0]


def imports(module: str, source: str) -> Iterator[tuple[str, str]]:
    """Yield each dotted name that a module imports, and our module that it is or belongs to.

    The second is empty for names of other packages.
    """
    path = SOURCES[module].relative_to(ROOT)
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base: tuple[str, ...] = ()
            if node.level:  # a relative import
                base = path.parent.parts[: len(path.parent.parts) - node.level + 1]
            for alias in node.names:
                names.append(".".join(filter(None, [*base, node.module, alias.name])))
        for name in (name.removeprefix("recipes.") for name in names):
            parts = name.removeprefix(f"{PACKAGE}.").split(".")
            known = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
            ours = next((each for each in known if each in SOURCES), "__init__")
            yield name, ours if name.startswith(PACKAGE) or ours != "__init__" else ""


def violations(module: str, source: str) -> Iterator[str]:
    allowed = {row(module), *MAY_IMPORT.get(row(module), ())}
    for name, ours in imports(module, source):
        is_below = any(f"{ours}.".startswith(f"{each}.") for each in allowed)
        if ours and row(ours) not in allowed and not is_below:
            yield f"{module} imports {ours.partition('.')[0]}"
        if module in PURE and name.partition(".")[0] in IMPURE:
            yield f"{module} is pure and imports {name}"


def test_modules_import_only_the_rows_that_the_table_allows() -> None:
    found = set[str]()
    for module, path in SOURCES.items():
        found.update(violations(module, path.read_text()))
    assert sorted(found - EXCEPTIONS) == [], "not allowed by the table"
    assert sorted(EXCEPTIONS - found) == [], "these are gone: remove them from EXCEPTIONS"
    assert sorted({*PURE} - {*SOURCES}) == [], "these pure modules do not exist"
    assert sorted({row(module) for module in SOURCES} - {*MAY_IMPORT}) == [], "these have no row"


def executed(source: str) -> str:
    """Return a module's source without its ``if TYPE_CHECKING``, whose imports are not executed."""
    tree = ast.parse(source)
    tree.body = [each for each in tree.body if not ast.unparse(each).startswith("if TYPE_CHECKING")]
    return ast.unparse(tree)


def cyclic(imported: Mapping[str, set[str]]) -> list[str]:
    """Return the modules that are in a cycle of imports, or import one that is."""
    seen: set[str] = set()
    while ready := {module for module, names in imported.items() if names <= seen} - seen:
        seen |= ready
    return sorted(imported.keys() - seen)


def test_imports_have_no_cycle() -> None:
    assert cyclic({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["a", "b", "c"]
    imported = {}
    for module, path in SOURCES.items():
        names = {ours for _, ours in imports(module, executed(path.read_text()))}
        imported[module] = names - {"", module}
    assert cyclic(imported) == []


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


def other_paths(text: str) -> list[str]:
    """Return what a document or docstring takes from elsewhere than the package, `fsdp` or `pipeline`."""
    found = re.findall(rf"(?:from|import) {PACKAGE}\.(\w+)", text)
    for names in re.findall(rf"from {PACKAGE} import ([\w, ]+)", text):
        found += names.split(", ")
    found += re.findall(rf"(?<![\w/]){PACKAGE}\.([A-Za-z]\w*)", text)
    offered = {*crossover_ddp.__all__, "fsdp", "pipeline", "cli"}
    return sorted({*found} - offered)


def test_documents_take_public_names_from_the_package() -> None:
    assert other_paths(f"from {PACKAGE}.codecs import Half") == ["codecs"]
    assert other_paths(f"from {PACKAGE} import Half, half; `{PACKAGE}.Half()`") == ["half"]
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    found = {page.name: other_paths(page.read_text()) for page in pages}
    for module in PUBLIC - {"pipeline"}:
        tree = ast.parse(SOURCES[module].read_text())
        nodes = [node for node in ast.walk(tree) if isinstance(node, DOCUMENTED)]
        texts = [ast.get_docstring(node) or "" for node in nodes]
        found[module] = other_paths("\n".join(texts))
    assert {name: paths for name, paths in found.items() if paths} == {}


def test_importing_the_package_imports_no_torch() -> None:
    code = f"import sys; sys.modules['torch'] = None; import {PACKAGE}; print({PACKAGE}.__all__)"
    assert "GPUMutex" in subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True)


@pytest.mark.parametrize(
    ("module", "source", "violation"),
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
def test_a_violation_is_found(module: str, source: str, violation: str) -> None:
    assert list(violations(module, source)) == list(filter(None, [violation]))

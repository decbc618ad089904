"""The house keeps its rules: who may import whom by path, pure rooms stay pure, nothing grows too long."""

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "crossover_ddp"
MAX_ENTRIES = 22
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60  # without its docstring

# Who may import whom: the longest path that a module begins with rules it. What is not named here may not be imported,
# but a module of the same row.
HOOK_WING = {"_exchange", "_planning", "_system", "errors", "gpu_mutex"}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "_planning": set(),
    "_system": {"errors"},
    "_timeline": {"_system"},
    "_turns": {"_system", "errors"},
    "_exchange": {"_system", "_timeline.record", "errors"},
    "_exchange.link_probe": {"_exchange", "_planning", "_system", "errors"},
    "gpu_mutex": {"_turns", "_system", "errors"},
    "_decoupled": HOOK_WING,
    # A codec is a stage of the exchange under any state; this module hands the buckets over.
    "_decoupled.coded": {*HOOK_WING, "_decoupled", "_compression"},
    "_averaging": HOOK_WING,
    "_kfac": HOOK_WING,
    "_compression": HOOK_WING,
    "codecs": {*HOOK_WING, "_compression"},
    "averaging_hooks": {*HOOK_WING, "_averaging"},
    "_muon": HOOK_WING,
    "comm_hooks": {*HOOK_WING, "_compression", "_decoupled"},
    "kfac_hooks": {*HOOK_WING, "_compression", "_kfac"},
    "muon_hooks": {*HOOK_WING, "_muon"},
    "pipeline": {"_planning", "_exchange", "gpu_mutex", "comm_hooks", "kfac_hooks", "errors"},
    "cli": {"_turns.view", "_turns.slots", "_timeline", "_planning", "_system", "errors", "pipeline"},
    "__init__": {
        "averaging_hooks",
        "codecs",
        "comm_hooks",
        "kfac_hooks",
        "muon_hooks",
        "gpu_mutex",
        "errors",
    },
}
# What people copy shows public names only; the lab and the studies may also read timelines and watch over processes.
PUBLIC = {
    "",
    "averaging_hooks",
    "codecs",
    "comm_hooks",
    "kfac_hooks",
    "muon_hooks",
    "gpu_mutex",
    "errors",
    "pipeline",
}
TOOLS_MAY = {*PUBLIC, "_timeline", "_system"}
STUDIES_MAY = {
    "studies.scaling_model": {"_kfac.placement"},
    "studies.advice": {"cli.advise"},
    "studies.codecs": {"_compression.costs"},
}  # of these functions

# Decisions, tested without processes: no clock, no file, no socket, no tensor.
PURE = {
    "_averaging.schedule",
    "_exchange.filling",
    "_compression.cut",
    "_decoupled.owners",
    "_exchange.layout",
    "_kfac.payload_layout",
    "_kfac.placement",
    "_muon.ownership",
    "_muon.payload_sizes",
    "_planning",
    "_timeline.merge",
    "_timeline.spans",
    "_timeline.trace",
    "_turns.rules",
    "cli.advise.advice",
    "cli.advise.step_figures",
    "cli.doctor.findings",
    "cli.run.commands",
    "cli.run.lines",
    "cli.turn_report",
    "pipeline.model",
    "pipeline.simulate",
}
PURE_IMPORTS = {
    "__future__",
    "abc",
    "bisect",
    "collections",
    "dataclasses",
    "enum",
    "fractions",
    "functools",
    "hashlib",
    "heapq",
    "itertools",
    "json",
    "math",
    "operator",
    "re",
    "shlex",
    "statistics",
    "struct",
    "typing",
}

# Commands start at once, and a mutex needs torch only for the device's events and the job's control group.
WITHOUT_TORCH = {
    "_planning",
    "_timeline",
    "_turns.bells",
    "_turns.descriptors",
    "_turns.log_file",
    "_turns.private_files",
    "_turns.rules",
    "_turns.segment",
    "_turns.slot_table",
    "_turns.slots",
    "_turns.turn_counters",
    "_turns.view",
    "cli",
    "errors",
}
MAY_USE_TORCH = {"cli.chains", "cli.doctor.machine_facts", "cli.run.ports"}
HOOK_MODULES = {
    "_averaging.elastic",
    "_averaging.local_sgd",
    "_averaging.replica",
    "_averaging.state",
    "_decoupled.owned_training",
    "_decoupled.state",
    "_decoupled.training",
    "averaging_hooks",
    "comm_hooks",
    "kfac_hooks",
    "muon_hooks",
    "codecs",
    "pipeline.run",
}

SOURCES = sorted((ROOT / PACKAGE).rglob("*.py"))
RECIPES = sorted((ROOT / "recipes").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))


def _module(path: Path, package: str = PACKAGE) -> str:
    """Name a module inside the package; a wing's own file has the wing's name."""
    parts = path.relative_to(ROOT / package).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


def _is_in(module: str, place: str) -> bool:
    return module == place or module.startswith(f"{place}.")


def _imports(source: str, module: str, is_wing: bool, package: str = PACKAGE) -> Iterator[str]:
    """List the dotted names that are imported anywhere, absolute."""
    inside = [package, *module.split(".")] if module != "__init__" else [package, ""]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = inside[: len(inside) - node.level + is_wing] if node.level else []
            yield from (".".join(filter(None, [*base, node.module, alias.name])) for alias in node.names)


def _row(module: str) -> str:
    rows = [place for place in ALLOWED if _is_in(module, place)]
    assert rows, f"{module} is new: give it a row in ALLOWED"
    return max(rows, key=len)


def _violations(module: str, source: str, is_wing: bool = False) -> list[str]:
    """Say which rules of imports and calls the source of a module breaks."""
    row = _row(module)
    found = []
    for name in _imports(source, module, is_wing):
        top, _, target = name.partition(".")
        if top == PACKAGE and not any(_is_in(target, place) for place in (*ALLOWED[row], row)):
            found.append(f"{module} must not import {target}")
        if top == "torch" and _has_no_torch(module):
            found.append(f"{module} must not import torch")
        if top != PACKAGE and module in PURE and top not in PURE_IMPORTS:
            found.append(f"{module} is pure and must not import {name}")
        if name == "__future__.annotations" and module in HOOK_MODULES:
            found.append(f"{module} must not postpone annotations: DDP refuses strings")
    calls = {
        node.func.id
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    return found + [f"{module} must not {name}" for name in ("print", "input") if name in calls]


def _has_no_torch(module: str) -> bool:
    return module not in MAY_USE_TORCH and any(_is_in(module, place) for place in WITHOUT_TORCH)


def _long_functions(source: str) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1 - len(_docstring_lines(node))
            if lines > MAX_FUNCTION_LINES:
                yield node.name, lines


def _docstring_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> range:
    first = node.body[0]
    return (
        range(first.lineno, (first.end_lineno or 0) + 1) if ast.get_docstring(node) is not None else range(0)
    )


@pytest.mark.parametrize("path", SOURCES, ids=_module)
def test_module_imports_only_what_its_row_allows(path: Path) -> None:
    assert _violations(_module(path), path.read_text(), path.name == "__init__.py") == []


def _recipe(path: Path) -> str:
    return _module(path, "recipes")


def _imports_of_recipe(path: Path) -> list[str]:
    return list(_imports(path.read_text(), _recipe(path), path.name == "__init__.py", "recipes"))


@pytest.mark.parametrize("path", RECIPES, ids=_recipe)
def test_recipes_import_public_names(path: Path) -> None:
    is_shown = path.parent == ROOT / "recipes"
    may = PUBLIC if is_shown else {*TOOLS_MAY, *STUDIES_MAY.get(_recipe(path), ())}
    names = [name for name in _imports_of_recipe(path) if _is_in(name, PACKAGE)]
    modules = [name.removeprefix(PACKAGE).removeprefix(".").rpartition(".")[0] for name in names]
    assert [each for each in modules if not any(_is_in(each, place) for place in may)] == []


def _below(paths: Sequence[Path], package: str, inside: Callable[[str], str]) -> dict[str, set[str]]:
    """Return for each module the others of these paths that it imports; ``inside`` drops the package's name."""
    modules, below = {_module(path, package) for path in paths}, {}
    for path in paths:
        module = _module(path, package)
        names = map(inside, _imports(path.read_text(), module, path.name == "__init__.py", package))
        known = [{name, name.rpartition(".")[0]} & modules for name in names]
        below[module] = {max(each, key=len) for each in known if each} - {module}
    return below


def _circle(below: Mapping[str, set[str]]) -> list[str]:
    """Return those that are in a circle, or above one."""
    seen: set[str] = set()
    while ready := {module for module, names in below.items() if names <= seen} - seen:
        seen |= ready
    return sorted(below.keys() - seen)


def test_no_module_imports_itself_by_way_of_others() -> None:
    prefix = f"{PACKAGE}."
    below = _below(
        SOURCES, PACKAGE, lambda name: name.removeprefix(prefix) if name.startswith(prefix) else ""
    )
    assert sum(map(len, below.values())) > len(below)
    assert _circle(below) == []


def test_recipes_stand_in_a_straight_line() -> None:
    """The lab knows nobody, the training recipe knows the lab, and nobody knows a study but other studies."""
    below = _below(RECIPES, "recipes", lambda name: name.removeprefix("recipes."))
    assert below["lab.records"] == {"lab.analysis", "lab.cluster"}
    assert {"lab", "studies._ranks", "studies.siblings"} <= below["studies.siblings_gpu"]
    assert _circle(below) == []
    for module, names in below.items():
        wing = module.partition(".")[0]
        known = {name.partition(".")[0] for name in names} - {wing}
        assert wing != "lab" or known == set(), module
        assert wing == "studies" or "studies" not in known, module


def test_the_table_has_no_circle() -> None:
    assert _circle({row: {_row(place) for place in may} - {row} for row, may in ALLOWED.items()}) == []
    assert _circle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["a", "b", "c"]


def test_the_house_has_few_doors() -> None:
    entries = [path.name for path in (ROOT / PACKAGE).iterdir() if path.name != "__pycache__"]
    assert len(entries) <= MAX_ENTRIES, sorted(entries)
    assert {f"{_row(_module(path))}" for path in SOURCES} == set(ALLOWED), "a row of nothing"


def test_package_offers_public_names_and_nothing_else() -> None:
    tree = ast.parse((ROOT / PACKAGE / "__init__.py").read_text())
    docstring, *statements = tree.body
    assert isinstance(docstring, ast.Expr)
    assert all(isinstance(node, ast.ImportFrom | ast.Assign) for node in statements)
    targets = [ast.unparse(node.targets[0]) for node in statements if isinstance(node, ast.Assign)]
    assert targets == ["__all__"]
    assert not any(
        node.module and node.module.startswith("_") for node in statements if isinstance(node, ast.ImportFrom)
    )


@pytest.mark.parametrize("path", [*SOURCES, *RECIPES, *TESTS], ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_grows_too_long(path: Path) -> None:
    source = path.read_text()
    assert source.count("\n") <= MAX_FILE_LINES, "more than one idea in a file"
    assert list(_long_functions(source)) == []


@pytest.mark.parametrize(
    ("module", "source", "message"),
    [
        ("_exchange.engine", "from ..comm_hooks import x", "_exchange.engine must not import comm_hooks.x"),
        ("_exchange.engine", "from .. import kfac_hooks", "_exchange.engine must not import kfac_hooks"),
        (
            "_exchange.engine",
            "from .link_probe import x\nfrom crossover_ddp._turns.rules import y",
            "_exchange",
        ),
        ("_exchange.engine", "import crossover_ddp._timeline.files", "_exchange.engine must not import _tim"),
        (
            "comm_hooks",
            "def f():\n    import crossover_ddp.kfac_hooks",
            "comm_hooks must not import kfac_hooks",
        ),
        ("_kfac.late", "from crossover_ddp._decoupled import trial", "_kfac.late must not import _decoupled"),
        ("cli.run.command", "from ..._exchange.engine import x", "cli.run.command must not import _exchange"),
        ("cli.status", "from crossover_ddp._turns.segment import x", "cli.status must not import _turns.seg"),
        ("_turns.segment", "from torch.distributed import Store", "_turns.segment must not import torch"),
        ("_turns.rules", "import time", "_turns.rules is pure and must not import time"),
        ("_exchange.layout", "import torch", "_exchange.layout is pure and must not import torch"),
        ("comm_hooks", "from __future__ import annotations", "comm_hooks must not postpone annotations"),
        ("errors", "print('x')", "errors must not print"),
    ],
)
def test_a_broken_rule_is_found(module: str, source: str, message: str) -> None:
    assert any(found.startswith(message) for found in _violations(module, source))


def test_what_a_wing_hands_on_is_its_own() -> None:
    assert _violations("_kfac", "from .late import x", is_wing=True) == []
    (found,) = _violations("_kfac", "from .._decoupled import x", is_wing=True)
    assert found == "_kfac must not import _decoupled.x"


def test_a_new_module_needs_a_row() -> None:
    with pytest.raises(AssertionError, match="give it a row"):
        _violations("_unheard.state", "")


def test_a_long_function_is_found_whatever_its_docstring() -> None:
    lines = "\n    x = 1" * MAX_FUNCTION_LINES
    docstring = '\n    """' + "a\n" * 100 + '"""'
    assert list(_long_functions(f"def f():{lines}")) == [("f", MAX_FUNCTION_LINES + 1)]
    assert list(_long_functions(f"def f():{docstring}{lines.removesuffix('x = 1')}")) == []

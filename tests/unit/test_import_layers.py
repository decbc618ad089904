"""The house keeps its rules: imports run downward, pure rooms stay pure, nothing grows too long."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "crossover_ddp"
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60  # without its docstring

# Who may know whom inside the package. A new module needs a row here, and a place below what uses it.
ALLOWED: dict[str, set[str]] = {
    "comm_hooks": {
        "_decoupled",
        "_exchange",
        "_journey",
        "_planning",
        "_ddp_checks",
        "_job_turn",
        "_timeline",
        "gpu_mutex",
        "errors",
    },
    "_job_turn": {"_cuda_driver", "_ddp_checks", "_endings", "gpu_mutex", "errors"},
    "_decoupled": {
        "_decoupled_planning",
        "_decoupled_training",
        "_exchange",
        "_interception",
        "_partial_optimizer",
        "_planning",
        "_ddp_checks",
        "gpu_mutex",
    },
    "_decoupled_planning": {"_link_probe", "_planning", "_step_times", "errors"},
    "_decoupled_training": {
        "_compiled",
        "_ddp_checks",
        "_exchange",
        "_guards",
        "_interception",
        "_journey",
        "_module_buffers",
        "_partial_optimizer",
        "_round",
        "_shares",
        "_step",
        "_trial",
        "_updates",
        "errors",
    },
    "_trial": set(),
    "_updates": {
        "_fingerprints",
        "_guards",
        "_partial_optimizer",
        "_round",
        "_shares",
        "_step_times",
        "errors",
    },
    "_round": {"_shares", "errors"},
    "_shares": {"_fingerprints", "_journey", "_partial_optimizer", "errors"},
    "_fingerprints": set(),
    "_interception": {"_compiled", "errors"},
    "_partial_optimizer": {"errors"},
    "_guards": {"_compiled", "errors"},
    "_compiled": set(),
    "_step_times": {"_planning"},
    "_link_probe": {"_exchange", "_planning"},
    "kfac_hooks": {
        "_capture",
        "_columns",
        "_curvature",
        "_ddp_checks",
        "_exchange",
        "_factor_traffic",
        "_factors",
        "_journey",
        "_kfac_buckets",
        "_kfac_cargo",
        "_kfac_costs",
        "_kfac_layers",
        "_kfac_planning",
        "_kfac_settings",
        "_late",
        "_layout",
        "_spread",
        "_worker",
        "gpu_mutex",
        "errors",
    },
    "_factor_traffic": {
        "_capture",
        "_ddp_checks",
        "_early",
        "_exchange",
        "_factor_sums",
        "_factor_times",
        "_journey",
        "_kfac_cargo",
        "_kfac_layers",
        "_kfac_planning",
        "_late",
        "_link_probe",
        "_planning",
        "_step",
        "errors",
    },
    "_kfac_costs": {
        "_factors",
        "_inverse_probe",
        "_kfac_layers",
        "_kfac_planning",
        "_spread",
        "errors",
    },
    "_late": {
        "_factor_sums",
        "_factors",
        "_journey",
        "_kfac_cargo",
        "_kfac_layers",
        "_manifest",
        "_step",
    },
    "_spread": {"_columns", "_factors", "_layout"},
    "_early": {"_capture", "_journey", "_kfac_cargo", "_kfac_layers", "_manifest"},
    "_factor_times": {"_kfac_planning"},
    "_kfac_settings": {"_columns", "_kfac_layers", "errors"},
    "_kfac_cargo": {
        "_columns",
        "_curvature",
        "_factor_sums",
        "_factors",
        "_journey",
        "_layout",
        "_manifest",
        "_row_product",
        "_spread",
        "_worker",
    },
    "_curvature": {"_columns", "_factors", "_spread", "_worker"},
    "_row_product": {"_columns", "_factors"},
    "_inverse_probe": {"_factors", "_kfac_planning"},
    "_capture": {"_columns", "_factor_sums", "_factors", "_kfac_layers"},
    "_factor_sums": set(),
    "_kfac_layers": {"_columns"},
    "_kfac_buckets": {"_layout", "errors"},
    "_exchange_spans": {"_device_order", "_journey", "_step", "_timeline"},
    "_exchange": {
        "_collectives",
        "_ddp_checks",
        "_endings",
        "_exchange_spans",
        "_gathers",
        "_journey",
        "_layout",
        "_module_buffers",
        "_native_way",
        "_ring_way",
        "_staging",
        "_step",
        "_timeline",
        "_ways",
        "_worker",
        "errors",
    },
    "_endings": {"_gathers", "_collectives", "_worker"},
    "_gathers": {"_journey", "_collectives", "_step"},
    "_native_way": {"_collectives", "_journey", "_ways", "_worker"},
    "_ring_way": {"_collectives", "_gathers", "_journey", "_layout", "_staging", "_ways", "_worker"},
    "_ways": {"_exchange_spans", "_journey", "_worker", "errors"},
    "_module_buffers": {"_ddp_checks"},
    "_journey": {"_collectives", "_layout", "_module_buffers", "_staging", "_step", "_timeline", "errors"},
    "_ddp_checks": {"errors"},
    "_step": {"errors"},
    "_staging": {"_collectives", "_cuda_driver", "_layout", "errors"},
    "_collectives": {"_layout", "errors"},
    "_worker": {"errors"},
    "_layout": set(),
    "_planning": {"_layout", "errors"},
    "_kfac_planning": {"_planning"},
    "_factors": {"_columns"},
    "_columns": set(),
    "_manifest": {"_layout"},
    "cli": {
        "_cli_advise",
        "_cli_doctor",
        "_cli_output",
        "_cli_run",
        "_cli_status",
        "_cli_timeline",
        "_run_commands",
    },
    "_cli_run": {
        "_cli_output",
        "_findings",
        "_first_look",
        "_machine_facts",
        "_run_commands",
        "_run_output",
        "_run_ports",
        "_run_summary",
        "_runner",
        "_segment_view",
        "_torchrun",
    },
    "_runner": {
        "_first_look",
        "_job_process",
        "_marked_processes",
        "_run_output",
        "_run_summary",
        "_turn_watch",
    },
    "_first_look": {"_job_process", "_machine_facts", "_marked_processes", "_run_summary"},
    "_turn_watch": {"_marked_processes", "_run_summary", "_segment_files", "_segment_view", "_turn_report"},
    "_job_process": {"_marked_processes"},
    "_marked_processes": set(),
    "_run_output": {"_run_lines"},
    "_torchrun": {"_run_commands", "_run_ports"},
    "_run_ports": {"_run_commands"},
    "_run_commands": set(),
    "_run_lines": set(),
    "_run_summary": set(),
    "_cli_timeline": {
        "_cli_output",
        "_timeline_files",
        "_timeline_merge",
        "_timeline_picture",
        "_timeline_spans",
        "_timeline_trace",
    },
    "_timeline_picture": {"_timeline_spans"},
    "_timeline_trace": {"_timeline_spans"},
    "_timeline_files": {"_timeline", "_timeline_merge"},
    "_timeline_merge": {"_timeline_clocks", "_timeline_spans"},
    "_timeline_clocks": set(),
    "_timeline_spans": set(),
    "_cli_advise": {
        "_advice",
        "_cli_output",
        "_segment_view",
        "_short_run",
        "_signals",
        "_step_figures",
        "_timeline_files",
        "_timeline_merge",
    },
    "_advice": {"_planning", "_step_figures"},
    "_step_figures": {"_planning", "_timeline_merge"},
    "_short_run": {"_job_process", "_marked_processes", "_signals", "_timeline"},
    "_signals": set(),
    "_cli_doctor": {
        "_cli_output",
        "_device_order",
        "_findings",
        "_gpu_findings",
        "_machine_facts",
        "_segment_files",
        "_segment_view",
    },
    "_cli_status": {"_cli_output", "_segment_files", "_segment_view", "_turn_report"},
    "_cli_output": {"_segment_files"},
    "_machine_facts": {"_cuda_driver", "_findings", "_gpu_findings", "_segment_files"},
    "_gpu_findings": {"_findings"},
    "_findings": {"_segment_files", "_segment_view"},
    "_turn_report": {"_segment_view"},
    "_segment_view": {"_segment_files", "errors"},
    "gpu_mutex": {
        "_joining",
        "_group_timeout",
        "_segment_files",
        "_turn_segment",
        "_turn_channel",
        "_turns",
        "_timeline",
        "errors",
    },
    "_joining": {
        "_device_order",
        "_group_timeout",
        "_segment_files",
        "_turn_channel",
        "_turn_segment",
        "errors",
    },
    "_turn_segment": {"_segment_files", "_turns", "errors"},
    "_segment_files": {"errors"},
    "_turn_channel": {"_group_timeout", "_turns", "errors"},
    "_turns": set(),
    "_group_timeout": set(),
    "_device_order": {"_cuda_driver", "_event_order", "_gpu_order", "_semaphore_order", "errors"},
    "_event_order": {"_cuda_driver", "_gpu_order", "errors"},
    "_semaphore_order": {"_cuda_driver", "_gpu_order", "errors"},
    "_gpu_order": {"_cuda_driver", "_worker", "errors"},
    "_cuda_driver": set(),
    "_timeline": {"errors"},
    "errors": set(),
}

# Decisions, tested without processes: no clock, no file, no socket, no tensor.
PURE = {
    "_findings",
    "_gpu_findings",
    "_advice",
    "_kfac_planning",
    "_layout",
    "_manifest",
    "_planning",
    "_run_commands",
    "_run_lines",
    "_run_ports",
    "_run_summary",
    "_timeline_clocks",
    "_timeline_merge",
    "_timeline_spans",
    "_timeline_trace",
    "_step_figures",
    "_turn_report",
    "_turns",
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

# At and below the mutex only these need torch: the device's events and the job's control group.
WITHOUT_TORCH = {
    "_advice",
    "_cli_advise",
    "_short_run",
    "_step_figures",
    "_planning",
    "_cuda_driver",
    "_turns",
    "_turn_segment",
    "_segment_files",
    "_segment_view",
    "_turn_report",
    "_findings",
    "_gpu_findings",
    "_cli_output",
    "_cli_status",
    "_cli_timeline",
    "_timeline",
    "_timeline_clocks",
    "_timeline_files",
    "_timeline_merge",
    "_timeline_picture",
    "_timeline_spans",
    "_timeline_trace",
    "errors",
}
HOOK_MODULES = {"comm_hooks", "kfac_hooks", "_decoupled", "_decoupled_training"}

SOURCES = sorted((ROOT / PACKAGE).rglob("*.py"))
ALL_SOURCES = sorted(path for part in (PACKAGE, "recipes", "tests") for path in (ROOT / part).rglob("*.py"))


def _room(path: Path) -> str:
    """Name the module; the files of a package that has replaced a module share its name."""
    return path.relative_to(ROOT / PACKAGE).parts[0].removesuffix(".py")


def _imports(tree: ast.AST, depth: int = 1) -> Iterator[str]:
    """List the dotted names that are imported anywhere; relative ones begin with the package's name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            inside = PACKAGE if node.level >= depth else ""
            base = ".".join(filter(None, [inside, node.module]))
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _violations(room: str, source: str, depth: int = 1) -> list[str]:
    """Say which rules of imports and calls the source of a module breaks."""
    tree = ast.parse(source)
    found = []
    for name in _imports(tree, depth):
        top, _, rest = name.partition(".")
        target = rest.partition(".")[0]
        if top == PACKAGE and target != room and target not in ALLOWED[room]:
            found.append(f"{room} must not know {target}")
        if top == "torch" and room in WITHOUT_TORCH:
            found.append(f"{room} must not import torch")
        if top != PACKAGE and room in PURE and top not in PURE_IMPORTS:
            found.append(f"{room} is pure and must not import {name}")
        if name == "__future__.annotations" and room in HOOK_MODULES:
            found.append(f"{room} must not postpone annotations: DDP refuses strings")
    calls = {
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    return found + [f"{room} must not {name}" for name in ("print", "input") if name in calls]


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


@pytest.mark.parametrize("path", [p for p in SOURCES if _room(p) != "__init__"], ids=_room)
def test_module_knows_only_what_lies_below_it(path: Path) -> None:
    room = _room(path)
    assert room in ALLOWED, f"{room} is new: give it a row in ALLOWED"
    depth = len(path.relative_to(ROOT / PACKAGE).parts)
    assert _violations(room, path.read_text(), depth) == []


def test_the_table_has_no_circle() -> None:
    seen: set[str] = set()
    while len(seen) < len(ALLOWED):
        ready = {room for room, below in ALLOWED.items() if below <= seen} - seen
        assert ready, f"a circle among {sorted(ALLOWED.keys() - seen)}"
        seen |= ready


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


@pytest.mark.parametrize("path", ALL_SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_grows_too_long(path: Path) -> None:
    source = path.read_text()
    assert source.count("\n") <= MAX_FILE_LINES, "more than one idea in a file"
    assert list(_long_functions(source)) == []


@pytest.mark.parametrize(
    ("room", "source", "message"),
    [
        ("_exchange", "from .comm_hooks import x", "_exchange must not know comm_hooks"),
        ("_exchange", "from . import kfac_hooks", "_exchange must not know kfac_hooks"),
        (
            "comm_hooks",
            "def f():\n    import crossover_ddp.kfac_hooks",
            "comm_hooks must not know kfac_hooks",
        ),
        ("_turn_segment", "from torch.distributed import Store", "_turn_segment must not import torch"),
        ("_turns", "import time", "_turns is pure and must not import time"),
        ("_layout", "import torch", "_layout is pure and must not import torch"),
        ("comm_hooks", "from __future__ import annotations", "comm_hooks must not postpone annotations"),
        ("errors", "print('x')", "errors must not print"),
    ],
)
def test_a_broken_rule_is_found(room: str, source: str, message: str) -> None:
    assert any(found.startswith(message) for found in _violations(room, source))


def test_a_long_function_is_found_whatever_its_docstring() -> None:
    lines = "\n    x = 1" * MAX_FUNCTION_LINES
    docstring = '\n    """' + "a\n" * 100 + '"""'
    assert list(_long_functions(f"def f():{lines}")) == [("f", MAX_FUNCTION_LINES + 1)]
    assert list(_long_functions(f"def f():{docstring}{lines.removesuffix('x = 1')}")) == []

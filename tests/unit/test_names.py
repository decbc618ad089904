"""One name means one thing, and no class holds more than one idea."""

import ast
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(path for part in ("crossover_ddp", "recipes") for path in (ROOT / part).rglob("*.py"))
MAX_CLASS_LINES = 300


def classes(path: Path) -> list[ast.ClassDef]:
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)]


def test_no_two_classes_have_one_name() -> None:
    places = defaultdict(list)
    for path in SOURCES:
        for each in classes(path):
            places[each.name.lstrip("_")].append(str(path.relative_to(ROOT)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_class_grows_too_long(path: Path) -> None:
    lines = {each.name: (each.end_lineno or 0) - each.lineno + 1 for each in classes(path)}
    assert {name: count for name, count in lines.items() if count > MAX_CLASS_LINES} == {}

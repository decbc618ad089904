"""No tuple is made from a generator: see [Note: looking through all objects] in `crossover_ddp._ddp_checks`."""

import ast
import gc
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import crossover_ddp
from crossover_ddp._collectives import _chunks
from crossover_ddp._layout import Layout

PACKAGE = Path(crossover_ddp.__file__).parent
OF_KNOWN_LENGTH = {"sorted", "range", "reversed", "list"}


def unsafe_lines(source: str) -> list[int]:
    """Return the lines in which ``tuple(...)`` is given a generator, or a call that may return one."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "tuple"
        and any(_may_be_generator(argument) for argument in node.args)
    ]


def _may_be_generator(argument: ast.expr) -> bool:
    if isinstance(argument, ast.Call):
        return not (isinstance(argument.func, ast.Name) and argument.func.id in OF_KNOWN_LENGTH)
    return isinstance(argument, ast.GeneratorExp)


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*.py")), ids=lambda path: path.name)
def test_no_tuple_is_made_from_a_generator(path: Path) -> None:
    assert unsafe_lines(path.read_text()) == []


def test_what_is_unsafe_is_seen() -> None:
    assert unsafe_lines("a = tuple(x for x in y)\nb = tuple([x for x in y])\nc = tuple(zip(a, b))") == [1, 3]


@pytest.fixture
def hasty_threads() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_a_worker_cuts_chunks_while_another_thread_looks_through_all_objects(hasty_threads: None) -> None:
    over, errors = threading.Event(), []

    def cut() -> None:
        while not over.is_set():
            try:
                _chunks.__wrapped__(Layout.equal(4000, 1), 0, 4, 16)
            except SystemError as error:
                errors.append(error)
                return

    thread = threading.Thread(target=cut)
    thread.start()
    try:
        for _ in range(20):
            assert any(each is over for each in gc.get_objects())
    finally:
        over.set()
        thread.join()
    assert not errors

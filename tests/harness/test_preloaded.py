"""What is forked has all that the server was to import, whatever else the tests have set up."""

import importlib.util
import json
import multiprocessing
from pathlib import Path

import pytest

from tests.harness import run_ranks
from tests.harness._preloaded import PRELOADED
from tests.harness.scripts import spawn_script

TIMEOUT_S = 60.0
SHOW = """
import gc, json, multiprocessing, sys
print(json.dumps([sorted(sys.modules), gc.get_freeze_count(), multiprocessing.get_start_method()]))
"""


def shown(directory: Path) -> tuple[list[str], int, str]:
    """Return what a script finds that is forked: modules, the number of frozen objects, how it starts processes."""
    script = directory / "show.py"
    script.write_text(SHOW)
    with spawn_script(script, 1, forked=True) as ranks:
        modules, frozen, method = json.loads(ranks.wait(TIMEOUT_S)[0])
    return modules, frozen, method


def start_method(rank: int, world_size: int) -> str:
    return multiprocessing.get_start_method()


def test_a_forked_process_has_every_module_and_objects_out_of_the_collectors_way(tmp_path: Path) -> None:
    # Without them each rank imports them itself, which shows in nothing but the time that all tests take.
    modules, frozen, _ = shown(tmp_path)
    assert {name for name in PRELOADED if importlib.util.find_spec(name)} <= set(modules)
    assert frozen > 100_000


@pytest.mark.parametrize("kind", ["script", "rank"])
def test_what_is_forked_starts_processes_as_if_nobody_had_forked_it(kind: str, tmp_path: Path) -> None:
    # By a server of its own it would import all modules again for the workers of each loader.
    found = shown(tmp_path)[2] if kind == "script" else run_ranks(start_method, 1, backend=None)[0]
    assert found == multiprocessing.get_start_method()

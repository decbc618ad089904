"""What is forked has all that the server was to import, whatever else the tests have set up."""

import importlib.util
import json
import multiprocessing
from pathlib import Path

from tests.harness import run_ranks
from tests.harness._preloaded import PRELOADED
from tests.harness.scripts import spawn_script

SHOW = """
import gc, json, multiprocessing, sys
print(json.dumps([sorted(sys.modules), gc.get_freeze_count(), multiprocessing.get_start_method()]))
"""


def start_method(rank: int, world_size: int) -> str:
    return multiprocessing.get_start_method()


def test_a_forked_process_has_every_module_and_starts_processes_as_if_nobody_had_forked_it(
    tmp_path: Path,
) -> None:
    """Else each rank, and each worker of a loader, imports all: that shows in nothing but the time of all tests."""
    script = tmp_path / "show.py"
    script.write_text(SHOW)
    with spawn_script(script, 1, forked=True) as ranks:
        modules, frozen, method = json.loads(ranks.wait(60.0)[0])
    assert {name for name in PRELOADED if importlib.util.find_spec(name)} <= set(modules)
    assert frozen > 100_000, "objects are out of the collector's way"
    own = multiprocessing.get_start_method()
    assert method == own
    assert run_ranks(start_method, 1, backend=None) == [own]

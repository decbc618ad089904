"""What is forked has all that the server was to import, whatever else the tests have set up."""

import importlib.util
import json
from pathlib import Path

from tests.harness._preloaded import PRELOADED
from tests.harness.scripts import spawn_script

TIMEOUT_S = 60.0
SHOW = "import gc, json, sys\nprint(json.dumps([sorted(sys.modules), gc.get_freeze_count()]))\n"


def test_a_forked_process_has_every_module_and_objects_out_of_the_collectors_way(tmp_path: Path) -> None:
    # Without them each rank imports them itself, which shows in nothing but the time that all tests take.
    script = tmp_path / "show.py"
    script.write_text(SHOW)
    with spawn_script(script, 1, forked=True) as ranks:
        (output,) = ranks.wait(TIMEOUT_S)
    modules, frozen = json.loads(output)
    assert {name for name in PRELOADED if importlib.util.find_spec(name)} <= set(modules)
    assert frozen > 100_000

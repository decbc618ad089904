"""A test that leaves something behind fails by it, whatever it asserts; shown on tests of a test run."""

import re

import pytest
import torch.distributed as dist

from tests.harness import single_process_group
from tests.harness.scripts import ROOT, spawn_script

pytest_plugins = ["pytester"]

LEAKS = {
    "thread": (
        "threading.Thread(target=EVER.wait, name='leaked-thread', daemon=True).start()",
        "leaked-thread",
    ),
    "child": ("CHILDREN.append(subprocess.Popen(['sleep', '30']))", "child process"),
    "variable": ("os.environ['LEAKED'] = 'yes'", "environment variable LEAKED: None became 'yes'"),
    "segment": ("SEGMENT.parent.mkdir(); SEGMENT.write_bytes(b'')", "file /dev/shm/crossover-leaked-"),
    "group": (
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)",
        "default process group",
    ),
}

HEAD = """
import os, shutil, subprocess, threading, torch.distributed as dist, pytest
from pathlib import Path
EVER, CHILDREN = threading.Event(), []
SEGMENT = Path(f"/dev/shm/crossover-leaked-{os.getpid()}", f"{os.environ['CROSSOVER_GROUP']}-0.turns")

@pytest.fixture(scope="module", autouse=True)
def end_what_has_leaked():
    yield
    EVER.set()
    for child in CHILDREN:
        child.kill()
        child.wait()
    shutil.rmtree(SEGMENT.parent, ignore_errors=True)
"""

TESTS = """
def test_that_leaks_a_{kind}():
    {statement}

def test_after_{kind}():
    assert "LEAKED" not in os.environ
    assert not dist.is_initialized()
"""

# What leaks here never ends: a shorter grace changes nothing but how long it is looked for.
CONFTEST = """
from tests.conftest import *
from tests.conftest import _nothing_left_behind, _end_ranks_with_session
from tests.harness import leaks

leaks.GRACE_S = 0.5
"""


def test_each_leak_fails_its_test_and_no_other(pytester: pytest.Pytester) -> None:
    pytester.makepyprojecttoml(f"[tool.pytest.ini_options]\npythonpath = [{str(ROOT)!r}]")
    pytester.makeconftest(CONFTEST)
    tests = (TESTS.format(kind=kind, statement=statement) for kind, (statement, _) in LEAKS.items())
    pytester.makepyfile(HEAD + "".join(tests))
    script = pytester.path / "run.py"
    script.write_text('import pytest\nassert pytest.main(["-p", "no:cacheprovider", "-rE"]) == 1\n')
    with spawn_script(script, 1, cwd=pytester.path, forked=True) as ranks:
        (said,) = ranks.wait(100)
    assert re.search(f"{2 * len(LEAKS)} passed.* {len(LEAKS)} errors", said)
    for kind, (_, message) in LEAKS.items():
        assert re.search(f"the test left behind: .*{re.escape(message)}", said)
        assert re.search(f"ERROR .*::test_that_leaks_a_{kind}", said)


def test_group_of_one_lives_as_long_as_its_block() -> None:
    with single_process_group() as group:
        assert (dist.get_world_size(group), dist.get_backend(group)) == (1, "gloo")
    assert not dist.is_initialized()

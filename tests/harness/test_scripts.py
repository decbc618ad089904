"""Scripts run as torchrun would run them. None survives its block, and none fails silently."""

import importlib.util
import json
import multiprocessing
import signal
import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness import ScriptError, run_ranks, spawn_script
from tests.harness._preloaded import PRELOADED
from tests.harness.scripts import hear_ignored_signals
from tests.harness.waiting import eventually, gone

Writer = Callable[[str], Path]


@pytest.fixture
def script(tmp_path: Path) -> Writer:
    def write(source: str) -> Path:
        path = tmp_path / "script.py"
        path.write_text(
            "import os, subprocess, sys, time\nrank = int(os.environ['RANK'])\n"
            + textwrap.dedent(source)
        )
        return path

    return write


def test_a_started_and_a_forked_rank_join_by_the_variables_of_torchrun(script: Writer) -> None:
    path = script("""
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        print(f"rank {rank} of {os.environ['MINE']} sees {total.item():.0f} {sys.argv[1]}")
        dist.destroy_process_group()
    """)
    own = [{"MINE": "a"}, {"MINE": "b"}]
    with spawn_script(path, 2, args=["ranks"], environment=own, forked=[1]) as ranks:
        outputs = ranks.wait(60.0)
    assert outputs == ["rank 0 of a sees 2 ranks\n", "rank 1 of b sees 2 ranks\n"]


@pytest.mark.parametrize("forked", [False, True], ids=["started", "forked"])
def test_ranks_that_fail_hang_or_are_killed_are_named_and_no_process_survives_the_block(
    script: Writer, forked: bool
) -> None:
    path = script("""
        def hang_here():
            child = subprocess.Popen(["sleep", "600"])
            print(child.pid, "started")
            time.sleep(600)
        if rank == 0: raise ValueError("words of rank zero")
        hang_here()
    """)
    with spawn_script(path, 3, forked=forked) as ranks:
        children = [int(ranks.wait_for_output(rank, "started", 60.0).split()[0]) for rank in (1, 2)]
        ranks.processes[2].signal_session(signal.SIGKILL)
        assert eventually(
            lambda: None not in (ranks.processes[0].poll(), ranks.processes[2].poll())
        )
        ends = (
            r"^rank 0 exited with status 1, rank 2 was killed by SIGKILL, "
            r"rank 1 did not end either: "
        )
        with pytest.raises(ScriptError, match=ends) as caught:
            ranks.wait(0.2)
        assert "ValueError: words of rank zero" in str(caught.value)
        assert "in hang_here" in str(caught.value)
    assert ranks.processes[1].returncode < 0
    assert eventually(lambda: all(map(gone, children))), "the child of a script's rank lives on"


@pytest.mark.defect("strangers-36")
def test_children_do_not_ignore_the_signals_that_the_suite_ignores() -> None:
    """Under nohup, or in the background of a script, each test of signals hung for five minutes."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        hear_ignored_signals()
        child = subprocess.run(["bash", "-c", "kill -HUP $$; exec true"])
    finally:
        signal.signal(signal.SIGHUP, before)
    assert child.returncode == -signal.SIGHUP


SHOW = """
import gc, json, multiprocessing, sys
print(json.dumps([sorted(sys.modules), gc.get_freeze_count(), multiprocessing.get_start_method()]))
"""


def start_method(rank: int, world_size: int) -> str:
    return multiprocessing.get_start_method()


def test_a_forked_process_has_all_modules_and_starts_processes_by_the_default_method(
    script: Writer,
) -> None:
    """Otherwise each rank and each data loader's worker imports torch. Only time shows it."""
    with spawn_script(script(SHOW), 1, forked=True) as ranks:
        modules, frozen, method = json.loads(ranks.wait(60.0)[0])
    assert {name for name in PRELOADED if importlib.util.find_spec(name)} <= set(modules)
    assert frozen > 100_000, "the collector does not visit the objects made on import"
    own = multiprocessing.get_start_method()
    assert method == own
    assert run_ranks(start_method, 1, backend=None) == [own]

"""Scripts run as torchrun would run them; none survives its block and none fails in silence."""

import signal
import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness import ScriptError, spawn_script
from tests.harness.scripts import hear_ignored_signals
from tests.harness.waiting import eventually, gone

Writer = Callable[[str], Path]


@pytest.fixture(params=[False, True], ids=["started", "forked"])
def forked(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def script(tmp_path: Path) -> Writer:
    def write(source: str) -> Path:
        path = tmp_path / "script.py"
        path.write_text(
            "import os, subprocess, sys, time\nrank = int(os.environ['RANK'])\n" + textwrap.dedent(source)
        )
        return path

    return write


def test_ranks_meet_by_the_variables_of_torchrun(script: Writer, forked: bool) -> None:
    path = script("""
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        print(f"rank {rank} of {os.environ['MINE']} sees {total.item():.0f} {sys.argv[1]}")
        dist.destroy_process_group()
    """)
    with spawn_script(
        path, 2, args=["ranks"], environment=[{"MINE": "a"}, {"MINE": "b"}], forked=forked
    ) as ranks:
        outputs = ranks.wait(60.0)
    assert outputs == ["rank 0 of a sees 2 ranks\n", "rank 1 of b sees 2 ranks\n"]


def test_failing_rank_shows_its_traceback(script: Writer, forked: bool) -> None:
    path = script("if rank == 1: raise ValueError('words of rank one')")
    with (
        spawn_script(path, 2, forked=forked) as ranks,
        pytest.raises(ScriptError, match="rank 1 exited with status 1:") as caught,
    ):
        ranks.wait(60.0)
    assert "ValueError: words of rank one" in str(caught.value)


def test_hanging_rank_shows_its_stack(script: Writer, forked: bool) -> None:
    path = script("""
        def hang_here():
            print("hanging")
            time.sleep(600)
        if rank == 1: hang_here()
    """)
    with spawn_script(path, 2, forked=forked) as ranks:
        ranks.wait_for_output(1, "hanging", 60.0)
        with pytest.raises(ScriptError, match=r"^rank 1 hung for 0 s:") as caught:
            ranks.wait(0.2)
    assert "in hang_here" in str(caught.value)


def test_killed_rank_is_named_or_expected(script: Writer, forked: bool) -> None:
    path = script("if rank == 1: time.sleep(600)")
    with spawn_script(path, 2, forked=forked) as ranks:
        ranks.send_signal(1, signal.SIGKILL)
        with pytest.raises(ScriptError, match="rank 1 was killed by SIGKILL"):
            ranks.wait(60.0)
        assert ranks.wait(60.0, deaths={1: signal.SIGKILL}) == ["", ""]


def test_nothing_survives_the_block(script: Writer, forked: bool) -> None:
    path = script("""
        child = subprocess.Popen(["sleep", "600"])
        print(child.pid, "started")
        time.sleep(600)
    """)
    with spawn_script(path, 1, forked=forked) as ranks:
        child = int(ranks.wait_for_output(0, "started", 60.0).split()[0])
    assert ranks.processes[0].returncode == -signal.SIGKILL
    assert eventually(lambda: gone(child)), "the child of the script's rank lives on"


@pytest.mark.defect("strangers-36")
def test_children_take_signals_that_the_suite_was_told_to_ignore() -> None:
    """Under nohup, or in the background of a script, tests of signals hung for five minutes each."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        hear_ignored_signals()
        child = subprocess.run(["bash", "-c", "kill -HUP $$; exec true"])
    finally:
        signal.signal(signal.SIGHUP, before)
    assert child.returncode == -signal.SIGHUP

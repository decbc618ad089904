"""Known defects of the command, by their numbers (redesign: turns; strangers); see `tests.defects`."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.scripts import ROOT

COMMAND = [sys.executable, "-m", "crossover_ddp.cli"]
TIMEOUT_S = 60.0
LINES = 30_000  # more than a pipe holds


def run_job(job: str, **streams: Any) -> "subprocess.CompletedProcess[bytes]":
    """Let ``crossover-ddp run`` run one job of bash."""
    words = [*COMMAND, "run", "--", "bash", "-c", job]
    return subprocess.run(words, cwd=ROOT, timeout=TIMEOUT_S, **streams)


@pytest.fixture(params=["a full disk", "a terminal that is gone", "a reader that is gone"])
def unwritable(request: pytest.FixtureRequest) -> Iterator[int]:
    """Open a descriptor whose writes fail."""
    if request.param == "a full disk":
        descriptor = os.open("/dev/full", os.O_WRONLY)
    else:
        theirs, descriptor = os.openpty() if "terminal" in request.param else os.pipe()
        os.close(theirs)
    yield descriptor
    os.close(descriptor)


@pytest.mark.defect("strangers-19")
def test_jobs_end_well_although_nothing_can_be_shown(unwritable: int, tmp_path: Path) -> None:
    """The run's exit code is that of the jobs, wherever its own output goes."""
    done = tmp_path / "done"
    job = f"for i in 1 2 3; do echo $i; echo $i >&2; sleep 0.2; done; touch {done}"
    assert run_job(job, stdout=unwritable, stderr=unwritable).returncode == 0
    assert done.exists()


@pytest.mark.defect("strangers-19")
def test_a_terminal_made_non_blocking_by_others_gets_every_line() -> None:
    """Another program that shares the terminal may have set it so; a slow reader then sees `EAGAIN`."""
    theirs, ours = os.pipe()
    os.set_blocking(ours, False)
    words = [*COMMAND, "run", "--", "bash", "-c", f"seq {LINES}"]
    with subprocess.Popen(words, cwd=ROOT, stdout=ours, stderr=subprocess.DEVNULL) as runner:
        os.close(ours)
        with os.fdopen(theirs, "rb") as reader:
            shown = reader.read()
        assert runner.wait(TIMEOUT_S) == 0
    assert shown.count(b"a   | ") == LINES

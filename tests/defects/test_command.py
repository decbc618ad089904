"""Known defects of the command, by their numbers (redesign: turns; strangers); see `tests.defects`."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness.scripts import ROOT

COMMAND = [sys.executable, "-m", "crossover_ddp.cli"]
TIMEOUT_S = 60.0


def run(logs: Path, *words: str, **given: Any) -> "subprocess.CompletedProcess[str]":
    command, given = [*COMMAND, "run", "--logs", str(logs), "--", *words], given or {"capture_output": True}
    return subprocess.run(command, cwd=ROOT, timeout=TIMEOUT_S, text=True, **given)


@pytest.mark.defect("strangers-19")
@pytest.mark.parametrize("gone", ["a full disk", "a terminal", "a reader"])
def test_jobs_end_well_although_nothing_can_be_shown(gone: str, tmp_path: Path) -> None:
    if gone == "a full disk":
        output = os.open("/dev/full", os.O_WRONLY)
    else:
        theirs, output = os.openpty() if gone == "a terminal" else os.pipe()
        os.close(theirs)
    done = tmp_path / "done"
    code = run(tmp_path, "touch", str(done), stdout=output, stderr=output).returncode
    os.close(output)
    assert code == 0
    assert done.exists()


@pytest.mark.defect("turns-8")
@pytest.mark.parametrize("launcher", ["train.py", "-m train"])
def test_a_script_may_have_an_argument_called_torchrun(launcher: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys; print(sys.argv[1:])")
    command = f"PYTHONPATH={tmp_path} {sys.executable} {launcher.replace('train.py', f'{tmp_path}/train.py')}"
    assert run(tmp_path, f"{command} --launcher torchrun --lr 0.1").returncode == 0
    assert "['--launcher', 'torchrun', '--lr', '0.1']" in (tmp_path / "1.log").read_text()


@pytest.mark.defect("strangers-20")
def test_two_torchruns_at_one_endpoint_are_refused_whatever_their_ids_are(tmp_path: Path) -> None:
    """With c10d one of them would serve the other's store, and end it with itself."""
    torchrun = f"{sys.executable} -m torch.distributed.run --rdzv-backend c10d"
    torchrun += " --rdzv-endpoint localhost:29412 --rdzv-id {} none.py"
    done = run(tmp_path, torchrun.format("a"), "--", torchrun.format("b"))
    assert done.returncode == 2
    assert "expected a rendezvous of its own for each job" in done.stderr


@pytest.mark.defect("strangers-35")
def test_a_platform_without_fcntl_is_named() -> None:
    """The wheel claims any platform; where it cannot work, the first name that is imported says why."""
    text = "import sys; sys.modules['fcntl'] = None; from crossover_ddp import GPUMutex"
    words = [sys.executable, "-c", text]
    done = subprocess.run(words, cwd=ROOT, timeout=TIMEOUT_S, capture_output=True, text=True)
    assert done.stderr.splitlines()[-1].startswith("ImportError: expected Linux, got sys.platform=linux;")

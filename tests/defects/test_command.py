"""Known defects of the command, by their numbers (redesign: turns; strangers); see `tests.defects`."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.scripts import ROOT

COMMAND = [sys.executable, "-m", "crossover_ddp.cli"]
TIMEOUT_S = 60.0


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
    words = [*COMMAND, "run", "--logs", str(tmp_path), "--", "touch", str(done)]
    assert (
        subprocess.run(words, cwd=ROOT, timeout=TIMEOUT_S, stdout=unwritable, stderr=unwritable).returncode
        == 0
    )
    assert done.exists()


# --- torchrun -----------------------------------------------------------------------------------------------------


def run(logs: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    command = [*COMMAND, "run", "--logs", str(logs), *words]
    return subprocess.run(command, cwd=ROOT, timeout=TIMEOUT_S, capture_output=True, text=True)


@pytest.mark.defect("turns-8")
@pytest.mark.parametrize("launcher", ["train.py", "-m train"])
def test_a_script_may_have_an_argument_called_torchrun(launcher: str, tmp_path: Path) -> None:
    """Only a program called torchrun has torchrun's arguments."""
    (tmp_path / "train.py").write_text("import sys; print(sys.argv[1:])")
    command = f"PYTHONPATH={tmp_path} {sys.executable} {launcher.replace('train.py', f'{tmp_path}/train.py')}"
    assert run(tmp_path, "--", f"{command} --launcher torchrun --lr 0.1").returncode == 0
    assert "['--launcher', 'torchrun', '--lr', '0.1']" in (tmp_path / "1.log").read_text()


@pytest.mark.defect("strangers-20")
def test_two_torchruns_at_one_endpoint_are_refused_whatever_their_ids_are(tmp_path: Path) -> None:
    """With c10d one of them would serve the other's store, and end it with itself."""
    torchrun = f"{sys.executable} -m torch.distributed.run"
    torchrun += " --rdzv-backend c10d --rdzv-endpoint localhost:29412 --rdzv-id {} none.py"
    done = run(tmp_path, "--", torchrun.format("a"), "--", torchrun.format("b"))
    assert done.returncode == 2
    assert "expected a rendezvous of its own for each job" in done.stderr


# --- importing ----------------------------------------------------------------------------------------------------


@pytest.mark.defect("strangers-35")
def test_a_platform_without_fcntl_is_named() -> None:
    """The wheel claims any platform; where it cannot work, the first name that is imported says why."""
    text = "import sys; sys.modules['fcntl'] = None; from crossover_ddp import GPUMutex"
    done = subprocess.run(
        [sys.executable, "-c", text], cwd=ROOT, timeout=TIMEOUT_S, capture_output=True, text=True
    )
    assert done.stderr.splitlines()[-1].startswith("ImportError: expected Linux, got sys.platform=linux;")

"""`crossover-ddp run` with the scripts and terminals of users: arguments, rendezvous, closed outputs."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness.scripts import ROOT

TIMEOUT_S = 60.0


def run(logs: Path, *words: str, **options: Any) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "crossover_ddp.cli", "run", "--logs", str(logs), "--", *words]
    options = options or {"capture_output": True}
    return subprocess.run(command, cwd=ROOT, timeout=TIMEOUT_S, text=True, **options)


@pytest.mark.defect("strangers-19")
@pytest.mark.parametrize("broken", ["a full disk", "a terminal", "a reader"])
def test_jobs_end_well_if_their_output_cannot_be_shown(broken: str, tmp_path: Path) -> None:
    if broken == "a full disk":
        output = os.open("/dev/full", os.O_WRONLY)
    else:
        other_end, output = os.openpty() if broken == "a terminal" else os.pipe()
        os.close(other_end)
    done = tmp_path / "done"
    code = run(tmp_path, "touch", str(done), stdout=output, stderr=output).returncode
    os.close(output)
    assert code == 0
    assert done.exists()


@pytest.mark.defect("turns-8")
@pytest.mark.parametrize("launcher", ["train.py", "-m train"])
def test_a_script_may_have_an_argument_called_torchrun(launcher: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys; print(sys.argv[1:])")
    script = launcher.replace("train.py", f"{tmp_path}/train.py")
    command = f"PYTHONPATH={tmp_path} {sys.executable} {script} --launcher torchrun --lr 0.1"
    assert run(tmp_path, command).returncode == 0
    assert "['--launcher', 'torchrun', '--lr', '0.1']" in (tmp_path / "1.log").read_text()


@pytest.mark.defect("strangers-20")
def test_two_torchruns_at_one_endpoint_are_refused_whatever_their_ids_are(tmp_path: Path) -> None:
    """With c10d, one of them would serve the other's store, and end it when it ends itself."""
    torchrun = f"{sys.executable} -m torch.distributed.run --rdzv-backend c10d"
    torchrun += " --rdzv-endpoint localhost:29412 --rdzv-id {} none.py"
    done = run(tmp_path, torchrun.format("a"), "--", torchrun.format("b"))
    assert done.returncode == 2
    assert "expected a rendezvous of its own for each job" in done.stderr

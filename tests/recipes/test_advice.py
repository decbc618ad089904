"""Advice on a real script: what is measured of it, with a hook of this package, and that nothing of it goes on."""

import json
import subprocess
import sys

import pytest

from crossover_ddp import cli

from . import RECIPES


@pytest.mark.timeout(120)
def test_a_job_under_torchrun_is_measured_and_ended(capfd: pytest.CaptureFixture[str]) -> None:
    script = [str(RECIPES / "train.py"), "--preset", "tiny", "--hook", "decoupled", "--optimizer", "sgd"]
    endless = ["--steps", "1000001", "--threads", "1", "--eval-every", "0"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *script, *endless]
    code = cli.main(["advise", "--json", "--steps", "17", "--", *launch])
    out, err = capfd.readouterr()
    assert code == 0, err
    found = json.loads(out)["figures"]
    assert found["ranks"] == 2
    assert found["compute_s"] > 0
    assert found["size_bytes"] == pytest.approx(2.1e5, rel=0.2)
    running = subprocess.run(["pgrep", "-f", "steps 1000001"], capture_output=True, check=False)
    assert running.stdout == b""

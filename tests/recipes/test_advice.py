"""Advice on real runs: what it measures and predicts, beside what then happens.

The jobs' compute is sleep and their links are slow, so that a busy machine changes neither by much.
"""

import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import lab
from crossover_ddp import cli
from crossover_ddp.cli.advise.advice import DECOUPLED_TRAINING
from crossover_ddp.cli.output import FINE
from lab import Cluster, Job
from tests.harness._preloaded import forked_if_script
from tests.harness.campaign import IN_CAMPAIGN
from tests.harness.groups import free_port
from tests.harness.waiting import eventually, gone

from . import RECIPES

SCRIPT = str(RECIPES / "studies" / "sleepy_job.py")
_REASON = lab.why_not_shaped()
LAYERS, FORWARD_S, BACKWARD_S = 6, 0.02, 0.04
GRADIENT_BYTES = LAYERS * 256 * 256 * 4
COMPUTE_S = LAYERS * (FORWARD_S + BACKWARD_S)
WIRE_S = 2 * COMPUTE_S
STEPS, SETTLED = 10, 4
# Far less than a wrong letter: the step is more than twice as long as C, N as long as C. A machine that has other
# things to do lengthens C more than the rest, since each sleep then ends late.
TOLERANCE = 0.35
LATE = 0.8
# A process that becomes rank 0 and starts rank 1; both leave their numbers where the script is.
PAIR = """
import os, pathlib, runpy, sys
rank = "01"[os.fork() == 0]
os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
pathlib.Path(__file__).with_name(rank).write_text(str(os.getpid()))
runpy.run_path(os.environ["SCRIPT"], run_name="__main__")
"""


def job(name: str, hook: str) -> Job:
    words = f"--hook {hook} --layers {LAYERS} --forward {FORWARD_S} --backward {BACKWARD_S} --steps {STEPS}"
    return Job(name, ["python", SCRIPT, *words.split()])


def step_s(log: Path) -> float:
    ends_s = json.loads(log.read_text().splitlines()[-1])["ends_s"]
    return float(ends_s[-1] - ends_s[SETTLED - 1]) / (STEPS - SETTLED)


@pytest.mark.quiet
@pytest.mark.root
@pytest.mark.skipif(not IN_CAMPAIGN, reason="compares seconds: make campaign runs it, on an idle machine")
@pytest.mark.skipif(_REASON is not None, reason=f"no emulated network: {_REASON}")
@pytest.mark.timeout(180)
@pytest.mark.usefixtures("forked_lab")
def test_what_is_measured_and_predicted_is_what_happens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rate_mbit = GRADIENT_BYTES * 8 / 1e6 / WIRE_S
    with Cluster(nodes=2, rate_mbit=rate_mbit) as cluster:
        cluster.run([job("split", "split")], 60, out=tmp_path)
        cluster.run([job("decoupled", "decoupled")], 60, out=tmp_path)
    assert cli.main(["advise", "--json", str(tmp_path / "split" / "timeline")]) == FINE
    told = json.loads(capsys.readouterr().out)
    found = told["figures"]
    assert COMPUTE_S <= found["compute_s"] <= COMPUTE_S * (1 + LATE)
    assert found["wire_s"] == pytest.approx(WIRE_S, rel=TOLERANCE)
    assert found["step_s"] == pytest.approx(step_s(tmp_path / "split" / "rank0.log"), rel=TOLERANCE)
    predicted = next(each for each in told["advice"]["options"] if each["what"] == DECOUPLED_TRAINING)
    # The planner may choose as many buckets as there are layers here, and no more help.
    assert step_s(tmp_path / "decoupled" / "rank0.log") == pytest.approx(predicted["step_s"], rel=TOLERANCE)
    # And a decoupled run says the same of itself: its own stalls are what was exposed.
    assert cli.main(["advise", "--json", str(tmp_path / "decoupled" / "timeline")]) == FINE
    own = json.loads(capsys.readouterr().out)["figures"]
    assert own["hook"] == "decoupled"
    assert COMPUTE_S <= own["compute_s"] <= COMPUTE_S * (1 + LATE)
    assert own["wire_s"] == pytest.approx(WIRE_S, rel=TOLERANCE)


def check_measured(hook: str, command: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    code = cli.main(["advise", "--json", "--steps", "12", "--", *command, "--hook", hook])
    out, err = capfd.readouterr()
    assert code == FINE, err
    found = json.loads(out)["figures"]
    assert found["hook"] == ("wrapped" if hook == "wrapped" else "split")
    assert found["ranks"] == [0, 1]
    assert found["compute_s"] >= 4 * 0.006
    assert (found["wire_s"] is None) == (hook == "wrapped")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("hook", ["crossover", "wrapped"] if IN_CAMPAIGN else ["crossover"])
def test_a_job_under_torchrun_is_measured_and_ended(hook: str, capfd: pytest.CaptureFixture[str]) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", SCRIPT]
    check_measured(hook, launch, capfd)
    running = subprocess.run(
        ["pgrep", "-f", "sleepy_job.py --hook " + hook], capture_output=True, check=False
    )
    assert running.stdout == b""


@pytest.mark.timeout(120)
def test_a_wrapped_job_is_measured_and_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The same without torchrun, whose imports take longer than all the rest."""
    monkeypatch.setattr("crossover_ddp.cli.advise.short_run.Child", forked_if_script)
    monkeypatch.setenv("SCRIPT", SCRIPT)
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    (pair := tmp_path / "pair.py").write_text(PAIR)
    try:
        check_measured("wrapped", [sys.executable, str(pair)], capfd)
    finally:
        pids = [int(path.read_text()) for path in tmp_path.glob("[01]")]
        left = [pid for pid in pids if not eventually(functools.partial(gone, pid))]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
    assert len(list(tmp_path.glob("[01]"))) == 2
    assert left == []

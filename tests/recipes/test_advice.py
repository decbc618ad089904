"""Advice on real runs: what is measured is what was made so, and what is predicted is what happens.

The jobs' compute is sleep and their links are slow, so that a busy machine changes neither by much.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import lab
from crossover_ddp import cli
from crossover_ddp.cli.advise import DECOUPLED, figures, measuring
from lab import Cluster, Job
from tests.harness.campaign import IN_CAMPAIGN

from . import RECIPES

SCRIPT = str(RECIPES / "studies" / "sleepy_job.py")
_REASON = lab.why_not_shaped()
LAYERS, FORWARD_S, BACKWARD_S = 6, 0.02, 0.04
GRADIENT_BYTES = LAYERS * 256 * 256 * 4
COMPUTE_S = LAYERS * (FORWARD_S + BACKWARD_S)
WIRE_S = 2 * COMPUTE_S
STEPS, SETTLED, MEASURED = 10, 4, 18
# Far less than a wrong letter: the step is more than twice as long as C, N as long as C. A machine that has other
# things to do lengthens C more than the rest, since each sleep then ends late.
TOLERANCE = 0.35


def job(name: str, hook: str, steps: int) -> Job:
    words = f"--hook {hook} --layers {LAYERS} --forward {FORWARD_S} --backward {BACKWARD_S} --steps {steps}"
    return Job(name, ["python", SCRIPT, *words.split()])


def step_s(log: Path) -> float:
    ends_s = json.loads(log.read_text().splitlines()[-1])["ends_s"]
    return float(ends_s[-1] - ends_s[SETTLED - 1]) / (STEPS - SETTLED)


@pytest.mark.quiet
@pytest.mark.root
@pytest.mark.skipif(not IN_CAMPAIGN, reason="compares seconds: make campaign runs it, on an idle machine")
@pytest.mark.skipif(_REASON is not None, reason=f"no emulated network: {_REASON}")
@pytest.mark.timeout(180)
def test_what_is_measured_and_predicted_is_what_happens(tmp_path: Path) -> None:
    rate_mbit = GRADIENT_BYTES * 8 / 1e6 / WIRE_S
    measured = Job("measured", job("measured", "plain", MEASURED).command, env=measuring(tmp_path / "meter"))
    with Cluster(nodes=2, rate_mbit=rate_mbit) as cluster:
        cluster.run([measured], 60, out=tmp_path)
        cluster.run([job("decoupled", "decoupled", STEPS)], 60, out=tmp_path)
    found = figures(tmp_path / "meter")
    assert found.compute_s == pytest.approx(COMPUTE_S, rel=TOLERANCE)
    assert found.wire_s == pytest.approx(WIRE_S, rel=TOLERANCE)
    assert (found.size_bytes, found.ranks) == (GRADIENT_BYTES, 2)
    predicted_s = found.step_s / DECOUPLED.expected(found)
    assert step_s(tmp_path / "decoupled" / "rank0.log") == pytest.approx(predicted_s, rel=TOLERANCE)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("hook", ["decoupled", "crossover", "wrapped"] if IN_CAMPAIGN else ["decoupled"])
def test_a_job_under_torchrun_is_measured_and_ended(hook: str, capfd: pytest.CaptureFixture[str]) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", SCRIPT]
    code = cli.main(["advise", "--json", "--steps", "17", "--", *launch, "--hook", hook])
    out, err = capfd.readouterr()
    assert code == 0, err
    found = json.loads(out)["figures"]
    assert found["ranks"] == 2
    assert found["compute_s"] >= 4 * 0.006
    running = subprocess.run(
        ["pgrep", "-f", "sleepy_job.py --hook " + hook], capture_output=True, check=False
    )
    assert running.stdout == b""

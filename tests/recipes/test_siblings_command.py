"""`crossover-ddp run` with the training recipe: two torchrun jobs that take turns in one group."""

import os
import sys
from pathlib import Path

import pytest

from crossover_ddp import cli
from tests.harness.campaign import only_in_campaign
from tests.harness.groups import files_of
from tests.recipes import RECIPES

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]
TRAIN = [
    *(
        str(RECIPES / "train.py"),
        "--device",
        "cpu",
        "--threads",
        "1",
        "--hook",
        "crossover",
        "--steps",
        "90",
    ),
    *("--model", "gpt", "--model-option", "dim=32", "--vocabulary", "512", "--context", "32"),
    *("--batch-size", "8", "--optimizer", "adamw", "--eval-every", "0", "--log-every", "15"),
]


@only_in_campaign
@pytest.mark.timeout(240)
def test_two_torchrun_jobs_take_turns_in_one_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    root = RECIPES.parent
    monkeypatch.chdir(root)
    monkeypatch.setenv("PYTHONPATH", str(root))
    jobs = [[*TORCHRUN, "2", *TRAIN, "--seed", str(seed)] for seed in (1, 2)]
    words = [word for job in jobs for word in ("--", *job)]
    timeline = tmp_path / "timeline"
    monkeypatch.setenv("CROSSOVER_TIMELINE", str(timeline))
    assert cli.main(["run", "--logs", str(tmp_path), *words]) == 0, capfd.readouterr().err
    for job in (1, 2):
        assert "90 steps" in (tmp_path / f"{job}.log").read_text()
        recorded = "".join(path.read_text() for path in (timeline / str(job)).glob("rank0-*"))
        assert recorded.count("compute") >= 80, "turns"
    assert files_of(os.environ["CROSSOVER_GROUP"]) == []

"""`crossover-ddp run` with the training recipe: two torchrun jobs that take turns in one group."""

import json
import os
import sys
from pathlib import Path

import pytest

from crossover_ddp import cli
from crossover_ddp.cli.output import FINE
from tests.harness.campaign import IN_CAMPAIGN
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


@pytest.mark.timeout(240)
def test_two_torchrun_jobs_take_turns_in_one_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    root = RECIPES.parent
    monkeypatch.chdir(root)
    monkeypatch.setenv("PYTHONPATH", str(root))
    # Most of this test are imports, so one of the jobs has one rank only outside of the campaign.
    worlds = (2, 2) if IN_CAMPAIGN else (2, 1)
    jobs = [[*TORCHRUN, str(world), *TRAIN, "--seed", str(seed)] for seed, world in enumerate(worlds, 1)]
    options = ["--json", "--logs", str(tmp_path), "--name", "one", "--name", "two"]
    words = [word for job in jobs for word in ("--", *job)]
    code = cli.main(["run", *options, *words])
    out, err = capfd.readouterr()
    assert code == FINE, err
    document = json.loads(out)
    assert document["group"] == os.environ["CROSSOVER_GROUP"]
    # `run` looks twice a second: how many turns it misses before its first and after its last look is the machine's.
    assert all(0 < job["turns"] <= 90 for job in document["jobs"])
    for job in document["jobs"]:
        assert "--standalone" in job["command"]
        assert "90 steps" in Path(job["log"]).read_text()
        assert f"{job['name']} | step 15 of 90" in err
    assert files_of(document["group"]) == []

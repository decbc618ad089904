"""`crossover-ddp run` with the training recipe: two torchrun jobs that take turns in one group."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.harness.groups import files_of
from tests.recipes import RECIPES

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
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
        "30",
    ),
    *("--model", "gpt", "--model-option", "dim=32", "--vocabulary", "512", "--context", "32"),
    *("--batch-size", "8", "--optimizer", "adamw", "--eval-every", "0", "--log-every", "15"),
]


def test_two_torchrun_jobs_take_turns_in_one_group(tmp_path: Path) -> None:
    root = RECIPES.parent
    jobs = [[*TORCHRUN, *TRAIN, "--seed", str(seed)] for seed in (1, 2)]
    options = ["--json", "--logs", str(tmp_path), "--name", "one", "--name", "two"]
    words = [word for job in jobs for word in ("--", *job)]
    done = subprocess.run(
        [sys.executable, "-m", "crossover_ddp.cli", "run", *options, *words],
        env={**os.environ, "PYTHONPATH": str(root)},
        cwd=root,
        capture_output=True,
        text=True,
        timeout=240.0,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["group"] == os.environ["CROSSOVER_GROUP"]
    # Turns after the last look at a job are not seen.
    assert all(10 < job["turns"] <= 30 for job in document["jobs"])
    for job in document["jobs"]:
        assert "--standalone" in job["command"]
        assert "30 steps" in Path(job["log"]).read_text()
        assert f"{job['name']} | step 15 of 30" in done.stderr
    assert files_of(document["group"]) == []

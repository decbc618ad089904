"""The demo of virtual ranks: a kill, another number of ranks, one hash and a picture."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from tests.recipes import RECIPES

DEMO = RECIPES / "virtual_demo.py"


def demo() -> Any:
    spec = importlib.util.spec_from_file_location("virtual_demo", DEMO)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_killed_job_has_the_hash_of_one_without_a_break(tmp_path: Path) -> None:
    command = [sys.executable, DEMO, "--steps", "16", "--kills", "1", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (hashes,) = re.findall(r"without a break: (\w+), after 1 kills: (\w+)$", done.stdout, re.M)
    assert hashes[0] == hashes[1]
    assert re.search(
        r"ranks?: steps 1 to \d+, killed\n\d ranks?: steps (1|11) to 16, ended", done.stdout
    )
    assert (tmp_path / "curve.png").stat().st_size > 10_000


def test_the_hash_depends_on_each_number(tmp_path: Path) -> None:
    found = set()
    for number, loss in enumerate((0.5, 0.5 + 2**-50)):
        path = tmp_path / f"{number}.pt"
        torch.save({"model": {"weight": torch.ones(2)}, "losses": [0.25, loss]}, path)
        found.add(demo().hash_of(path))
    assert len(found) == 2

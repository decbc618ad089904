"""Other people's training loops with the lines that docs/loops.md shows, in two ranks on gloo.

A worker runs each loop without and with the lines. It must end, and leave nothing behind. Loops
that save checkpoints are killed in the middle of an epoch, and another worker resumes them.
"""

import importlib.util
import re
import signal
from pathlib import Path

import pytest
import torch

from tests.harness import spawn_script

WORKER = Path(__file__).with_name("loops_worker.py")
TIMEOUT_S = 150.0
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "ACCELERATE_USE_CPU": "true",  # set by `accelerate launch --cpu`
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


LOOPS = {
    "accelerate": ["accelerate"],
    "trainer": ["transformers", "accelerate"],
    "lightning": ["pytorch_lightning"],
    "fabric": ["lightning_fabric"],
    "compiled": [],
    "timm": ["timm"],
    "imagenet": [],
    "distributed_checkpoint": [],
    "torchvision": [],
    "nanogpt": [],
}
SAVING = (
    "accelerate",
    "lightning",
    "fabric",
    "timm",
    "imagenet",
    "distributed_checkpoint",
    "torchvision",
    "nanogpt",
)


def work(loop: str, phase: str, directory: Path) -> list[str]:
    deaths = dict.fromkeys(range(2), signal.SIGKILL) if phase == "killed" else {}
    arguments = [loop, phase, str(directory)]
    with spawn_script(
        WORKER, 2, args=arguments, environment=ENVIRONMENT, cwd=directory, forked=True
    ) as ranks:
        return ranks.wait(TIMEOUT_S, deaths=deaths)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_with_the_documents_lines_trains_and_resumes(loop: str, tmp_path: Path) -> None:
    if any(importlib.util.find_spec(package) is None for package in LOOPS[loop]):
        pytest.skip(f"needs {LOOPS[loop]}: pip install '.[loops]'")
    saves = loop in SAVING
    printed = work(loop, "killed" if saves else "", tmp_path)
    first, second = (re.findall("^weights .*", each, re.M) for each in printed)
    assert first == second
    assert bool(first) == (loop not in ("imagenet", "distributed_checkpoint", "fabric"))
    if saves:
        work(loop, "resumed", tmp_path)
    for rank in range(2 if saves else 0):
        before, after = (
            torch.load(tmp_path / f"{phase}-{rank}.pt") for phase in ("killed", "resumed")
        )
        assert "killed" not in before
        whole = before["whole"]
        assert len({*whole}) == len(whole) in (8, 12, 13)
        assert after["resumed"] == whole[4:]
        assert before.get("plain", whole) == whole

"""Other people's training loops with the lines that docs/loops.md shows, in two ranks on gloo.

The worker is started once for each loop. It runs the loop without and with the hook, and then ends: it must not hang,
and nothing may be left in shared memory.
"""

import importlib.util
import re
import signal
from pathlib import Path

import pytest
import torch

from tests.harness import spawn_script
from tests.harness.campaign import IN_CAMPAIGN
from tests.harness.leaks import Snapshot

WORKER = Path(__file__).with_name("loops_worker.py")
RESUMED = Path(__file__).with_name("loops_resumed.py")
TIMEOUT_S = 150.0
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "ACCELERATE_USE_CPU": "true",  # as `accelerate launch --cpu` sets it
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def needs(*packages: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}: pip install '.[loops]'")


LOOPS = {
    "accelerate": ["accelerate"],
    "trainer": ["transformers", "accelerate"],
    "lightning": ["pytorch_lightning"],
    "compiled": ["torch"],
    "inductor": ["torch"],
    "timm_task": ["timm"],
}


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_with_the_documents_lines_trains_as_without(loop: str, tmp_path: Path) -> None:
    """The worker says what else it shows; weights must be the same on both ranks."""
    if loop == "inductor" and not IN_CAMPAIGN:
        pytest.skip("only with CROSSOVER_CAMPAIGN=1: a minute of two cores, and it needs g++")
    needs(*LOOPS[loop])
    before = Snapshot.take()
    with spawn_script(WORKER, 2, args=[loop], environment=ENVIRONMENT, cwd=tmp_path, forked=True) as ranks:
        first, second = (re.findall("^weights .*", each, re.M) for each in ranks.wait(TIMEOUT_S))
    assert before.leaks() == []
    assert first == second != []


def run_phase(loop: str, phase: str, directory: Path) -> list[dict[str, list[float]]]:
    """Return the losses of each run, by rank."""
    arguments = [loop, phase, str(directory)]
    killed = dict.fromkeys(range(2), signal.SIGKILL) if phase == "killed" else {}
    with spawn_script(
        RESUMED, 2, args=arguments, environment=ENVIRONMENT, cwd=directory, forked=True
    ) as ranks:
        ranks.wait(TIMEOUT_S, deaths=killed)
    return [torch.load(directory / f"{phase}-{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize(
    ("loop", "package"),
    [
        ("imagenet", "torch"),
        ("timm", "timm"),
        ("lightning", "pytorch_lightning"),
        ("accelerate", "accelerate"),
        ("distributed_checkpoint", "torch"),
    ],
)
def test_a_job_that_was_killed_in_an_epoch_has_the_losses_of_one_that_was_not(
    loop: str, package: str, tmp_path: Path
) -> None:
    needs(package)
    first, resumed = (run_phase(loop, phase, tmp_path) for phase in ("killed", "resumed"))
    for before, after in zip(first, resumed, strict=True):
        whole = before["whole"]
        assert "killed" not in before
        assert len({*whole}) == len(whole) in (8, 12)
        assert after["resumed"] == whole[4:]
        assert before.get("plain", whole) == whole

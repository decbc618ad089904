"""Marked tests run on the device, whatever way they start their processes."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.harness import run_ranks, spawn_script

from . import DEVICES

pytestmark = pytest.mark.fake_cuda


def test_the_process_of_the_test_has_the_devices() -> None:
    assert torch.cuda.device_count() == DEVICES
    assert torch.cuda.get_device_name(0) == "Fake H200"
    assert torch.arange(4, device="cuda").sum().item() == 6


def summed(rank: int, world_size: int) -> float:
    mine = torch.full((3,), rank + 1.0, device=f"cuda:{rank}")
    dist.all_reduce(mine)
    return mine[0].item()


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_ranks_have_the_devices(backend: str) -> None:
    assert run_ranks(summed, 2, backend=backend) == [3.0, 3.0]


def test_scripts_have_the_devices(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\nprint(torch.cuda.device_count(), torch.ones(2, device='cuda:1').sum().item())\n"
    )
    with spawn_script(script, 1) as ranks:
        assert ranks.wait(60.0)[0].endswith(f"{DEVICES} 2.0\n")  # torch 2.11 warns of replaced operators

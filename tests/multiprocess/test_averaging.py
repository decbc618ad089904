"""Local SGD, delayed averaging and DiLoCo in real ranks, against copies in one process, and their identities."""

from functools import cache
from typing import Any

import pytest
import torch

from tests.harness import run_ranks
from tests.multiprocess.averaging_oracle import CELLS, SETTINGS, walk_all

STEPS = 13


@cache
def walks(world_size: int) -> list[dict[tuple[str, str], tuple[torch.Tensor, Any]]]:
    return run_ranks(walk_all, world_size, args=(STEPS,), timeout_s=120)


@pytest.mark.parametrize(("name", "optimizer"), CELLS)
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_walk_the_path_of_copies_in_one_process(world_size: int, name: str, optimizer: str) -> None:
    """To the last bit; where four ranks average gradients in warm-up, DDP's buckets decide the order of additions."""
    found = walks(world_size)
    bitwise = world_size == 2 or "warmup_steps" not in SETTINGS[name][0]
    for of_rank, expected in zip(found, found[0][name, optimizer][1], strict=True):
        difference = float((of_rank[name, optimizer][0] - expected).abs().max())
        assert difference <= (0.0 if bitwise else 1e-6)

"""Local SGD, delayed averaging and DiLoCo in real ranks, against copies in one process, and their identities.

What is averaged does not depend on the optimizer, so each setting meets one with two ranks and another one with four,
and all three only in the campaign.
"""

import itertools
from functools import cache
from typing import Any

import pytest
import torch

from tests.harness import run_ranks
from tests.harness.campaign import IN_CAMPAIGN
from tests.multiprocess.averaging_oracle import MAKERS, SETTINGS, walk_all

STEPS = 13


def cells(world_size: int) -> list[tuple[str, str]]:
    """Return settings and optimizers."""
    if IN_CAMPAIGN:
        return list(itertools.product(SETTINGS, MAKERS))
    optimizers = list(MAKERS)
    shift = 2 if world_size == 2 else 1
    return [(name, optimizers[(place + shift) % len(optimizers)]) for place, name in enumerate(SETTINGS)]


@cache
def walks(world_size: int) -> list[dict[tuple[str, str], tuple[torch.Tensor, Any]]]:
    return run_ranks(walk_all, world_size, args=(STEPS, cells(world_size)), timeout_s=120)


@pytest.mark.parametrize(
    ("world_size", "name", "optimizer"),
    [(world_size, *cell) for world_size in (2, 4) for cell in cells(world_size)],
)
def test_ranks_walk_the_path_of_copies_in_one_process(world_size: int, name: str, optimizer: str) -> None:
    """To the last bit; where four ranks average gradients in warm-up, DDP's buckets decide the order of additions."""
    found = walks(world_size)
    bitwise = world_size == 2 or "warmup_steps" not in SETTINGS[name][0]
    for of_rank, expected in zip(found, found[0][name, optimizer][1], strict=True):
        difference = float((of_rank[name, optimizer][0] - expected).abs().max())
        assert difference <= (0.0 if bitwise else 1e-6)

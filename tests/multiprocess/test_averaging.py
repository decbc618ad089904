"""Local SGD, delayed averaging and DiLoCo in real ranks, against copies in one process.

What is averaged does not depend on the optimizer, so each setting meets one with two ranks and another one with four,
and all three only in the campaign.
"""

import functools
import itertools
from collections.abc import Collection
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from crossover_ddp.averaging_hooks import LocalSGDState
from tests.harness import in_ranks
from tests.harness.campaign import IN_CAMPAIGN
from tests.multiprocess.averaging_oracle import MAKERS, OVERFLOWS, SCALE, Trainer, copies_of, new_scaler
from tests.multiprocess.replicas import DelayedWalk

STEPS = 13
# Arguments of the state, and the outer optimizer's rate and momentum.
SETTINGS: dict[str, tuple[dict[str, int], tuple[float, float] | None]] = {
    "local": ({"sync_every": 4}, None),
    "post_local": ({"sync_every": 3, "warmup_steps": 4}, None),
    "delayed": ({"sync_every": 4, "delay": 3}, None),
    "streamed": ({"sync_every": 4, "delay": 1, "fragments": 4}, None),
    "many_fragments": ({"sync_every": 3, "delay": 2, "fragments": 5, "warmup_steps": 2}, None),
    "diloco": ({"sync_every": 4}, (0.7, 0.9)),
    "diloco_of_rate_1": ({"sync_every": 4}, (1.0, 0.0)),  # which is local SGD
    "streaming_diloco": ({"sync_every": 4, "delay": 2, "fragments": 3, "warmup_steps": 1}, (0.7, 0.9)),
}


class Cell(NamedTuple):
    """A setting, an optimizer, and whether a GradScaler skips steps on one rank alone."""

    name: str
    optimizer: str
    scaled: bool = False


def cells(world_size: int) -> list[Cell]:
    """Return what is walked; alone a rank trains as without a hook."""
    if world_size == 1:
        return [Cell("local", "momentum"), Cell("many_fragments", "adamw")]
    if IN_CAMPAIGN:
        found = [Cell(*each) for each in itertools.product(SETTINGS, MAKERS)]
    else:
        optimizers, shift = list(MAKERS), 2 if world_size == 2 else 1
        found = [
            Cell(name, optimizers[(place + shift) % len(optimizers)]) for place, name in enumerate(SETTINGS)
        ]
    if world_size == 2:
        found += [Cell(name, "momentum", True) for name in ("local", "post_local", "delayed", "streamed")]
    return found


def skips_of(cell: Cell) -> Collection[tuple[int, int]]:
    """In warm-up gradients are averaged, so that all ranks meet an overflow and skip."""
    warm = SETTINGS[cell.name][0].get("warmup_steps", 0)
    return {
        (rank, step) for guilty, step in OVERFLOWS for rank in (0, 1) if rank == guilty or step < warm
    } if cell.scaled else ()  # fmt: skip


@pytest.mark.parametrize(
    ("world_size", "cell"),
    [
        pytest.param(size, cell, id=f"{size}-{cell.name}-{cell.optimizer}{'-scaled' * cell.scaled}")
        for size in (1, 2, 4)
        for cell in cells(size)
    ],
)
@in_ranks()
def test_ranks_walk_the_path_of_copies_in_one_process(rank: int, world_size: int, cell: Cell) -> None:
    """To the last bit; where four ranks average gradients in warm-up, DDP's buckets decide the order of additions."""
    (settings, outer), skips = SETTINGS[cell.name], skips_of(cell)
    make = outer and functools.partial(torch.optim.SGD, lr=outer[0], momentum=outer[1], nesterov=outer[1] > 0)
    state, is_local = LocalSGDState(**settings, outer_optimizer=make), "warmup_steps" not in settings
    # DDP leaves buffers to the state.
    trainer, scaler = Trainer(rank, state, cell.optimizer, broadcast_buffers=is_local), new_scaler()
    for _ in range(STEPS):
        trainer.scaled_step(scaler) if cell.scaled else trainer.step()
    assert state.stats()["steps"] == STEPS, "a skipped update has stopped the clock"
    assert scaler.get_scale() == SCALE / 2 ** sum(skipping == rank for skipping, _ in skips)
    expected: list[Any] = [None]
    if rank == 0:
        walk = DelayedWalk(copies_of(world_size, cell.optimizer, skips), **settings, outer=outer)
        for _ in range(STEPS):
            walk.step()
        expected = [walk.copies.snapshots()]
    dist.broadcast_object_list(expected)
    tolerance = 0.0 if world_size == 2 or is_local else 1e-6
    assert float((trainer.end() - expected[0][rank]).abs().max()) <= tolerance

"""A centre that several processes write at the same time: nothing torn, little lost."""

import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from crossover_ddp._averaging.shared_centre import chunks_from, pull_shared, share
from crossover_ddp._engine.exchange import Exchange
from crossover_ddp.errors import SegmentError
from tests.harness import run_ranks

NUMEL = 1_000_003
WRITES = 25
"""Of each of four ranks: 10⁸ updates of an element in all."""


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def exchange_of_all() -> Exchange:
    return Exchange(world())


def write(rank: int, world_size: int) -> tuple[float, bool, bool, float]:
    torch.set_num_threads(1)
    exchange = exchange_of_all()
    start = [torch.zeros(NUMEL)]
    (centre,), leaders, mates = share(world(), start)
    assert leaders == [0] and mates == list(range(world_size))
    exchange.gather_numbers([0.0], torch.device("cpu"))
    ones = torch.ones(NUMEL)
    for _ in range(WRITES):
        for start, chunk in chunks_from(rank / world_size, [ones]):
            centre[start : start + chunk.numel()].add_(chunk)
    exchange.gather_numbers([0.0], torch.device("cpu"))
    values = centre.clone()
    lost = 1 - float(values.double().sum()) / (NUMEL * WRITES * world_size)
    whole = bool((values == values.round()).all() and (values >= WRITES).all())
    exchange.close()
    return lost, whole, bool(values.isfinite().all()), float(values.max())


def test_four_writers_lose_little_and_tear_nothing() -> None:
    for lost, whole, finite, most in run_ranks(write, 4):
        print(f"lost share of 10^8 updates: {lost:.2e}")
        assert whole and finite
        assert most <= 4 * WRITES
        assert 0 <= lost < 0.01


def pull(rank: int, world_size: int) -> tuple[float, float]:
    """Pull at the same time, from different places; what one loses the centre gains."""
    exchange = exchange_of_all()
    values = [torch.full((70_000,), float(rank)), torch.full((61,), float(rank), dtype=torch.bfloat16)]
    starts = [torch.zeros(70_061)]
    (centre,), _, mates = share(world(), starts)
    before = sum(float(each.double().sum()) for each in values)
    for _ in range(40):
        pull_shared(centre, values, 0.1, mates.index(rank) / len(mates))
        exchange.gather_numbers([0.0], torch.device("cpu"))
    gone = before - sum(float(each.double().sum()) for each in values)
    table = exchange.gather_numbers([gone], torch.device("cpu"))
    gained = float(centre.double().sum())
    exchange.close()
    return sum(numbers[0] for numbers in table), gained


def test_the_centre_gains_what_ranks_lose() -> None:
    for gone, gained in run_ranks(pull, 2):
        assert gained == pytest.approx(gone, rel=0.01)
        assert gained > 10_000


def no_room(rank: int, world_size: int) -> str:
    exchange = exchange_of_all()
    failing = mock.patch.object(os, "posix_fallocate", side_effect=OSError(28, "No space left on device"))
    with failing, pytest.raises(SegmentError) as caught:
        share(world(), [torch.zeros(10)])
    exchange.gather_numbers([0.0], torch.device("cpu"))
    exchange.close()
    return str(caught.value)


def test_without_room_all_ranks_are_told() -> None:
    first, second = run_ranks(no_room, 2)
    assert "got none on ranks [0]: [Errno 28] No space left on device; use mode='async'" in first
    assert "got none on ranks [0]: see there" in second

"""A centre that several processes write at the same time: nothing torn, little lost."""

import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from crossover_ddp._averaging.shared_centre import chunks_from, pull_shared, share
from crossover_ddp._engine.exchange import Exchange
from crossover_ddp.errors import SegmentError
from tests.harness import in_ranks

NUMEL = 1_000_003
WRITES = 25
"""Of each of four ranks: 10⁸ updates of an element in all."""


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def exchange_of_all() -> Exchange:
    return Exchange(world())


@in_ranks(4)
def test_four_writers_lose_little_and_tear_nothing(rank: int, world_size: int) -> None:
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
    exchange.close()
    print(f"lost share of 10^8 updates: {lost:.2e}")
    assert torch.equal(values, values.round())
    assert values.min() >= WRITES
    assert values.max() <= 4 * WRITES
    assert 0 <= lost < 0.01


@in_ranks(2)
def test_the_centre_gains_what_ranks_lose(rank: int) -> None:
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
    assert 10_000 < gained == pytest.approx(sum(numbers[0] for numbers in table), rel=0.01)


@in_ranks(2)
def test_without_room_all_ranks_are_told(rank: int) -> None:
    exchange = exchange_of_all()
    full = OSError(28, "No space left on device") if rank == 0 else None
    allocate = mock.patch.object(os, "posix_fallocate", side_effect=full, wraps=os.posix_fallocate)
    why = "see there" if rank else r"\[Errno 28\] No space left on device; use mode='async'"
    with allocate, pytest.raises(SegmentError, match=rf"got none on ranks \[0\]: {why}"):
        share(world(), [torch.zeros(10)])
    exchange.gather_numbers([0.0], torch.device("cpu"))
    exchange.close()

"""What travels in a bucket's place: uneven parts, more on the way there than on the way back, or nothing back."""

import functools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from crossover_ddp._exchange.exchange import Exchange
from crossover_ddp._exchange.layout import Layout
from crossover_ddp._exchange.transfer import Payload, Sharded
from tests.harness import run_ranks
from tests.unit.exchange.fake_bucket import FakeBucket

SIZE = 7
LARGE = 1 << 18


def engine() -> Exchange:
    group = dist.group.WORLD
    assert group is not None
    return Exchange(group)


def _given(payload: Payload) -> Payload:
    return payload


def chunk_by_chunk(rank: int, world_size: int) -> tuple[list[int], list[float], float]:
    """Rank 0 owns a large part; it lets the first half leave, and ends its step when rank 1 has it."""
    exchange = engine()
    group = dist.group.WORLD
    assert group is not None
    layout = Layout.of_lengths([LARGE, *[0] * (world_size - 1)])
    buffer = torch.full((LARGE,), float(rank + 1))
    arrived: list[int] = []
    firsts: list[float] = []

    def arriving(numel: int) -> None:
        arrived.append(numel)
        firsts.append(float(buffer[numel - 1]))

    def step(part: torch.Tensor, final: Callable[[int], None]) -> None:
        if rank == 0:
            part[: LARGE // 2] *= 2
            final(LARGE // 2)
            group.recv([torch.zeros(1)], 1, 7).wait()  # rank 1 tells when it sees what has left

    sharded = Sharded(buffer, layout)
    payload = Payload(sharded, sharded, step, lambda: None, arriving=arriving)
    future = exchange.submit(FakeBucket(torch.zeros(1)), payload=functools.partial(_given, payload))  # type: ignore[arg-type]
    if rank == 1:
        deadline_s = time.monotonic() + 30
        while buffer[0] != 2 * mean_of(world_size) and time.monotonic() < deadline_s:
            time.sleep(0.001)
        group.send([torch.zeros(1)], 0, 7).wait()
    future.wait()
    exchange.close()
    return arrived, firsts, float(buffer[0] + buffer[-1])


def mean_of(world_size: int) -> float:
    return (world_size + 1) / 2


@pytest.mark.parametrize("world_size", [2, 3])
def test_an_owner_hears_what_arrives_and_lets_go_what_is_done(world_size: int) -> None:
    results: list[Any] = run_ranks(chunk_by_chunk, world_size)
    arrived, firsts, _ = results[0]
    assert len(arrived) > 2, "several chunks"
    assert arrived == sorted(set(arrived))
    assert arrived[-1] == LARGE
    assert firsts == [mean_of(world_size)] * len(firsts), "sums are complete when they are told"
    assert all(told == [] for told, _, _ in results[1:])
    assert all(ends == 3 * mean_of(world_size) for _, _, ends in results)


def long_steps(rank: int, world_size: int) -> list[float]:
    """Rank 1's step for the first bucket waits until rank 0 has begun that for the second one."""
    exchange = engine()
    group = dist.group.WORLD
    assert group is not None
    layout = Layout.equal(2 * SIZE, world_size)

    def step(index: int, back: torch.Tensor, part: torch.Tensor, final: Callable[[int], None]) -> None:
        if (rank, index) == (1, 0):
            group.recv([torch.zeros(1)], 0, 9).wait()
        if (rank, index) == (0, 1):
            group.send([torch.zeros(1)], 1, 9).wait()
        own = layout.part(rank)
        back[own.start : own.stop] = part + index

    futures, backs = [], []
    for index in range(2):
        there, back = torch.full((layout.numel,), float(rank + 1)), torch.zeros(layout.numel)
        payload = Payload(
            Sharded(there, layout),
            Sharded(back, layout),
            functools.partial(step, index, back),
            lambda: None,
            is_long=True,
        )
        bucket = FakeBucket(torch.zeros(1), index=index, last=index == 1)
        futures.append(exchange.submit(bucket, payload=functools.partial(_given, payload)))  # type: ignore[arg-type]
        backs.append(back)
    for future in futures:
        future.wait()
    exchange.close()
    return [float(back.mean()) for back in backs]


def test_a_long_step_runs_beside_the_gather_before_it() -> None:
    assert run_ranks(long_steps, 2) == [[1.5, 2.5]] * 2

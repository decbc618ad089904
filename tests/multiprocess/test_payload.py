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
from crossover_ddp.errors import ExchangeError
from tests.harness import run_ranks
from tests.harness.turn import RecordingTurn
from tests.unit.exchange.fake_bucket import FakeBucket

SIZE = 7
LARGE = 1 << 18


def engine() -> Exchange:
    group = dist.group.WORLD
    assert group is not None
    return Exchange(group)


def _given(payload: Payload) -> Payload:
    return payload


def uneven(world_size: int) -> Layout:
    """Rank 0 owns nothing, the others more and more."""
    return Layout.of_lengths([rank * SIZE for rank in range(world_size)])


def there_and_back(rank: int, world_size: int) -> tuple[list[list[float]], list[str]]:
    """Send three buckets: their payload goes with an appendix, and comes back squared without it."""
    exchange, turn = engine(), RecordingTurn()
    buckets = [torch.zeros(uneven(world_size).numel) for _ in range(3)]
    futures = []
    for index, buffer in enumerate(buckets):
        payload = squared(buffer, rank, world_size, index)
        bucket = FakeBucket(buffer, index=index, last=index == 2)
        futures.append(exchange.submit(bucket, turn=turn, payload=functools.partial(_given, payload)))  # type: ignore[arg-type]
    values = [future.wait() for future in futures]
    assert all(value is buffer for value, buffer in zip(values, buckets, strict=True))
    exchange.close()
    return [buffer.tolist() for buffer in buckets], turn.order


def squared(buffer: torch.Tensor, rank: int, world_size: int, index: int) -> Payload:
    layout = uneven(world_size)
    with_appendix = Layout.of_lengths([length + 2 for length in layout.lengths])
    there = torch.full((with_appendix.numel,), float(rank + 1 + index))
    back = torch.zeros(layout.numel)

    def step(part: torch.Tensor, final: Callable[[int], None]) -> None:
        own = layout.part(rank)
        back[own.start : own.stop] = part[:-2] * part[-1]

    def unload() -> None:
        buffer.copy_(back)

    return Payload(Sharded(there, with_appendix), Sharded(back, layout), step, unload, keeps_turn=index == 2)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_owner_makes_what_comes_back_of_what_arrived(world_size: int) -> None:
    for buckets, turns in run_ranks(there_and_back, world_size):
        for index, buffer in enumerate(buckets):
            mean = (world_size + 1) / 2 + index
            assert buffer == pytest.approx([mean**2] * uneven(world_size).numel)
        assert turns == ["release", "request", "acquire"]


def reduced_only(rank: int, world_size: int) -> tuple[float, float]:
    exchange = engine()
    arrived: list[torch.Tensor] = []
    layout = uneven(world_size)
    payload = Payload(
        Sharded(torch.full((layout.numel,), float(rank)), layout),
        None,
        lambda part, final: arrived.append(part.clone()),
        lambda: None,
    )
    exchange.reduce(payload)
    # Ahead of it on the same worker, so that it is done when this is.
    after = exchange.submit(FakeBucket(torch.full((5,), float(rank))))  # type: ignore[arg-type]
    mean = float(after.wait().mean())
    exchange.close()
    return mean, float(arrived[0].mean()) if arrived[0].numel() else mean


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_sum_may_stay_with_its_owners(world_size: int) -> None:
    for of_bucket, of_part in run_ranks(reduced_only, world_size):
        assert of_bucket == of_part == (world_size - 1) / 2


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


def failing_owner(rank: int, world_size: int, is_long: bool) -> list[str]:
    exchange, turn = engine(), RecordingTurn()
    errors = []
    futures = []
    for index in range(2):
        payload = squared(torch.zeros(uneven(world_size).numel), rank, world_size, 2)
        if index == 1:
            payload = Payload(
                payload.scatter,
                payload.gather,
                functools.partial(fail, rank),
                payload.unload,
                keeps_turn=True,
                is_long=is_long,
            )
        bucket = FakeBucket(torch.zeros(1), index=index, last=index == 1)
        futures.append(exchange.submit(bucket, turn=turn, payload=functools.partial(_given, payload)))  # type: ignore[arg-type]
    for future in futures:
        with pytest.raises(ExchangeError, match="the owner is out of luck"):
            future.wait()
        errors.append("raised")
    assert turn.order[0] == "release"
    return errors


def fail(rank: int, part: torch.Tensor, final: Callable[[int], None]) -> None:
    raise ValueError("the owner is out of luck")


@pytest.mark.parametrize("is_long", [False, True])
def test_a_failing_step_fails_the_buckets_that_were_held_for_it_and_gives_the_turn_away(
    is_long: bool,
) -> None:
    assert run_ranks(failing_owner, 2, args=(is_long,)) == [["raised"] * 2] * 2

"""What travels in a bucket's place: uneven parts, more on the way there than on the way back, or nothing back."""

import functools

import torch
import torch.distributed as dist

from crossover_ddp._exchange.exchange import Exchange
from crossover_ddp._exchange.layout import Layout
from crossover_ddp._exchange.transfer import Payload, Sharded
from tests.harness import run_ranks
from tests.unit.exchange.fake_bucket import FakeBucket

SIZE = 7


def engine() -> Exchange:
    group = dist.group.WORLD
    assert group is not None
    return Exchange(group)


def _given(payload: Payload) -> Payload:
    return payload


def long_steps(rank: int, world_size: int) -> list[float]:
    """Rank 1's step for the first bucket waits until rank 0 has begun that for the second one."""
    exchange = engine()
    group = dist.group.WORLD
    assert group is not None
    layout = Layout.equal(2 * SIZE, world_size)

    def step(index: int, back: torch.Tensor, part: torch.Tensor) -> None:
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

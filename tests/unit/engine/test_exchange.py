"""Failures of the engine in a job of one rank."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp._engine.buckets import Bucket, JourneyTurn
from crossover_ddp._engine.exchange import Exchange, run_hook
from crossover_ddp._engine.links import Link
from crossover_ddp.errors import ExchangeError


async def failing(bucket: Bucket, link: Link, turn: JourneyTurn) -> None:
    await bucket.computed()
    raise ValueError("the link broke")


async def forgetful(bucket: Bucket, link: Link, turn: JourneyTurn) -> None:
    await link.all_reduce(bucket.flat, bucket.layout)


def backward_with(journey: Any) -> list[Bucket]:
    """Train a step whose buckets take this journey, and return the buckets."""
    buckets: list[Bucket] = []

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        def start(exchange: Exchange) -> torch.futures.Future[torch.Tensor]:
            buckets.append(exchange.send(bucket, journey))
            return buckets[-1].future

        return run_hook(None, bucket, None, "", start)

    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    model.register_comm_hook(None, hook)
    with pytest.raises(ExchangeError, match="the exchange of bucket 0 failed"):
        model(torch.ones(1, 2)).sum().backward()
    return buckets


@pytest.mark.usefixtures("process_group")
def test_a_failed_bucket_raises_its_failure_in_each_waiter() -> None:
    (bucket,) = backward_with(failing)
    for event in (bucket, bucket.own_shard):
        with pytest.raises(ExchangeError, match="the link broke"):
            event.wait()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("deferred", [False, True])
def test_no_journey_starts_after_the_group_has_failed(deferred: bool) -> None:
    backward_with(failing)
    started: list[Link] = []

    async def journey(link: Link) -> None:
        started.append(link)

    late = Exchange.of(None).begin(journey, torch.ones(1), "a late tensor", deferred=deferred)
    with pytest.raises(ExchangeError, match="the link broke"):
        late.wait()
    assert not started


@pytest.mark.usefixtures("process_group")
def test_a_journey_that_does_not_await_computed_is_refused_on_every_device() -> None:
    """On a GPU it would send gradients that are not computed yet."""
    backward_with(forgetful)

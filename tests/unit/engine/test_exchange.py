"""What becomes of journeys: failures are final and reach everybody, ends are ends."""

import time

import pytest
import torch
import torch.distributed as dist

from crossover_ddp._engine.exchange import Exchange
from crossover_ddp._engine.links import Link
from crossover_ddp.errors import ExchangeError
from tests.harness import in_ranks
from tests.harness.oracles import error_of

CPU = torch.device("cpu")
NOTHING = torch.empty(0)


async def fails(link: Link) -> None:
    await link.compute()
    raise KeyError("ours")


async def gathers(link: Link) -> None:
    await link.all_gather(torch.ones(link.size), [1] * link.size)


@in_ranks(3, timeout_s=90)
def test_a_failure_of_one_rank_reaches_all_and_all_that_is_under_way_before_the_timeout(rank: int) -> None:
    """Rank 0 fails by its own mistake, while it waits for rank 2, which is silent, and rank 1 waits for both."""
    Exchange.of(None).begin(gathers, NOTHING, "the first").wait()
    dist.barrier()
    begin_s = time.monotonic()
    if rank == 2:
        time.sleep(1)
    trips = [Exchange.of(None).begin(gathers, NOTHING, f"trip {number}") for number in range(3)]
    if rank == 0:
        trips.append(Exchange.of(None).begin(fails, NOTHING, "its own"))
    heard = {error_of(trip.wait) for trip in trips}
    assert len(heard) == 1, "the first failure is everybody's"
    assert heard != {"no error"}
    assert rank or "rank 0 of 3: the exchange of its own failed: 'ours'" in heard.pop()
    assert time.monotonic() - begin_s < 45


@in_ranks(2)
def test_a_closed_exchange_takes_nothing_and_leaves_its_number_to_another(rank: int) -> None:
    channels = set()
    for _ in range(20):  # more than there are channels
        lane = Exchange(dist.group.WORLD)  # type: ignore[arg-type]
        lane.begin(gathers, NOTHING, "it").wait()
        channels.add(lane.network(CPU)._channel)  # type: ignore[union-attr]
        dist.barrier()
        lane.close()
        lane.close()
    assert len(channels) == 1
    with pytest.raises(ExchangeError, match="make a new one"):
        lane.begin(gathers, NOTHING, "it").wait()

"""What becomes of journeys: failures are final and reach everybody, ends are ends."""

import time

import pytest
import torch
import torch.distributed as dist

from crossover_ddp._engine.exchange import Exchange
from crossover_ddp._engine.journeys import Gate
from crossover_ddp._engine.links import Link
from crossover_ddp.errors import ExchangeError
from tests.harness import run_ranks, single_process_group

CPU = torch.device("cpu")


async def fails(link: Link) -> None:
    await link.compute()
    raise KeyError("ours")


async def gathers(link: Link) -> None:
    await link.all_gather(torch.ones(link.size), [1] * link.size)


def test_a_failure_ends_all_that_is_under_way() -> None:
    never = Gate()

    async def waits(link: Link) -> None:
        await never

    with single_process_group():
        waiting = Exchange.of(None).begin(waits, CPU, "what waits")
        for trip in (Exchange.of(None).begin(fails, CPU, "it"), waiting):
            with pytest.raises(ExchangeError, match="ours"):
                trip.wait()


def one_rank_fails(rank: int, size: int) -> tuple[list[str], float]:
    """Rank 0 fails by its own mistake, while it waits for rank 2, which is silent, and rank 1 waits for both.

    Return what is heard, and when.
    """
    Exchange.of(None).begin(gathers, CPU, "the first").wait()
    dist.barrier()
    begin_s = time.monotonic()
    if rank == 2:
        time.sleep(1)
    trips = [Exchange.of(None).begin(gathers, CPU, f"trip {number}") for number in range(3)]
    if rank == 0:
        trips.append(Exchange.of(None).begin(fails, CPU, "its own"))
    heard = []
    for trip in trips:
        with pytest.raises(ExchangeError) as error:
            trip.wait()
        heard.append(str(error.value))
    return heard, time.monotonic() - begin_s


def test_a_failure_of_one_rank_reaches_all_and_all_that_is_under_way_before_the_groups_timeout() -> None:
    everyone = run_ranks(one_rank_fails, 3, timeout_s=90)
    assert "rank 0 of 3: the exchange of its own failed: 'ours'" in everyone[0][0][0]
    for heard, took_s in everyone:
        assert len({*heard}) == 1, "the first failure is everybody's"
        assert took_s < 45


def closes(rank: int, size: int) -> tuple[list[int], str]:
    group, channels = dist.group.WORLD, []
    assert group is not None
    for _ in range(20):  # more than there are channels
        lane = Exchange(group)
        lane.begin(gathers, CPU, "it").wait()
        channels.append(lane.network(CPU)._channel)  # type: ignore[attr-defined]
        dist.barrier()
        lane.close()
        lane.close()
    with pytest.raises(ExchangeError) as error:
        lane.begin(gathers, CPU, "it").wait()
    return channels, str(error.value)


def test_a_closed_exchange_takes_nothing_and_leaves_its_number_to_another() -> None:
    for channels, heard in run_ranks(closes, 2):
        assert len({*channels}) == 1
        assert "make a new one" in heard

"""Exchanges over gloo: means in the order of a tree or a ring, whatever ranks do when; failures are everybody's."""

import functools
import itertools
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from crossover_ddp._engine import links
from crossover_ddp._engine.exchange import Exchange
from crossover_ddp._engine.journeys import Gate, JourneyCoroutine
from crossover_ddp._engine.links import Link
from crossover_ddp.errors import ExchangeError
from tests.harness import in_ranks
from tests.harness.oracles import error_of, sum_as_owners_do, tree_sum

CPU, NOTHING = torch.device("cpu"), torch.empty(0)
SIZES = (0, 1, 2, 5, 1000, 65_537, 3_000_000)


def mean(everyone: Sequence[torch.Tensor], layout: Sequence[int]) -> torch.Tensor:
    """Return what owners make of the ranks' tensors."""
    addends = [each / len(everyone) for each in everyone]
    if not links.goes_around(layout, 4):
        return tree_sum(addends)
    cut = [each.split(list(layout)) for each in addends]
    return torch.cat(
        [sum_as_owners_do([each[owner] for each in cut], owner) for owner in range(len(layout))]
    )


@in_ranks(2)
def test_short_messages_leave_before_what_arrives_is_asked_for_and_long_ones_after(
    rank: int,
) -> None:
    exchange, calls = Exchange.of(None), list[str]()
    net: Any = exchange.networks[CPU]
    group = net.group

    class Noted:
        def send(self, *message: Any) -> dist.Work:
            calls.append("send")
            return group().send(*message)  # type: ignore[no-any-return]

        def recv(self, *message: Any) -> dist.Work:
            calls.append("recv")
            return group().recv(*message)  # type: ignore[no-any-return]

    equal = [500, 500]
    ways: list[Callable[[torch.Tensor, Link], JourneyCoroutine]] = [
        lambda flat, link: link.reduce_scatter(flat, equal),
        lambda flat, link: link.all_gather(flat, equal),
        lambda flat, link: link.all_to_all(flat, equal, flat.clone(), equal),
    ]
    for numel, says_the_rate in {
        500: False,
        1 << 18: True,
    }.items():  # less may pass in a link's burst
        flat, halves = torch.ones(2 * numel), [numel, numel]
        exchange.begin(
            lambda link, flat=flat, halves=halves: link.reduce_scatter(flat, halves),
            NOTHING,
            "a tensor",
        ).wait()
        assert (net.bytes_per_s > 0) == says_the_rate
    for way, (rate, first) in itertools.product(ways, {1.0: "recv", 1e12: "send"}.items()):
        net.bytes_per_s = rate
        net.group = Noted
        trip = exchange.begin(functools.partial(way, torch.ones(1000)), NOTHING, "a tensor")
        net.group = group
        trip.wait()
        assert {*calls} == {"send", "recv"}
        assert calls[0] == first
        calls.clear()


@in_ranks(4)  # two and three: tests/conformance
def test_sums_have_the_bits_of_the_tree_or_the_ring_in_bounded_memory(
    rank: int, world_size: int
) -> None:
    """Tensors of all sizes, many under way, each rank in its own order of gathers where these wait."""
    exchange, most = Exchange.of(None), 0
    choose, order, jobs = random.Random(0), random.Random(rank), []
    for number in range(24):
        numel = choose.choice(SIZES)
        everyone = [
            torch.randn(numel, generator=torch.Generator().manual_seed(1000 * number + r))
            for r in range(world_size)
        ]
        cuts = sorted(choose.choices(range(numel + 1), k=world_size - 1))
        layout = [stop - start for start, stop in zip([0, *cuts], [*cuts, numel], strict=True)]
        jobs.append((everyone[rank].clone(), layout, mean(everyone, layout), choose.random() < 0.5))

    async def both(flat: torch.Tensor, layout: Any, gate: Gate, link: Any) -> None:
        await link.reduce_scatter(flat, layout)
        await link.compute()
        await gate
        await link.all_gather(flat, layout)

    trips, gates = [], []
    for flat, layout, _, waits in jobs:
        gates.append(Gate())
        if not waits:
            gates[-1].open()
        way = functools.partial(both, flat, layout, gates[-1])
        trips.append(exchange.begin(way, flat, "it"))
        most = max(most, sum(exchange.networks[flat.device].sums._posted))  # type: ignore[union-attr]
        if order.random() < 0.1:
            time.sleep(0.01)  # ranks are not in step
    order.shuffle(gates)
    for gate in gates:
        gate.open()
    for trip in trips:
        trip.wait()
    assert all(torch.equal(flat, wanted) for flat, _, wanted, _ in jobs)
    assert sum(links.goes_around(layout, 4) for _, layout, *_ in jobs) > 2
    assert 0 < most <= links._AHEAD_BYTES + (world_size - 1) * links._MAX_PIECE_BYTES


@in_ranks(2)
def test_two_ranks_have_one_sum_whoever_adds(rank: int) -> None:
    """The bits of halves by way of owners, and as many bytes."""
    exchange = Exchange.of(None)
    choose, jobs = random.Random(0), []
    for number in range(24):
        dtype = choose.choice([torch.float32, torch.float64, torch.bfloat16])
        numel, seeds = (
            choose.choice(SIZES),
            [torch.Generator().manual_seed(1000 * number + r) for r in range(2)],
        )
        both = [torch.randn(numel, generator=seed).to(dtype) for seed in seeds]
        layout = exchange.equal_layout(both[0])
        jobs.append((both[rank].clone(), layout, both[0] / 2 + both[1] / 2))
    trips = []
    for flat, layout, _ in jobs:
        trips.append(
            exchange.begin(
                lambda link, flat=flat, layout=layout: link.all_reduce(flat, layout), flat, "it"
            )
        )
    for trip in trips:
        trip.wait()
    assert all(torch.equal(flat, wanted) for flat, _, wanted in jobs)
    assert [trip.sent() for trip in trips] == [flat.numel() * flat.itemsize for flat, *_ in jobs]


@in_ranks(2)
def test_exchanges_of_one_group_keep_their_messages_apart(rank: int) -> None:
    """Each of two gathers a table, and rank 0 and the other begin in another order."""
    exchanges = [Exchange.of(None), Exchange(dist.group.WORLD)]  # type: ignore[arg-type]
    tables = [torch.full((2,), -1.0), torch.full((2,), -1.0)]
    for exchange, table in zip(exchanges, tables, strict=True):
        exchange.networks[table.device]  # all ranks make them in one order

    trips = []
    for number in (1, 0) if rank else (0, 1):
        table = tables[number]
        table[rank] = 10.0 * number + rank
        way = functools.partial(lambda table, link: link.all_gather(table, [1, 1]), table)
        trips.append(exchanges[number].begin(way, table, "a table"))
        time.sleep(0.2)
    for trip in trips:
        trip.wait()
    assert [table.tolist() for table in tables] == [[0.0, 1.0], [10.0, 11.0]]


@in_ranks(3)
def test_gathers_of_a_ring_may_begin_in_another_order_on_each_rank(rank: int) -> None:
    """Each rank's large tensor is gathered, where each rank begins with what comes to it last."""
    exchange, gates = Exchange.of(None), [Gate() for _ in range(3)]
    flats = [torch.full((1_100_000,), float(rank + owner)) for owner in range(3)]

    async def later(owner: int, link: Any) -> None:
        await gates[owner]
        await link.all_gather(flats[owner], [1_100_000 * (each == owner) for each in range(3)])

    ways = [functools.partial(later, owner) for owner in range(3)]
    trips = [exchange.begin(way, flats[0], "it") for way in ways]
    for step in range(1, 4):
        gates[(rank + step) % 3].open()
        time.sleep(0.05)
    for trip in trips:
        trip.wait()
    assert [float(flat.unique()) for flat in flats] == [0.0, 2.0, 4.0]


@pytest.mark.parametrize("gathers", [False, True])
@in_ranks(3, deaths={2: signal.SIGKILL}, timeout_s=90)
def test_a_death_on_the_ring_is_an_error_in_seconds(rank: int, gathers: bool) -> None:
    """The neighbour that dies should have added or passed on."""
    exchange, layout = Exchange.of(None), [0, 2_000_000, 0]
    flat = torch.ones(2_000_000)
    begin_s = time.monotonic()

    async def there_and_back(link: Any) -> None:
        if not gathers:
            await link.reduce_scatter(flat, layout)
        await link.all_gather(flat, layout)

    if rank == 2:
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    trip = exchange.begin(there_and_back, flat, "it")
    dist.barrier()
    assert error_of(trip.wait).startswith(f"rank {rank} of 3: the exchange of it failed: ")
    assert time.monotonic() - begin_s < 45.0


def test_a_layout_goes_around_if_it_is_large_and_uneven() -> None:
    mb = 1 << 20
    assert links.goes_around([3 * mb, mb, mb], 1)
    assert links.goes_around([0, 0, 0, mb], 4)
    assert not links.goes_around([0, 0, 0, mb], 2), "small"
    assert not links.goes_around([9 * mb, 10 * mb, 10 * mb], 4), "even"
    assert not links.goes_around([0, 9 * mb], 4), "two ranks have one cable"
    assert not links.goes_around([0, 0, 0], 4)


async def fails(link: Link) -> None:
    await link.compute()
    raise KeyError("ours")


async def gathers(link: Link) -> None:
    await link.all_gather(torch.ones(link.size), [1] * link.size)


@in_ranks(3, timeout_s=90)
def test_a_failure_of_one_rank_reaches_all_and_all_that_is_under_way_before_the_timeout(
    rank: int,
) -> None:
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
        channels.add(lane.networks[CPU]._channel)  # type: ignore[union-attr]
        dist.barrier()
        lane.close()
        lane.close()
    assert len(channels) == 1
    with pytest.raises(
        ExchangeError, match="process group that the hook was registered with was destroyed"
    ):
        lane.begin(gathers, NOTHING, "it").wait()

"""The link of gloo by itself: means in the order of a tree or a ring, whatever ranks do when, in bounded memory."""

import functools
import os
import random
import signal
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from crossover_ddp._engine import links
from crossover_ddp._engine.exchange import Exchange
from crossover_ddp._engine.journeys import Gate
from crossover_ddp.errors import ExchangeError
from tests.harness import run_ranks
from tests.harness.oracles import sum_as_owners_do, tree_sum

SIZES = (0, 1, 2, 5, 1000, 65_537, 3_000_000)


def mean(everyone: Sequence[torch.Tensor], layout: Sequence[int]) -> torch.Tensor:
    """Return what owners make of the ranks' tensors."""
    addends = [each / len(everyone) for each in everyone]
    if not links.goes_around(layout, 4):
        return tree_sum(addends)
    cut = [each.split(list(layout)) for each in addends]
    return torch.cat([sum_as_owners_do([each[owner] for each in cut], owner) for owner in range(len(layout))])


def sums(rank: int, size: int) -> tuple[int, int, int]:
    """Sum and gather tensors of all sizes, many under way, each rank in its own order of gathers where these wait.

    Return how many were wrong, how many went around the ring, and most bytes ahead.
    """
    exchange, most = Exchange.of(None), 0
    choose, order, jobs = random.Random(0), random.Random(rank), []
    for number in range(24):
        numel = choose.choice(SIZES)
        everyone = [
            torch.randn(numel, generator=torch.Generator().manual_seed(1000 * number + r))
            for r in range(size)
        ]
        cuts = sorted(choose.choices(range(numel + 1), k=size - 1))
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
        trips.append(exchange.begin(way, flat.device, "it"))
        most = max(most, sum(exchange.network(flat.device).sums._posted))  # type: ignore[attr-defined]
        if order.random() < 0.1:
            time.sleep(0.01)  # ranks are not in step
    order.shuffle(gates)
    for gate in gates:
        gate.open()
    for trip in trips:
        trip.wait()
    around = sum(links.goes_around(layout, 4) for _, layout, *_ in jobs)
    return sum(not torch.equal(flat, wanted) for flat, _, wanted, _ in jobs), around, most


@pytest.mark.parametrize("size", [2, 4])  # three: tests/conformance
def test_sums_have_the_bits_of_the_tree_or_the_ring_in_bounded_memory(size: int) -> None:
    for wrong, around, most in run_ranks(sums, size):
        assert wrong == 0
        assert (around > 2) == (size > 2)
        assert 0 < most <= links._AHEAD_BYTES + (size - 1) * links._MAX_PIECE_BYTES


def crossed(rank: int, size: int) -> list[list[float]]:
    """Gather a table by each of two exchanges of one group, which rank 0 and the others begin in another order."""
    exchanges = [Exchange.of(None), Exchange(dist.group.WORLD)]  # type: ignore[arg-type]
    tables = [torch.full((size,), -1.0), torch.full((size,), -1.0)]
    for exchange, table in zip(exchanges, tables, strict=True):
        exchange.network(table.device)  # all ranks make them in one order

    trips = []
    for number in (1, 0) if rank else (0, 1):
        table = tables[number]
        table[rank] = 10.0 * number + rank
        way = functools.partial(lambda table, link: link.all_gather(table, [1] * size), table)
        trips.append(exchanges[number].begin(way, table.device, "a table"))
        time.sleep(0.2)
    for trip in trips:
        trip.wait()
    return [table.tolist() for table in tables]


def test_exchanges_of_one_group_keep_their_messages_apart() -> None:
    assert run_ranks(crossed, 2) == [[[0.0, 1.0], [10.0, 11.0]]] * 2


@pytest.mark.parametrize("size", range(2, 10))
def test_addends_are_summed_as_a_tree_into_any_of_them(size: int) -> None:
    for place in range(size):
        addends = [torch.randn(9) for _ in range(size)]
        wanted = tree_sum(addends)
        links.tree_sum(addends, addends[place])
        assert torch.equal(addends[place], wanted)


def in_rotated_order(rank: int, size: int) -> list[float]:
    """Gather each rank's large tensor, where each rank begins with what comes to it last."""
    exchange, gates = Exchange.of(None), [Gate() for _ in range(size)]
    flats = [torch.full((1_100_000,), float(rank + owner)) for owner in range(size)]

    async def later(owner: int, link: Any) -> None:
        await gates[owner]
        await link.all_gather(flats[owner], [1_100_000 * (each == owner) for each in range(size)])

    ways = [functools.partial(later, owner) for owner in range(size)]
    trips = [exchange.begin(way, flats[0].device, "it") for way in ways]
    for step in range(1, size + 1):
        gates[(rank + step) % size].open()
        time.sleep(0.05)
    for trip in trips:
        trip.wait()
    return [float(flat.unique()) for flat in flats]


def test_gathers_of_a_ring_may_begin_in_another_order_on_each_rank() -> None:
    assert run_ranks(in_rotated_order, 3) == [[0.0, 2.0, 4.0]] * 3


def peer_dies(rank: int, size: int, gathers: bool) -> tuple[str, float]:
    """Return what a rank is told whose neighbour on the ring dies, which should have added or passed on; and when."""
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
    trip = exchange.begin(there_and_back, flat.device, "it")
    dist.barrier()
    with pytest.raises(ExchangeError) as error:
        trip.wait()
    return str(error.value), time.monotonic() - begin_s


@pytest.mark.parametrize("gathers", [False, True])
def test_a_death_on_the_ring_is_an_error_in_seconds(gathers: bool) -> None:
    told = run_ranks(peer_dies, 3, args=(gathers,), deaths={2: signal.SIGKILL}, timeout_s=90)
    for rank, (text, seconds) in enumerate(told[:2]):
        assert text.startswith(f"rank {rank} of 3: the exchange of it failed: ")
        assert seconds < 45.0


def test_a_layout_goes_around_if_it_is_large_and_uneven() -> None:
    mb = 1 << 20
    assert links.goes_around([3 * mb, mb, mb], 1)
    assert links.goes_around([0, 0, 0, mb], 4)
    assert not links.goes_around([0, 0, 0, mb], 2), "small"
    assert not links.goes_around([9 * mb, 10 * mb, 10 * mb], 4), "even"
    assert not links.goes_around([0, 9 * mb], 4), "two ranks have one cable"
    assert not links.goes_around([0, 0, 0], 4)

"""The link of gloo by itself: means in the order of a tree, whatever ranks do when, in bounded memory."""

import random
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from crossover_ddp._engine import gloo
from crossover_ddp._engine.exchange import Exchange
from tests.harness import run_ranks
from tests.harness.oracles import tree_sum

SIZES = (0, 1, 2, 5, 1000, 65_537, 3_000_000)


def sums(rank: int, size: int) -> tuple[int, int]:
    """Sum and gather tensors of all sizes, many under way; return how many were wrong, and most bytes ahead."""
    exchange, most = Exchange.of(dist.group.WORLD), 0  # type: ignore[arg-type]
    choose, order, jobs = random.Random(0), random.Random(rank), []
    for number in range(40):
        numel = choose.choice(SIZES)
        everyone = [
            torch.randn(numel, generator=torch.Generator().manual_seed(1000 * number + r))
            for r in range(size)
        ]
        cuts = sorted(choose.choices(range(numel + 1), k=size - 1))
        layout = [stop - start for start, stop in zip([0, *cuts], [*cuts, numel], strict=True)]
        jobs.append((everyone[rank].clone(), layout, tree_sum([each / size for each in everyone])))

    async def both(link: Any, flat: torch.Tensor, layout: Any) -> None:
        await link.reduce_scatter(flat, layout)
        await link.compute()
        await link.all_gather(flat, layout)

    trips = []
    for flat, layout, _ in jobs:
        trips.append(exchange.begin(lambda link, f=flat, lay=layout: both(link, f, lay), flat.device, "it"))
        most = max(most, sum(exchange.network(flat.device).sums._posted))  # type: ignore[attr-defined]
        if order.random() < 0.1:
            time.sleep(0.01)  # ranks are not in step
    for trip in trips:
        trip.wait()
    return sum(not torch.equal(flat, wanted) for flat, _, wanted in jobs), most


@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_have_the_bits_of_the_tree_in_bounded_memory(size: int) -> None:
    for wrong, most in run_ranks(sums, size):
        assert wrong == 0
        assert 0 < most <= gloo._AHEAD_BYTES + (size - 1) * gloo._MAX_PIECE_BYTES


@pytest.mark.parametrize("size", range(2, 10))
def test_addends_are_summed_as_a_tree_into_any_of_them(size: int) -> None:
    for place in range(size):
        addends = [torch.randn(9) for _ in range(size)]
        wanted = tree_sum(addends)
        gloo.tree_sum(addends, addends[place])
        assert torch.equal(addends[place], wanted)

"""Ranks whose threads are late do not block each other, and all ranks post in the same order."""

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from crossover_ddp import DecoupledKFACState, ElasticState, decoupled_hook, elastic_hook
from crossover_ddp._engine import links
from crossover_ddp._engine.exchange import Exchange
from crossover_ddp._engine.journeys import JourneyThread
from crossover_ddp.kfac_hooks import KFACState, kfac_hook
from tests.harness import in_ranks
from tests.harness.campaign import IN_CAMPAIGN
from tests.harness.training import WIDTH, Training

LAYOUT = [2, 2]


class Elsewhere:
    """A journey that awaits it resumes on a new thread of this name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __await__(self) -> Iterator[Any]:
        yield lambda go_on: threading.Thread(target=go_on, name=self._name).start()


async def gather(link: links.Link) -> torch.Tensor:
    flat = torch.full((4,), float(link.rank))
    await link.all_gather(flat, LAYOUT)
    return flat


async def exchange_parts(link: links.Link) -> torch.Tensor:
    incoming = torch.full((4,), float(link.rank))
    await link.all_to_all(torch.full((4,), float(link.rank)), LAYOUT, incoming, LAYOUT)
    return incoming


@pytest.mark.parametrize("collective", [gather, exchange_parts])
@in_ranks(2)
def test_two_journeys_in_another_order_on_another_rank_do_not_block_each_other(
    rank: int, collective: Callable[..., Any]
) -> None:
    """On each rank one journey waits late, after the other one's second collective has begun.

    The late journey is a different one on each rank. If both waited on a shared thread, each would
    block the wait that the other rank needs.
    """
    exchange = Exchange.of(None)
    has_second_begun = [threading.Event(), threading.Event()]
    put = JourneyThread.put
    found: list[tuple[int, list[float]]] = []

    def held(station: JourneyThread, job: Any) -> None:
        if threading.current_thread().name == "late":
            assert has_second_begun[rank].wait(20)
            time.sleep(0.1)  # until the other journey waits
        put(station, job)

    def journey(number: int) -> Callable[[links.Link], Any]:
        async def run(link: links.Link) -> None:
            flat = torch.ones(4)
            await link.reduce_scatter(flat, LAYOUT)
            await Elsewhere("early" if number == rank else "late")
            await collective(link)
            has_second_begun[number].set()
            found.append((number, (await collective(link)).tolist()))

        return run

    with mock.patch.object(JourneyThread, "put", held):
        trips = [
            exchange.begin(journey(number), torch.empty(0), f"journey {number}")
            for number in range(2)
        ]
        for trip in trips:
            trip.block(20)
    assert sorted(found) == [(number, [0.0, 0.0, 1.0, 1.0]) for number in range(2)]


def late_factors(model: Any, optimizers: Any, mutex: Any) -> tuple[Any, Any]:
    return KFACState(model, optimizers[0], factor_update_steps=4, inv_update_steps=8), kfac_hook


def late_factors_decoupled(model: Any, optimizers: Any, mutex: Any) -> tuple[Any, Any]:
    kfac, _ = late_factors(model, optimizers, mutex)
    return DecoupledKFACState(optimizers[0], kfac), decoupled_hook


def elastic(model: Any, optimizers: Any, mutex: Any) -> tuple[Any, Any]:
    return ElasticState(2, "sync"), elastic_hook


@pytest.mark.parametrize(
    "way",
    [
        "split",
        "int8",
        "decoupled",
        "owned",
        "muon",
        "averaged",
        elastic,
        late_factors,
        late_factors_decoupled,
    ],
)
@in_ranks(2)
def test_the_training_thread_posts_the_first_collective_of_each_journey(
    rank: int, way: Any
) -> list[int]:
    """So all ranks post them in the same order, and journeys may wait on a shared thread."""
    both = links.GlooLink._both
    all_reduce = links.GlooLink.all_reduce
    first: list[int] = []

    def noting(link: Any, outgoing: Any, tag: int, receive: Any) -> Any:
        if not tag % links._STAGES:
            first.append(tag)
            assert threading.current_thread() is threading.main_thread()
        return both(link, outgoing, tag, receive)

    async def noting_sum(link: Any, flat: Any, layout: Any, halfway: Any) -> None:
        # Gloo's all-reduce has no tag: only the order distinguishes one from another.
        first.append(flat.numel())
        assert threading.current_thread() is threading.main_thread()
        await all_reduce(link, flat, layout, halfway)

    module = nn.Sequential(
        *[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(3)]
    )
    with mock.patch.multiple(links.GlooLink, _both=noting, all_reduce=noting_sum):
        training = Training(way, rank, module=module).run(12)
        training.close()
    assert len(first) > 4
    return first


PAIRS = list(
    itertools.combinations(
        ["split", "int8", "decoupled", "owned", "kfac", "muon", late_factors_decoupled], 2
    )
)


@pytest.mark.parametrize("seed", range(84 if IN_CAMPAIGN else 2))
@in_ranks(3)
def test_two_models_on_one_group_train_as_usual_with_late_threads(rank: int, seed: int) -> None:
    chance = random.Random(3 * seed + rank)
    begin = links.GlooLink._both
    put = JourneyThread.put
    ways = PAIRS[seed % len(PAIRS)] if IN_CAMPAIGN else ("kfac", late_factors_decoupled)

    def late(do: Callable[..., Any]) -> Callable[..., Any]:
        def done(*given: Any) -> Any:
            time.sleep(chance.choice([0, 0, 0, 0, 0, 0.001, 0.003, 0.01]))
            return do(*given)

        return done

    pair, plain = ([Training(way, rank) for way in ways] for _ in range(2))
    with (
        mock.patch.object(links.GlooLink, "_both", late(begin)),
        mock.patch.object(JourneyThread, "put", late(put)),
    ):
        for _ in range(12):
            for each in pair:
                each.step()
        for each in pair:
            each.close()
    for one, other in zip(pair, plain, strict=True):
        other.run(12).close()
        assert torch.equal(one.values, other.values)

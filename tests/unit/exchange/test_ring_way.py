"""A ring's way without a ring: in which order the hook's thread does its part."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from crossover_ddp._exchange.engine import Engine
from crossover_ddp._exchange.gathers import GatherOrder
from crossover_ddp._exchange.layout import Layout
from crossover_ddp._exchange.ring_way import RingWay
from crossover_ddp._exchange.spans import ExchangeSpans
from crossover_ddp._exchange.staging import Side
from crossover_ddp._exchange.step import Step
from crossover_ddp._exchange.transfer import Transfer
from crossover_ddp._system.worker import Job


class Noting:
    """A turn and a worker that note who was called; the job is never run."""

    shared = True

    def __init__(self) -> None:
        self.calls: list[str] = []

    def release(self) -> None:
        self.calls.append("turn given away")

    def request(self) -> None:
        raise AssertionError("the last bucket is not half-way")

    def acquire(self, *, ahead: bool = False) -> None:
        raise AssertionError("the last bucket is not complete")

    def put(self, job: Job) -> None:
        self.calls.append("reducer told")


def _ring() -> Any:
    gather = SimpleNamespace(offer=None, offer_first=None)
    return SimpleNamespace(
        rank=0,
        channel=0,
        world_size=2,
        all_gather=lambda *arguments: gather,
        reduce_scatter=lambda *arguments: SimpleNamespace(),
    )


@pytest.mark.parametrize(
    ("last", "expected"), [(True, ["turn given away", "reducer told"]), (False, ["reducer told"])]
)
@pytest.mark.parametrize("urgency", [None, 0], ids=["awaited", "deferred"])
def test_the_turn_is_given_away_before_the_reducer_hears_of_the_last_bucket(
    last: bool, expected: list[str], urgency: int | None
) -> None:
    """The reducer may take the next turn at any moment from then on."""
    noting = Noting()
    worker = cast(Any, noting)
    way = RingWay(_ring(), GatherOrder(_ring()), worker, worker, worker)
    transfer = Transfer(
        index=0,
        tensor=torch.ones(4),
        layout=Layout.equal(4, 2),
        sequence=0,
        step=Step(),
        last=last,
        side=Side(torch.device("cpu")),
        turn=noting,
        urgency=urgency,
    )
    way.begin(Engine(0, 2, ExchangeSpans(None), lambda: None), transfer)
    assert noting.calls == expected

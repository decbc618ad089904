"""A ring's way without a ring: in which order the hook's thread does its part."""

from types import SimpleNamespace
from typing import Any

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
from tests.harness.turn import RecordingTurn


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
    ("last", "expected"), [(True, ["release", "reducer told"]), (False, ["reducer told"])]
)
@pytest.mark.parametrize("urgency", [None, 0], ids=["awaited", "deferred"])
def test_the_turn_is_given_away_before_the_reducer_hears_of_the_last_bucket(
    last: bool, expected: list[str], urgency: int | None
) -> None:
    """The reducer may take the next turn at any moment from then on."""
    calls: list[str] = []
    worker: Any = SimpleNamespace(put=lambda job: calls.append("reducer told"))  # the job is never run
    way = RingWay(_ring(), GatherOrder(_ring()), worker, worker, worker)
    transfer = Transfer(
        index=0,
        tensor=torch.ones(4),
        layout=Layout.equal(4, 2),
        sequence=0,
        step=Step(),
        last=last,
        side=Side(torch.device("cpu")),
        turn=RecordingTurn(log=calls),
        urgency=urgency,
    )
    way.begin(Engine(0, 2, ExchangeSpans(None), lambda: None), transfer)
    assert calls == expected

"""A job's channel of turns: its end, its keys in the store, and its group's timeout.

Ranks are threads here. Real jobs, with ranks that come late or leave first, are in
tests/multiprocess/test_joining.py.
"""

import datetime
import gc
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import default_pg_timeout

from crossover_ddp._system.torch_private import UNKNOWN_TIMEOUT_S, group_timeout_s
from crossover_ddp._turns import channel as turn_channel
from crossover_ddp._turns.channel import (
    TurnChannel,
    patience_limit_s,
)
from crossover_ddp._turns.rules import Grant
from crossover_ddp.errors import TurnError
from tests.harness import single_process_group

Make = Callable[[dist.Store], list[TurnChannel]]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Make the channels of two ranks on a store."""
    monkeypatch.setattr(turn_channel, "process_group_store", lambda group: group.store)
    made: list[TurnChannel] = []

    def make_channels(store: dist.Store) -> list[TurnChannel]:
        groups: list[Any] = [
            SimpleNamespace(rank=lambda rank=rank: rank, size=lambda: 2, store=store)
            for rank in range(2)
        ]
        with ThreadPoolExecutor(2) as threads:
            made.extend(threads.map(lambda group: TurnChannel(group, 60.0), groups))
        return made[-2:]

    yield make_channels
    for channel in made:
        channel.close()


def receive(channel: TurnChannel) -> Grant:
    channel.ask()
    return channel.receive()


def test_a_failed_store_and_a_silent_lead_rank_are_reported(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = dist.HashStore()  # beside which the channel makes a server
    with monkeypatch.context() as patch:
        patch.setattr(turn_channel, "group_timeout_s", lambda group: 0.4)
        _, other = make(store)
    other.listen(lambda: None)
    with pytest.raises(TurnError, match="the job's lead rank drew no turn within 0 s"):
        receive(other)
    _, other = make(store)
    other.listen(lambda: None)
    turn_channel._servers.clear()
    gc.collect()
    with pytest.raises(TurnError, match="the job's store failed"):
        receive(other)


def test_grants_are_removed_by_a_listener_or_by_the_lead_rank_if_that_has_left(make: Make) -> None:
    """The lead rank seldom waits for the store, as long as another rank removes grants."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    lead, other = make(server)
    other.listen(lambda: None)
    lead._store = store = mock.Mock(wraps=lead._store)
    count = 2 * turn_channel._KEPT
    checks = count // turn_channel._CHECK_EVERY
    for turn in range(count):
        lead.send(Grant(turn + 1, ()))
        assert receive(other).turn == turn + 1
    assert store.check.call_count <= checks
    assert store.delete_key.call_count == 0
    other.close()
    kept = store.num_keys()
    for turn in range(count):
        lead.send(Grant(count + turn + 1, ()))
    assert store.num_keys() <= kept + 3 * turn_channel._CHECK_EVERY
    assert store.check.call_count <= 2 * checks
    assert store.delete_key.call_count <= count


def backend(timeout: object) -> SimpleNamespace:
    return SimpleNamespace(options=SimpleNamespace(_timeout=timeout))


LONG, SHORT = (backend(datetime.timedelta(seconds=seconds)) for seconds in (1800, 400))


@pytest.mark.parametrize(
    ("backends", "expected_s"),
    [
        ({"cpu": LONG, "cuda": SHORT}, 400.0),
        ({"cpu": LONG, "cuda": None}, 1800.0),
        ({"cpu": SimpleNamespace()}, UNKNOWN_TIMEOUT_S),
        ({"cpu": backend(30)}, UNKNOWN_TIMEOUT_S),
        ({}, UNKNOWN_TIMEOUT_S),
    ],
)
def test_patience_is_a_quarter_of_the_shortest_timeout_of_the_backends(
    backends: Any, expected_s: float
) -> None:
    def get_backend(device: str) -> Any:
        if backends[device] is None:
            raise RuntimeError(f"Could not find the default device type {device}")
        return backends[device]

    group: Any = SimpleNamespace(
        _device_types=[*backends], _get_backend=get_backend, size=lambda: 2
    )
    assert group_timeout_s(group) == expected_s
    assert patience_limit_s(group) == expected_s / 4
    foreign_group: Any = SimpleNamespace(size=lambda: 2)
    assert group_timeout_s(foreign_group) == UNKNOWN_TIMEOUT_S


# DETAIL wraps the backends.
@pytest.mark.parametrize("level", [dist.DebugLevel.OFF, dist.DebugLevel.DETAIL])
def test_the_timeout_of_a_real_group_is_found_and_one_process_has_no_limit(
    level: dist.DebugLevel,
) -> None:
    dist.set_debug_level(level)
    try:
        with single_process_group() as world:
            assert group_timeout_s(world) == default_pg_timeout.total_seconds()
            short = dist.new_group([0], timeout=datetime.timedelta(seconds=33))
            assert group_timeout_s(short) == 33.0
            assert patience_limit_s(world) == patience_limit_s(None) == math.inf
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)

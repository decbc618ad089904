"""The channel of a job's turns over all kinds of stores, its ranks in threads of one process.

In real jobs, with ranks that come late or leave first: tests/multiprocess/test_joining.py, test_gpu_mutex_jobs.py.
"""

import datetime
import gc
import math
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch.distributed as dist

from crossover_ddp._turns import channel as turn_channel
from crossover_ddp._turns.channel import (
    UNKNOWN_TIMEOUT_S,
    TurnChannel,
    group_timeout_s,
    job_group,
    patience_limit_s,
)
from crossover_ddp._turns.rules import Grant
from crossover_ddp.errors import TurnError

SOON_S = 60.0
Make = Callable[..., list[TurnChannel]]


class Rank:
    """What a channel wants to know of a process group."""

    _device_types = ()

    def __init__(self, rank: int, size: int, store: dist.Store) -> None:
        self._rank, self._size, self.store = rank, size, store

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


@pytest.fixture(params=["TCPStore", "HashStore", "FileStore"])
def store(request: pytest.FixtureRequest, tmp_path: object) -> dist.Store:
    if request.param == "TCPStore":
        return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    if request.param == "HashStore":
        return dist.HashStore()
    return dist.FileStore(f"{tmp_path}/store", 1)


@pytest.fixture
def make(store: dist.Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setattr(turn_channel, "_get_process_group_store", lambda group: group.store)
    shared = dist.PrefixStore(uuid.uuid4().hex, store)
    made: list[TurnChannel] = []

    def make_channels(size: int = 2, timeout_s: float = SOON_S) -> list[TurnChannel]:
        groups = [Rank(rank, size, shared) for rank in range(size)]
        with ThreadPoolExecutor(size) as threads:
            made.extend(threads.map(lambda group: TurnChannel(group, timeout_s), groups))  # type: ignore[arg-type]
        return made[-size:]

    yield make_channels
    for channel in made:
        channel.close()


def receive(channel: TurnChannel) -> Grant:
    channel.ask()
    return channel.receive()


def grant(turn: int) -> Grant:
    return Grant(turn, ((1 << 61, turn - 1),))


@pytest.mark.parametrize("size", [2, 5])
def test_all_ranks_gather_the_same_answers(size: int, make: Make) -> None:
    channels = make(size)
    with ThreadPoolExecutor(size) as threads:
        for number in range(3):
            answers = [*threads.map(lambda channel: channel.gather([channel.rank, number]), channels)]  # noqa: B023
            assert answers == [[[rank, number] for rank in range(size)]] * size


def test_grants_arrive_in_order_whether_or_not_somebody_listens_yet(make: Make) -> None:
    lead, other = make()
    for turn in range(1, 4):
        lead.send(grant(turn))
    other.listen(lambda: None)
    for turn in range(4, 7):
        lead.send(grant(turn))
    assert [receive(other) for _ in range(6)] == [grant(turn) for turn in range(1, 7)]


def test_nobody_waits_longer_than_half_the_groups_timeout(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turn_channel, "group_timeout_s", lambda group: 0.4)
    _, other = make()
    other.listen(lambda: None)
    with pytest.raises(TurnError, match="expected the job's next turn from its lead rank within 0 s"):
        receive(other)


@pytest.mark.parametrize("store", ["HashStore"], indirect=True)  # where the channel has made the server
def test_a_store_that_ends_is_told_to_whoever_wants_a_turn(make: Make) -> None:
    _, other = make()
    other.listen(lambda: None)
    turn_channel._servers.clear()
    gc.collect()
    with pytest.raises(TurnError, match="the job's store failed"):
        receive(other)


# --- how long collectives wait, read from the group itself in whatever way it was made ------------------------------


@pytest.fixture(params=[dist.DebugLevel.OFF, dist.DebugLevel.DETAIL])  # with which backends are wrapped
def world(request: pytest.FixtureRequest) -> Iterator[dist.ProcessGroup]:
    timeout = datetime.timedelta(seconds=77)
    dist.set_debug_level(request.param)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()
    dist.set_debug_level(dist.DebugLevel.OFF)


class Group:
    """Answers as a group of two ranks does; one backend a device type."""

    def __init__(self, **backends: Any) -> None:
        self._device_types = [*backends]
        self._backends = backends

    def _get_backend(self, device: str) -> Any:
        if self._backends[device] is None:
            raise RuntimeError(f"Could not find the default device type {device}")
        return self._backends[device]

    def size(self) -> int:
        return 2


def backend(seconds: float) -> SimpleNamespace:
    return SimpleNamespace(options=SimpleNamespace(_timeout=datetime.timedelta(seconds=seconds)))


def test_a_real_group_tells_its_timeout_and_one_process_is_bound_by_leases_alone(
    world: dist.ProcessGroup,
) -> None:
    assert job_group(None) is world
    assert group_timeout_s(world) == 77.0
    assert group_timeout_s(dist.new_group([0], timeout=datetime.timedelta(seconds=33))) == 33.0
    assert patience_limit_s(world) == patience_limit_s(None) == math.inf


@pytest.mark.parametrize(
    ("group", "expected_s"),
    [
        (Group(cpu=backend(1800), cuda=backend(600)), 600.0),
        (Group(cpu=backend(1800), cuda=None), 1800.0),
        (Group(cpu=SimpleNamespace()), UNKNOWN_TIMEOUT_S),
        (Group(cpu=SimpleNamespace(options=SimpleNamespace(_timeout=30))), UNKNOWN_TIMEOUT_S),
        (Group(), UNKNOWN_TIMEOUT_S),
        (SimpleNamespace(), UNKNOWN_TIMEOUT_S),
    ],
)
def test_the_shortest_timeout_counts_and_an_unknown_one_is_short(group: Any, expected_s: float) -> None:
    assert group_timeout_s(group) == expected_s


def test_patience_is_a_quarter_of_the_timeout() -> None:
    assert job_group(None) is None, "one process is the job"
    assert patience_limit_s(cast(dist.ProcessGroup, Group(cpu=backend(400)))) == 100.0

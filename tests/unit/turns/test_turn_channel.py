"""The channel of a job's turns over all kinds of stores, its ranks in threads of one process.

In real jobs, with ranks that come late or leave first: tests/multiprocess/test_joining.py, test_gpu_mutex_jobs.py.
"""

import gc
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from crossover_ddp._turns import channel as turn_channel
from crossover_ddp._turns.channel import TurnChannel
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

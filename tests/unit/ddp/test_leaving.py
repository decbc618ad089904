"""Ranks leave the default process group together: each on a thread, with one store."""

import contextlib
import os
import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

import pytest
import torch.distributed as dist

from crossover_ddp._ddp import leaving
from crossover_ddp._ddp.groups import on_destruction
from tests.harness import single_process_group

SIZE = 3
OF_GROUP = "cpu//0/0"  # as gloo names a rank's address


@pytest.fixture
def server() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def stores(server: dist.TCPStore) -> list[dist.Store]:
    """One store for each rank, as its group has it."""
    found = [dist.PrefixStore("default_pg/0/", server).clone() for _ in range(SIZE)]
    found[0].set(OF_GROUP, "an address")
    server.set("a user's", "value")
    return found


@pytest.fixture
def ranks() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(SIZE) as threads:
        yield threads


def test_the_groups_keys_are_removed_before_any_rank_returns(
    server: dist.TCPStore, stores: list[dist.Store], ranks: ThreadPoolExecutor
) -> None:
    def leaves(rank: int) -> list[str]:
        leaving._take_part(stores[rank], rank, SIZE)
        return stores[rank].list_keys()

    found = [*ranks.map(leaves, range(SIZE))]
    assert all(key.startswith(leaving._LEAVING) for keys in found for key in keys)
    assert (stores[0].list_keys(), server.get("a user's")) == ([], b"value")


def test_a_store_that_ends_with_rank_0_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    def leaves(rank: int) -> None:
        leaving._take_part(clones.pop(rank), rank, SIZE)
        if not rank:
            servers.clear()

    for _ in range(20):
        servers = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
        clones = {
            rank: dist.PrefixStore("default_pg/0/", servers[0]).clone() for rank in range(SIZE)
        }
        with ThreadPoolExecutor(SIZE) as ranks:
            [*ranks.map(leaves, range(SIZE))]
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("late", [0, 1])
def test_no_key_is_removed_once_a_rank_has_left_by_itself(
    late: int, stores: list[dist.Store], ranks: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That rank may have written the keys of its next group."""
    with monkeypatch.context() as impatient:
        impatient.setattr(leaving, "_TOGETHER_S", 0.1)
        on_time = [rank for rank in range(SIZE) if rank != late]
        [*ranks.map(lambda rank: leaving._take_part(stores[rank], rank, SIZE), on_time)]
    leaving._take_part(stores[late], late, SIZE)
    assert OF_GROUP in stores[0].list_keys()


def test_no_rank_returns_before_rank_0_in_a_later_life_either(
    stores: list[dist.Store], ranks: ThreadPoolExecutor
) -> None:
    for _ in range(2):
        leaving._remove(stores[0], leaving._LEAVING)
        others = [
            ranks.submit(leaving._take_part, stores[rank], rank, SIZE) for rank in range(1, SIZE)
        ]
        assert not wait(others, 3 * leaving._LEAD_S, FIRST_COMPLETED).done
        leaving._take_part(stores[0], 0, SIZE)
        assert not wait(others, 60.0).not_done


def test_a_group_of_one_rank_leaves_at_once() -> None:
    ended, before = [], threading.enumerate()
    with single_process_group() as group:
        on_destruction(group, lambda: ended.append([*threading.enumerate()]))
    assert ended == [before]


def test_a_rank_that_leaves_because_of_an_exception_waits_for_no_other(
    stores: list[dist.Store],
) -> None:
    """Another rank may be blocked in a collective until this one has gone."""
    with contextlib.suppress(ArithmeticError):
        try:
            raise ArithmeticError
        finally:
            leaving._leave(stores[1], 1, SIZE, os.getpid())
    assert stores[0].list_keys() == [OF_GROUP]

"""Fixtures for all tests, and the ones that every test runs under: nothing may be left behind."""

import os
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tests.harness import close_pools, single_process_group
from tests.harness.leaks import Snapshot


def pytest_configure(config: pytest.Config) -> None:
    # Tests must not meet the jobs that somebody really trains here, nor those of another test run.
    os.environ["CROSSOVER_GROUP"] = f"tests-{os.getpid()}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Test the harness before what relies on it."""
    items.sort(key=lambda item: not item.nodeid.startswith("tests/harness/"))


@pytest.fixture(scope="session", autouse=True)
def _end_ranks_with_session() -> Iterator[None]:
    yield
    close_pools()


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    before = Snapshot.take()
    yield
    leaks = before.leaks()
    if dist.is_initialized():
        dist.destroy_process_group()
        leaks.append("default process group")
    if leaks:
        pytest.fail("the test left behind: " + "; ".join(leaks), pytrace=False)


@pytest.fixture
def process_group() -> Iterator[dist.ProcessGroup]:
    """A gloo group of world size 1, which is also the default group."""
    with single_process_group() as group:
        yield group

"""Fixtures for all tests, and the ones that every test runs under: nothing may be left behind."""

import gc
import os
from collections.abc import Iterator

import hypothesis
import pytest
import torch
import torch.distributed as dist

from tests.fake_cuda import session as fake_cuda
from tests.harness import close_pools, single_process_group
from tests.harness._preloaded import forked_if_script
from tests.harness.leaks import nothing_left_behind
from tests.harness.scripts import hear_ignored_signals

# Timing never decides a unit test, and the same tree gives the same result twice; new examples come in the campaign.
hypothesis.settings.register_profile(
    "untimed",
    deadline=None,
    derandomize="CROSSOVER_CAMPAIGN" not in os.environ,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("untimed")


def pytest_configure(config: pytest.Config) -> None:
    hear_ignored_signals()
    # Tests must not meet the jobs that somebody really trains here, nor those of another test run.
    os.environ["CROSSOVER_GROUP"] = f"tests-{os.getpid()}"
    # Torch's store asks the name server who connects: an answer that is lost holds a job up for five seconds.
    os.environ.setdefault("RES_OPTIONS", "timeout:1")
    if (plugin := fake_cuda.plugin(config)) is not None:
        config.pluginmanager.register(plugin)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Test the harness first."""
    for item in items:
        _place_on_gpu(item)
    items.sort(key=lambda item: not item.nodeid.startswith("tests/harness/"))


def _place_on_gpu(item: pytest.Item) -> None:
    """Let what is marked ``gpu`` run on the fake device where there is no GPU; skip what that lacks."""
    needs = {
        name: value for mark in item.iter_markers("gpu") for name, value in mark.kwargs.items()
    }
    if torch.cuda.is_available() and not fake_cuda.is_here():
        return
    if "real" in needs:
        where = "run tests/gpu/run_all.sh on a machine with an NVIDIA GPU"
        item.add_marker(pytest.mark.skip(reason=f"the fake device has {needs['real']}; {where}"))
    elif item.get_closest_marker("gpu"):
        item.add_marker(fake_cuda.MARKER)


def pytest_collection_finish() -> None:
    set_aside()


def set_aside() -> None:
    """Hide what imports have made from Python's collector, which a hook asks for its model: 0.1 s for each model."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or libraries that count what is left complain below pytest's closing line


@pytest.fixture(scope="session", autouse=True)
def _end_ranks_with_session() -> Iterator[None]:
    yield
    close_pools()


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    with nothing_left_behind():
        yield


@pytest.fixture
def set_aside_again() -> Iterator[None]:
    """For tests that call ``gc.unfreeze()``."""
    yield
    set_aside()


@pytest.fixture
def forked_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the lab's ranks from a process that has imported torch.

    For tests of what the ranks do, not of the lab or of times: half of such a test was imports.
    """
    if os.environ.get("CROSSOVER_BENCH", "smoke") == "smoke":
        monkeypatch.setattr("lab.nodes.Child", forked_if_script)


@pytest.fixture
def process_group() -> Iterator[dist.ProcessGroup]:
    """A gloo group of world size 1, which is also the default group."""
    with single_process_group() as group:
        yield group

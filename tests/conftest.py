"""Fixtures for all tests. One of them fails every test that leaves something behind."""

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

# Timing never decides a unit test. Two runs of the same tree have the same result. Only the
# campaign draws new examples.
hypothesis.settings.register_profile(
    "untimed",
    deadline=None,
    derandomize="CROSSOVER_CAMPAIGN" not in os.environ,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("untimed")


def pytest_configure(config: pytest.Config) -> None:
    hear_ignored_signals()
    # Tests must not become siblings of real jobs on this machine, nor of another test run's jobs.
    os.environ["CROSSOVER_GROUP"] = f"tests-{os.getpid()}"
    # Torch's store looks up each peer's name. A lost answer would delay a job for five seconds.
    os.environ.setdefault("RES_OPTIONS", "timeout:1")
    # One thread: OpenMP's idle threads spin. They took the cores from other workers and from ranks,
    # and the tests of codecs took six times as long.
    torch.set_num_threads(1)
    if (plugin := fake_cuda.plugin(config)) is not None:
        config.pluginmanager.register(plugin)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Choose the device of tests that are marked ``gpu``, and run the harness's own tests first."""
    for item in items:
        _place_on_gpu(item)
    items.sort(key=lambda item: not item.nodeid.startswith("tests/harness/"))


def _place_on_gpu(item: pytest.Item) -> None:
    """Without a GPU, run a test marked ``gpu`` on the fake device, or skip it if it needs more."""
    if torch.cuda.is_available() and not fake_cuda.is_here():
        return
    options: dict[str, object] = {}
    for mark in item.iter_markers("gpu"):
        options |= mark.kwargs
    if "real" in options:
        remedy = "run tests/gpu/run_all.sh on a machine with an NVIDIA GPU"
        reason = f"the fake device has {options['real']}; {remedy}"
        item.add_marker(pytest.mark.skip(reason=reason))
    elif item.get_closest_marker("gpu"):
        item.add_marker(fake_cuda.MARKER)


def pytest_collection_finish() -> None:
    set_aside()


def set_aside() -> None:
    """Hide all objects made on import from the garbage collector.

    A hook searches the collector's objects for its model. Without this the search takes 0.1 s.
    """
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # libraries that count leaked objects would warn below pytest's last line


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
    """Call `set_aside` after a test that calls ``gc.unfreeze()``."""
    yield
    set_aside()


@pytest.fixture
def forked_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the lab's ranks from a process that has imported torch.

    For tests of the ranks' results, not of the lab or of times: half of such a test was imports.
    """
    if os.environ.get("CROSSOVER_BENCH", "smoke") == "smoke":
        monkeypatch.setattr("lab.nodes.Child", forked_if_script)


@pytest.fixture
def process_group() -> Iterator[dist.ProcessGroup]:
    """Provide a gloo group of world size 1, which is also the default group."""
    with single_process_group() as group:
        yield group

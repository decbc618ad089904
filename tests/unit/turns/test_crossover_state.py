"""The crossover hook in a job of one rank: no processes, milliseconds."""

import contextlib
import logging
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from crossover_ddp import CrossoverState, ExchangeError, GPUMutex, comm_hooks
from crossover_ddp.codecs import Int8
from crossover_ddp.comm_hooks import JobTurn
from tests.harness import single_process_group
from tests.harness.groups import new_group
from tests.harness.training import Training


@pytest.fixture(autouse=True)
def _own_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSOVER_GROUP", new_group())


def training() -> "contextlib.closing[Training]":
    """Return a job whose state has no arguments."""
    return contextlib.closing(Training("crossover"))


@pytest.mark.usefixtures("process_group")
def test_a_state_takes_a_turn_each_step_and_one_made_after_it_was_closed_joins_anew() -> None:
    for _ in range(2):
        with training() as job:
            job.run(4)
            assert job.state.mutex.holding
            assert job.state.stats()["turns"] == 4


@pytest.mark.usefixtures("process_group")
def test_paused_gives_the_turn_away() -> None:
    with training() as job:
        with job.state.paused():
            pass  # before the first exchange there is nothing to give
        job.run(2)
        with job.state.paused():
            assert not job.state.mutex.holding
        assert job.state.mutex.holding, "a job of one rank takes it back"


@pytest.mark.usefixtures("process_group")
def test_a_wrong_group_name_is_raised_by_the_first_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSOVER_GROUP", "a/b")
    with training() as job, pytest.raises(ExchangeError, match="expected a group name"):
        job.step()


def test_a_pickled_state_leaves_the_process_behind() -> None:
    arguments = {
        "hook_state": {"rank": 4},
        "codec": Int8(),
        "loss_scale": 2.0,
        "compare_replicas": False,
        "trial": False,
    }
    state = CrossoverState(**arguments)
    copy = pickle.loads(pickle.dumps(state))
    assert state.__getstate__() == copy.__getstate__() == arguments
    assert not copy.turn._trial
    assert copy.mutex is None
    assert copy.process_group is None


def test_the_job_leaves_its_siblings_when_the_process_group_is_destroyed() -> None:
    """Although model and state live on, as the process may."""
    with single_process_group():
        job = Training("crossover").run(4)
        assert job.state.stats()["holding"]
    stats = job.state.stats()
    assert (stats["turns"], stats["holding"], stats["disabled_because"]) == (4, False, "closed")


# --- the one mutex of a process's hooks --------------------------------------------------------------------------


@pytest.mark.usefixtures("process_group")
def test_models_whose_first_exchanges_end_together_join_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two joins would make the process its own sibling, and their number would differ between ranks."""
    made: list[GPUMutex] = []
    first_is_joining = threading.Event()

    def slow(device: object, group: object, trial: bool) -> GPUMutex:
        first_is_joining.set()
        time.sleep(0.2)
        made.append(GPUMutex(device="dev0"))
        return made[-1]

    monkeypatch.setattr(comm_hooks.GPUMutex, "for_hook", slow)
    turns = [JobTurn(trial=True), JobTurn(trial=True)]
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(turns[0].acquire)
        assert first_is_joining.wait(60.0)
        second = threads.submit(turns[1].request)
        first.result(60.0)
        second.result(60.0)
    assert len(made) == 1
    assert turns[0].mutex is turns[1].mutex is made[0]
    made[0].close()


@pytest.mark.parametrize(
    ("backend", "device", "enabled", "warns"),
    [
        ("cpu:gloo,cuda:nccl", "cuda:1", 0, True),
        ("cuda:nccl2", "cuda:1", 0, True),
        ("cuda:nccl", "cuda:1", 1, False),
        ("cuda:nccl", "cuda:1", RuntimeError("CUDA_ERROR_INVALID_VALUE"), False),
        ("cpu:gloo,cuda:gloo", "cuda:1", 0, False),
        ("cpu:gloo,cuda:nccl", "cpu", 0, False),
    ],
)
@pytest.mark.usefixtures("process_group")
def test_nccl_without_mps_is_told(
    backend: str,
    device: str,
    enabled: object,
    warns: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(comm_hooks.dist, "get_backend_config", lambda group: backend)
    driver = mock.Mock(attribute=mock.Mock(side_effect=[enabled]))
    monkeypatch.setattr(comm_hooks, "cuda_driver", lambda: driver)
    with caplog.at_level(logging.WARNING):
        comm_hooks._warn_without_mps(torch.device(device), dist.group.WORLD)
    assert ("without MPS" in caplog.text) == warns
    assert driver.attribute.call_args in (None, mock.call(1, 133))

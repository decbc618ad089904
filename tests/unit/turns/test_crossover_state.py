"""The crossover hook in a job of one rank, without further processes."""

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from crossover_ddp import CrossoverState, ExchangeError, GPUMutex, comm_hooks
from crossover_ddp._turns import joining
from tests.harness import single_process_group
from tests.harness.groups import new_group
from tests.harness.oracles import heard
from tests.harness.training import Training


@pytest.fixture(autouse=True)
def _own_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSOVER_GROUP", new_group())


def test_a_state_takes_a_turn_each_step_until_it_is_closed_or_its_group_is_destroyed() -> None:
    """Model and state may live on. A state made after another one was closed joins again."""
    with single_process_group():
        with contextlib.closing(Training("crossover")) as job:
            with job.state.paused():
                pass  # before the first exchange there is no turn to give away
            job.run(4)
            with job.state.paused():
                assert not job.state.mutex.holding
            assert job.state.mutex.holding, "a job of one rank takes it back"
        job = Training("crossover").run(4)
        assert job.state.stats()["holding"]
    stats = job.state.stats()
    assert (stats["turns"], stats["holding"], stats["disabled_because"]) == (4, False, "closed")


@pytest.mark.usefixtures("process_group")
def test_a_state_that_is_closed_before_its_first_step_does_not_join() -> None:
    job = Training("crossover")
    job.state.close()
    assert job.run(3).state.mutex is None


@pytest.mark.usefixtures("process_group")
def test_a_wrong_group_name_is_raised_by_the_first_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CROSSOVER_GROUP", "a/b")
    with (
        contextlib.closing(Training("crossover")) as job,
        pytest.raises(ExchangeError, match="a group name"),
    ):
        job.step()


@pytest.mark.usefixtures("process_group")
def test_models_whose_first_exchanges_end_together_join_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two joins would make the process its own sibling, differently often on each rank."""
    made: list[GPUMutex] = []
    first_is_joining = threading.Event()

    def slow(device: object, group: object, trial: bool) -> GPUMutex:
        first_is_joining.set()
        time.sleep(0.2)
        made.append(GPUMutex(device="dev0"))
        return made[-1]

    monkeypatch.setattr(comm_hooks.GPUMutex, "for_hook", slow)
    states = [CrossoverState(), CrossoverState()]
    device = torch.device("cpu")
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(states[0]._join, device)
        assert first_is_joining.wait(60.0)
        states[1]._join(device)
        first.result(60.0)
    assert [state.mutex for state in states] == [*made, *made]
    made[0].close()


@pytest.mark.parametrize(
    ("backend", "device", "enabled", "queues", "warnings"),
    [
        ("cpu:gloo,cuda:nccl", "cuda:1", 0, "", ["without MPS"]),
        ("cuda:nccl2", "cuda:1", 0, "8", ["without MPS"]),
        ("cuda:nccl", "cuda:1", 1, "", ["set CUDA_DEVICE_MAX_CONNECTIONS=8"]),
        ("cuda:nccl", "cuda:1", 1, "8", []),
        ("cuda:nccl", "cuda:1", RuntimeError("CUDA_ERROR_INVALID_VALUE"), "", []),
        ("cpu:gloo,cuda:gloo", "cuda:1", 0, "", []),
        ("cpu:gloo,cuda:nccl", "cpu", 0, "", []),
    ],
)
@pytest.mark.usefixtures("process_group")
def test_settings_that_hold_up_nccl_are_warned_of(
    backend: str,
    device: str,
    enabled: object,
    queues: str,
    warnings: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(comm_hooks.WORK_QUEUES, raising=False)
    if queues:
        monkeypatch.setenv(comm_hooks.WORK_QUEUES, queues)
    monkeypatch.setattr(comm_hooks.dist, "get_backend_config", lambda group: backend)
    driver = mock.Mock(attribute=mock.Mock(side_effect=[enabled]))
    monkeypatch.setattr(comm_hooks, "cuda_driver", lambda: driver)
    with heard() as texts:
        comm_hooks._warn_of_nccl(torch.device(device), dist.group.WORLD)
    assert len(texts) == len(warnings)
    assert all(words in text for text, words in zip(texts, warnings, strict=True))
    assert driver.attribute.call_args in (None, mock.call(1, 133))


@pytest.mark.defect("turns-4")
@pytest.mark.usefixtures("process_group")
def test_a_hook_beside_a_mutex_of_the_user_warns_how_to_share_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It trains on without turns, instead of waiting for the process's own turn."""
    monkeypatch.setattr(joining, "_claims", set())
    with heard() as warnings, GPUMutex(lease=60.0) as mutex:
        Training("crossover").backward()
    assert "mutex=" in "".join(warnings)
    mutex.close()

"""The one mutex of a process's hooks."""

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from crossover_ddp import comm_hooks
from crossover_ddp.comm_hooks import JobTurn
from crossover_ddp.gpu_mutex import GPUMutex


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
    turns = [JobTurn(None), JobTurn(None)]
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
    group = dist.group.WORLD
    assert group is not None
    with caplog.at_level(logging.WARNING):
        comm_hooks._warn_without_mps(torch.device(device), group)
    assert ("without MPS" in caplog.text) == warns
    assert driver.attribute.call_args in (None, mock.call(1, 133))

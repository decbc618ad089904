"""The driver's names and errors (other calls run on the fake device)."""

import uuid
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from crossover_ddp._system import device as device_module
from crossover_ddp._system.cuda_driver import CudaDriver

CARD, INSTANCE = (uuid.UUID(int=number) for number in (1, 2))


@pytest.fixture
def library() -> Any:
    """A ``libcuda`` with one MIG instance of a card. The fake device has one with C's types."""

    def naming(name: uuid.UUID) -> Any:
        def call(found: Any, device: int) -> int:
            found.raw = name.bytes
            return 0

        return call

    capture = mock.Mock(return_value=801)
    made = SimpleNamespace(cuDeviceGet=lambda *_: 0, cuThreadExchangeStreamCaptureMode=capture)
    made.cuDeviceGetUuid, made.cuDeviceGetUuid_v2 = naming(CARD), naming(INSTANCE)
    return made


def test_driver_errors_and_missing_calls_are_raised(library: Any) -> None:
    driver = CudaDriver(library)
    with pytest.raises(
        RuntimeError, match="cuThreadExchangeStreamCaptureMode failed: CUresult 801"
    ):
        driver.ignore_other_threads_captures()
    del library.cuThreadExchangeStreamCaptureMode
    with pytest.raises(
        RuntimeError, match="expected a driver with cuThreadExchangeStreamCaptureMode"
    ):
        driver.ignore_other_threads_captures()


def test_a_gpu_has_its_name_from_nvidia_smi_or_else_from_torch(
    library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, device = CudaDriver(library), torch.device("cuda", 1)
    assert driver.name(0) == f"MIG-{INSTANCE}", "neighbours on one card would take turns"
    del library.cuDeviceGetUuid  # a driver that has only the later call
    of_torch = SimpleNamespace(uuid="of-torch")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: of_torch)
    monkeypatch.setattr(device_module, "cuda_driver", lambda: driver)
    assert device_module.device_name(device) == f"GPU-{INSTANCE}"
    absent = mock.Mock(side_effect=OSError("libcuda.so.1: cannot open shared object file"))
    monkeypatch.setattr(device_module, "cuda_driver", absent)
    assert device_module.device_name(device) == "GPU-of-torch"

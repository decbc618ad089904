"""The driver's names and errors through ctypes, against C functions; its other calls run on the fake device."""

import ctypes
import uuid
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from crossover_ddp._system import device as device_module
from crossover_ddp._system.cuda_driver import CudaDriver

CARD = uuid.UUID("11111111-2222-3333-4444-555555555555")
INSTANCE = uuid.UUID("99999999-2222-3333-4444-555555555555")
INT = ctypes.c_int


@pytest.fixture
def library() -> SimpleNamespace:
    """A ``libcuda`` of C function pointers, so that arguments are converted as for the real one."""
    made = SimpleNamespace(result=0, uuids={"cuDeviceGetUuid": CARD, "cuDeviceGetUuid_v2": CARD})

    def device(found: Any, ordinal: int) -> int:
        found[0] = 40 + ordinal
        return 0

    def uuid_by(name: str) -> Callable[..., int]:
        def called(found: Any, device: int) -> int:
            found[0][:] = list(made.uuids[name].bytes)
            return 0

        return called

    made.cuDeviceGet = function(device, ctypes.POINTER(INT), INT)
    made.cuThreadExchangeStreamCaptureMode = function(lambda mode: made.result, ctypes.POINTER(INT))
    for name in made.uuids:
        setattr(made, name, function(uuid_by(name), ctypes.POINTER(ctypes.c_ubyte * 16), INT))
    return made


def function(called: Callable[..., int], *types: Any) -> Any:
    return ctypes.CFUNCTYPE(INT, *types)(called)


@pytest.fixture
def driver(library: SimpleNamespace) -> CudaDriver:
    return CudaDriver(library)  # type: ignore[arg-type]


def test_failures_and_an_older_driver_are_told(driver: CudaDriver, library: SimpleNamespace) -> None:
    library.result = 801
    with pytest.raises(RuntimeError, match="cuThreadExchangeStreamCaptureMode failed: CUresult 801"):
        driver.ignore_other_threads_captures()
    del library.cuThreadExchangeStreamCaptureMode
    with pytest.raises(RuntimeError, match="expected a driver with cuThreadExchangeStreamCaptureMode"):
        driver.ignore_other_threads_captures()


def test_a_gpu_and_an_instance_of_one_are_named_as_by_nvidia_smi(
    driver: CudaDriver, library: SimpleNamespace
) -> None:
    assert driver.name(0) == f"GPU-{CARD}"
    library.uuids["cuDeviceGetUuid_v2"] = INSTANCE
    assert driver.name(0) == f"MIG-{INSTANCE}", "neighbours on one card would take turns"
    del library.cuDeviceGetUuid  # a driver that has only the later call
    assert driver.name(0) == f"GPU-{INSTANCE}"


def test_the_drivers_name_comes_before_torchs(driver: CudaDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    properties = type("Properties", (), {"uuid": "of-torch"})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(device_module, "cuda_driver", lambda: driver)
    assert device_module.device_name(torch.device("cuda", 1)) == f"GPU-{CARD}"

    absent = mock.Mock(side_effect=OSError("libcuda.so.1: cannot open shared object file"))
    monkeypatch.setattr(device_module, "cuda_driver", absent)
    assert device_module.device_name(torch.device("cuda", 1)) == "GPU-of-torch"

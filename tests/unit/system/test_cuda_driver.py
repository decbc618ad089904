"""The driver's names and errors through ctypes, against C functions; its other calls run on the fake device."""

import ctypes
import uuid
from collections.abc import Callable
from typing import Any

import pytest
import torch

from crossover_ddp._system import device as device_module
from crossover_ddp._system.cuda_driver import CudaDriver

CARD = uuid.UUID("11111111-2222-3333-4444-555555555555")
INSTANCE = uuid.UUID("99999999-2222-3333-4444-555555555555")
INT, FLAGS = ctypes.c_int, ctypes.c_uint


class Library:
    """A ``libcuda`` of C function pointers, so that arguments are converted as for the real one."""

    def __init__(self) -> None:
        self.result = 0
        self.uuids = {"cuDeviceGetUuid": CARD, "cuDeviceGetUuid_v2": CARD}
        self._define("cuDeviceGet", self._device, ctypes.POINTER(INT), INT)
        self._define("cuThreadExchangeStreamCaptureMode", self._mode, ctypes.POINTER(INT))
        for name in self.uuids:
            self._define(name, self._uuid(name), ctypes.POINTER(ctypes.c_ubyte * 16), INT)

    def _define(self, name: str, function: Callable[..., int], *types: Any) -> None:
        setattr(self, name, ctypes.CFUNCTYPE(INT, *types)(function))

    def _device(self, device: Any, ordinal: int) -> int:
        device[0] = 40 + ordinal
        return self.result

    def _mode(self, mode: Any) -> int:
        return self.result

    def _uuid(self, name: str) -> Callable[..., int]:
        def called(found: Any, device: int) -> int:
            found[0][:] = list(self.uuids[name].bytes)
            return self.result

        return called


@pytest.fixture
def library() -> Library:
    return Library()


@pytest.fixture
def driver(library: Library) -> CudaDriver:
    return CudaDriver(library)  # type: ignore[arg-type]


def test_failures_and_an_older_driver_are_told(driver: CudaDriver, library: Library) -> None:
    library.result = 801
    with pytest.raises(RuntimeError, match="cuThreadExchangeStreamCaptureMode failed: CUresult 801"):
        driver.ignore_other_threads_captures()
    del library.cuThreadExchangeStreamCaptureMode
    with pytest.raises(RuntimeError, match="expected a driver with cuThreadExchangeStreamCaptureMode"):
        driver.ignore_other_threads_captures()


def test_a_gpu_and_an_instance_of_one_are_named_as_nvidia_smi_does(
    driver: CudaDriver, library: Library
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

    def none() -> CudaDriver:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(device_module, "cuda_driver", none)
    assert device_module.device_name(torch.device("cuda", 1)) == "GPU-of-torch"

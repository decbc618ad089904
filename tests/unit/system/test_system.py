"""The driver's names and errors, against C functions (other calls run on the fake device); forks of a worker."""

import ctypes
import os
import signal
import uuid
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from crossover_ddp._system import device as device_module
from crossover_ddp._system.cuda_driver import CudaDriver
from crossover_ddp._system.worker import Worker

CARD = uuid.UUID("11111111-2222-3333-4444-555555555555")
INSTANCE = uuid.UUID("99999999-2222-3333-4444-555555555555")


def function(called: Callable[..., int], *types: Any) -> Any:
    return ctypes.CFUNCTYPE(ctypes.c_int, *types)(called)


@pytest.fixture
def library() -> SimpleNamespace:
    """A ``libcuda`` of C function pointers, so that arguments are converted as for the real one."""
    number, capture = ctypes.POINTER(ctypes.c_int), lambda mode: 801
    made = SimpleNamespace(
        cuDeviceGet=function(lambda found, ordinal: 0, number, ctypes.c_int),
        cuThreadExchangeStreamCaptureMode=function(capture, number),
        uuids={"cuDeviceGetUuid": CARD, "cuDeviceGetUuid_v2": CARD},
    )

    def uuid_by(name: str) -> Callable[..., int]:
        def called(found: Any, device: int) -> int:
            found[0][:] = list(made.uuids[name].bytes)
            return 0

        return called

    for name in made.uuids:
        setattr(made, name, function(uuid_by(name), ctypes.POINTER(ctypes.c_ubyte * 16), ctypes.c_int))
    return made


@pytest.fixture
def driver(library: Any) -> CudaDriver:
    return CudaDriver(library)


def test_failures_and_an_older_driver_are_told(driver: CudaDriver, library: SimpleNamespace) -> None:
    with pytest.raises(RuntimeError, match="cuThreadExchangeStreamCaptureMode failed: CUresult 801"):
        driver.ignore_other_threads_captures()
    del library.cuThreadExchangeStreamCaptureMode
    with pytest.raises(RuntimeError, match="expected a driver with cuThreadExchangeStreamCaptureMode"):
        driver.ignore_other_threads_captures()


def test_names_are_those_of_nvidia_smi(driver: CudaDriver, library: SimpleNamespace) -> None:
    assert driver.name(0) == f"GPU-{CARD}"
    library.uuids["cuDeviceGetUuid_v2"] = INSTANCE
    assert driver.name(0) == f"MIG-{INSTANCE}", "neighbours on one card would take turns"
    del library.cuDeviceGetUuid  # a driver that has only the later call
    assert driver.name(0) == f"GPU-{INSTANCE}"


def test_the_drivers_name_comes_before_torchs(driver: CudaDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    of_torch = SimpleNamespace(uuid="of-torch")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: of_torch)
    monkeypatch.setattr(device_module, "cuda_driver", lambda: driver)
    assert device_module.device_name(torch.device("cuda", 1)) == f"GPU-{CARD}"
    absent = mock.Mock(side_effect=OSError("libcuda.so.1: cannot open shared object file"))
    monkeypatch.setattr(device_module, "cuda_driver", absent)
    assert device_module.device_name(torch.device("cuda", 1)) == "GPU-of-torch"


def test_a_fork_is_refused_although_the_lock_was_held_when_it_was_made() -> None:
    worker = Worker("crossover-test")
    with worker._lock:  # as another thread might
        if not (child := os.fork()):
            code = 1
            try:
                signal.alarm(20)
                with pytest.raises(RuntimeError, match="takes no more work: this process is a fork"):
                    worker.put(lambda: None)
                worker.stop()
                code = 0
            finally:
                os._exit(code)
    assert os.waitpid(child, 0)[1] == 0

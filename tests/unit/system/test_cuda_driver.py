"""The driver's calls through ctypes, against C functions that note what arrives in the registers."""

import ctypes
import threading
import uuid
from collections.abc import Callable
from typing import Any

import pytest
import torch

from crossover_ddp._system import cuda_driver as driver_module
from crossover_ddp._system import device as device_module
from crossover_ddp._system.cuda_driver import (
    MPS_ENABLED,
    CudaDriver,
    cuda_driver,
)

CARD = uuid.UUID("11111111-2222-3333-4444-555555555555")
INSTANCE = uuid.UUID("99999999-2222-3333-4444-555555555555")
INT, FLAGS = ctypes.c_int, ctypes.c_uint


class Library:
    """A ``libcuda`` of C function pointers, so that arguments are converted as for the real one."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []
        self.result = 0
        self.uuids = {"cuDeviceGetUuid": CARD, "cuDeviceGetUuid_v2": CARD}
        self._define("cuInit", self._note("init"), FLAGS)
        self._define("cuDeviceGet", self._device, ctypes.POINTER(INT), INT)
        self._define("cuDeviceGetAttribute", self._attribute, ctypes.POINTER(INT), INT, INT)
        self._define("cuThreadExchangeStreamCaptureMode", self._mode, ctypes.POINTER(INT))
        for name in self.uuids:
            self._define(name, self._uuid(name), ctypes.POINTER(ctypes.c_ubyte * 16), INT)

    def _define(self, name: str, function: Callable[..., int], *types: Any) -> None:
        setattr(self, name, ctypes.CFUNCTYPE(INT, *types)(function))

    def _note(self, what: str) -> Callable[..., int]:
        def called(*arguments: Any) -> int:
            self.seen.append((what, *arguments))
            return self.result

        return called

    def _device(self, device: Any, ordinal: int) -> int:
        device[0] = 40 + ordinal
        return self.result

    def _attribute(self, value: Any, attribute: int, device: int) -> int:
        value[0] = 1000 * attribute + device
        return self.result

    def _mode(self, mode: Any) -> int:
        self.seen.append(("mode", mode[0], threading.current_thread().name))
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


def test_attributes_are_those_of_the_device_with_this_number(driver: CudaDriver) -> None:
    assert driver.attribute(3, MPS_ENABLED) == 133_043


def test_failures_are_told_by_name(driver: CudaDriver, library: Library) -> None:
    text = ctypes.create_string_buffer(b"CUDA_ERROR_NOT_SUPPORTED")

    def name(result: int, pointer: Any) -> int:
        pointer[0] = ctypes.cast(text, ctypes.c_char_p).value
        return 0

    library._define("cuGetErrorName", name, INT, ctypes.POINTER(ctypes.c_char_p))
    library.result = 801
    with pytest.raises(
        RuntimeError, match="cuThreadExchangeStreamCaptureMode failed: CUDA_ERROR_NOT_SUPPORTED"
    ):
        driver.ignore_other_threads_captures()


def test_an_older_driver_is_told(driver: CudaDriver, library: Library) -> None:
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


def test_the_driver_is_initialized_before_anything_else_is_asked(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    cuda_driver.cache_clear()
    try:
        library.result = 100
        with pytest.raises(RuntimeError, match="cuInit failed"):
            cuda_driver()
        library.result = 0
        assert cuda_driver() is cuda_driver()
    finally:
        cuda_driver.cache_clear()
    assert library.seen == [("init", 0), ("init", 0)]


def test_a_thread_of_ours_ignores_captures_of_others_from_its_first_work_on(
    driver: CudaDriver, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_module, "cuda_driver", lambda: driver)
    threads = [
        threading.Thread(target=lambda: [driver_module.adopt_thread() for _ in range(3)], name=name)
        for name in ("one", "two")
    ]
    for thread in threads:
        thread.start()
        thread.join()
    assert library.seen == [("mode", 1, "one"), ("mode", 1, "two")]
    library.result = 1  # a driver that refuses changes nothing
    other = threading.Thread(target=driver_module.adopt_thread, name="three")
    other.start()
    other.join()
    assert library.seen[-1] == ("mode", 1, "three")

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
    CAN_USE_64_BIT_STREAM_MEM_OPS,
    IPC_EVENT_SUPPORTED,
    CudaDriver,
    cuda_driver,
)

CARD = uuid.UUID("11111111-2222-3333-4444-555555555555")
INSTANCE = uuid.UUID("99999999-2222-3333-4444-555555555555")
HIGH = 0x7FFF_FFFF_FFFF_F000  # an address that 32 bits do not hold
INT, POINTER, U64, SIZE, FLAGS = (
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_uint64,
    ctypes.c_size_t,
    ctypes.c_uint,
)


class Library:
    """A ``libcuda`` of C function pointers, so that arguments are converted as for the real one."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []
        self.result = 0
        self.uuids = {"cuDeviceGetUuid": CARD, "cuDeviceGetUuid_v2": CARD}
        self._define("cuInit", self._note("init"), FLAGS)
        self._define("cuDeviceGet", self._device, ctypes.POINTER(INT), INT)
        self._define("cuDeviceGetAttribute", self._attribute, ctypes.POINTER(INT), INT, INT)
        self._define("cuMemHostRegister_v2", self._note("register"), POINTER, SIZE, FLAGS)
        self._define("cuMemHostUnregister", self._note("unregister"), POINTER)
        self._define("cuMemHostGetDevicePointer_v2", self._pointer, ctypes.POINTER(U64), POINTER, FLAGS)
        self._define("cuStreamWriteValue64_v2", self._note("write"), POINTER, U64, U64, FLAGS)
        self._define("cuStreamWaitValue64_v2", self._note("wait"), POINTER, U64, U64, FLAGS)
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

    def _pointer(self, on_device: Any, address: int, flags: int) -> int:
        on_device[0] = address + 1
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
    assert driver.attribute(3, IPC_EVENT_SUPPORTED) == 125_043
    assert driver.attribute(0, CAN_USE_64_BIT_STREAM_MEM_OPS) == 122_040


def test_words_are_registered_written_and_awaited_in_64_bits(driver: CudaDriver, library: Library) -> None:
    assert driver.register(HIGH, 4096) == HIGH + 1
    driver.write(HIGH + 8, HIGH + 16, 1 << 62)
    driver.wait(0, HIGH + 16, 5)  # the default stream
    driver.unregister(HIGH)
    assert library.seen == [
        ("register", HIGH, 4096, 3),
        ("write", HIGH + 8, HIGH + 16, 1 << 62, 0),
        ("wait", None, HIGH + 16, 5, 0),
        ("unregister", HIGH),
    ]


def test_memory_without_an_address_on_the_device_is_given_up(driver: CudaDriver, library: Library) -> None:
    library._define("cuMemHostGetDevicePointer_v2", lambda *arguments: 1, ctypes.POINTER(U64), POINTER, FLAGS)
    with pytest.raises(RuntimeError, match="cuMemHostGetDevicePointer_v2 failed: CUresult 1"):
        driver.register(HIGH, 4096)
    assert [what for what, *_ in library.seen] == ["register", "unregister"]


def test_failures_are_told_by_name(driver: CudaDriver, library: Library) -> None:
    text = ctypes.create_string_buffer(b"CUDA_ERROR_NOT_SUPPORTED")

    def name(result: int, pointer: Any) -> int:
        pointer[0] = ctypes.cast(text, ctypes.c_char_p).value
        return 0

    library._define("cuGetErrorName", name, INT, ctypes.POINTER(ctypes.c_char_p))
    library.result = 801
    with pytest.raises(RuntimeError, match="cuStreamWaitValue64_v2 failed: CUDA_ERROR_NOT_SUPPORTED"):
        driver.wait(0, HIGH, 1)


def test_an_older_driver_is_told(driver: CudaDriver, library: Library) -> None:
    del library.cuStreamWriteValue64_v2
    with pytest.raises(RuntimeError, match="expected a driver with cuStreamWriteValue64_v2"):
        driver.write(0, HIGH, 1)


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

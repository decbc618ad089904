"""The few CUDA driver calls that torch does not offer, made with ctypes on ``libcuda.so.1``.

Names, numbers and meanings are those in ``cuda.h`` (13.1). Importing this module loads no library.
No call creates a CUDA context.
"""

import contextlib
import ctypes
import functools
import threading
import uuid
from typing import Final

_LIBRARY: Final = "libcuda.so.1"
_SUCCESS: Final = 0
# CUdevice_attribute
MPS_ENABLED: Final = 133
WORK_QUEUES: Final = "CUDA_DEVICE_MAX_CONNECTIONS"
_CAPTURE_MODE_THREAD_LOCAL: Final = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL

_INT, _POINTER, _FLAGS = ctypes.c_int, ctypes.c_void_p, ctypes.c_uint
_SIGNATURES: Final = {
    "cuInit": (_FLAGS,),
    "cuDeviceGet": (ctypes.POINTER(_INT), _INT),
    "cuDeviceGetAttribute": (ctypes.POINTER(_INT), _INT, _INT),
    "cuDeviceGetUuid": (_POINTER, _INT),
    "cuDeviceGetUuid_v2": (_POINTER, _INT),
    "cuThreadExchangeStreamCaptureMode": (ctypes.POINTER(_INT),),
}
_UUID_BYTES: Final = 16


class CudaDriver:
    """A thin wrapper around a loaded ``libcuda``.

    On failure: ``RuntimeError`` with the CUresult of the call.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def _call(self, name: str, *arguments: object) -> None:
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise RuntimeError(
                f"expected a driver with {name}, got an older one; update the NVIDIA driver"
            ) from None
        function.argtypes = _SIGNATURES[name]
        function.restype = _INT
        result = function(*arguments)
        if result != _SUCCESS:
            raise RuntimeError(f"{name} failed: CUresult {result}")

    def _device(self, index: int) -> int:
        device = _INT()
        self._call("cuDeviceGet", ctypes.byref(device), index)
        return device.value

    def initialize(self) -> None:
        """Initialize the driver, unless torch has done so already. This creates no context."""
        self._call("cuInit", 0)

    def attribute(self, index: int, attribute: int) -> int:
        """Return the value of a device attribute.

        Args:
            index: torch's index of the device in this process.
            attribute: the attribute's number in ``CUdevice_attribute``.
        """
        value = _INT()
        self._call("cuDeviceGetAttribute", ctypes.byref(value), attribute, self._device(index))
        return value.value

    def name(self, index: int) -> str:
        """Return the device's name in the form that nvidia-smi uses.

        This is ``GPU-<uuid>``, or ``MIG-<uuid>`` for an instance of a partitioned GPU.
        """
        own = card = self._uuid(index, "cuDeviceGetUuid_v2")
        with contextlib.suppress(RuntimeError):  # this driver has no call for the whole card
            card = self._uuid(index, "cuDeviceGetUuid")
        return f"{'GPU' if own == card else 'MIG'}-{own}"

    def _uuid(self, index: int, function: str) -> uuid.UUID:
        found = ctypes.create_string_buffer(_UUID_BYTES)
        self._call(function, found, self._device(index))
        return uuid.UUID(bytes=found.raw)

    def ignore_other_threads_captures(self) -> None:
        """Allow this thread to query and wait while another thread captures a CUDA graph."""
        self._call(
            "cuThreadExchangeStreamCaptureMode", ctypes.byref(_INT(_CAPTURE_MODE_THREAD_LOCAL))
        )


@functools.cache
def cuda_driver() -> CudaDriver:
    """Return the initialized CUDA driver, which is loaded once.

    Raises ``OSError`` if there is no driver, and ``RuntimeError`` if the driver finds no GPU.
    """
    driver = CudaDriver(ctypes.CDLL(_LIBRARY))
    driver.initialize()
    return driver


_threads = threading.local()


def adopt_thread() -> None:
    """Keep the calling thread from invalidating the CUDA graph captures of other threads.

    Threads of this package call it, so that they do not disturb user code.

    While a graph is captured in torch's default mode, the capture becomes invalid if *any* thread
    queries an event or waits for one. This function does nothing if the driver lacks the call.
    """
    if not getattr(_threads, "adopted", False):
        _threads.adopted = True
        with contextlib.suppress(OSError, RuntimeError):  # without the call, only captures may fail
            cuda_driver().ignore_other_threads_captures()

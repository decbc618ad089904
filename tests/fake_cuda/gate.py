"""A gate in a stream, which the host opens: work behind it cannot have happened before."""

import contextlib
import ctypes
from collections.abc import Iterator

import torch

_AT_LEAST = 0


class Gate:
    """Work that a stream is given after its gate begins after `open`."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        # The stream waits until this is at least 1.
        self._word = torch.zeros(1, dtype=torch.int64)
        wait = ctypes.CDLL("libcuda.so.1").cuStreamWaitValue64_v2
        wait.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint]
        assert wait(stream.cuda_stream, self._word.data_ptr(), 1, _AT_LEAST) == 0

    def open(self) -> None:
        """Resume the stream."""
        self._word.fill_(1)


@contextlib.contextmanager
def held(stream: torch.cuda.Stream) -> Iterator[Gate]:
    """Hold the stream until the gate is opened, at the latest at the end of the block."""
    gate = Gate(stream)
    try:
        yield gate
    finally:
        gate.open()
        stream.synchronize()

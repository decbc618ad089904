"""A stream that goes on when the host says so: what is behind the gate has surely not happened yet."""

import contextlib
import ctypes
from collections.abc import Iterator

import torch

_AT_LEAST = 0


class Gate:
    """Work given to a stream behind its gate begins after `open`."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._word = torch.zeros(1, dtype=torch.int64)
        wait = ctypes.CDLL("libcuda.so.1").cuStreamWaitValue64_v2
        wait.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint]
        assert wait(stream.cuda_stream, self._word.data_ptr(), 1, _AT_LEAST) == 0

    def open(self) -> None:
        """Let all go on."""
        self._word.fill_(1)


@contextlib.contextmanager
def held(stream: torch.cuda.Stream) -> Iterator[Gate]:
    """Hold the stream; it goes on at the end of the block at the latest, so that nothing waits for ever."""
    gate = Gate(stream)
    try:
        yield gate
    finally:
        gate.open()
        stream.synchronize()

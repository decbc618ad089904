"""Turns on a GPU ordered by 64-bit words in host memory that siblings share: the second way, off by default.

Each process has a page in /dev/shm, beside the segment. The end of turn n is "write n into my word", enqueued on a
stream (``cuStreamWriteValue64``); a sibling's stream waits until the word is at least n (``cuStreamWaitValue64``).
Compared with events: nothing is resolved by process id or name space, a sibling only has to see the same /dev/shm,
which turns need anyway; and a wait can be ended by a host.

[Note: words outlive their writers]
When a process is killed, its queue goes with it and its word stays too low. Any sibling may then write the greatest
value into it; the word belongs to that process alone (the next owner of the slot makes a new one), so no other
process's turns are changed. The dead process's queue may still write a lower number afterwards, so the sibling
writes again, twice a second, until its own wait is over. It writes with ``pwrite``, never through the mapping: somebody
who truncates the file must not kill this process by a SIGBUS.

Source: the stream memory operations of the CUDA driver; host memory, and the release by siblings, are our design.
"""

import contextlib
import ctypes
import mmap
import os
import secrets
import sys
from typing import ClassVar, Final, Protocol

import torch

from crossover_ddp._system.cuda_driver import CAN_USE_64_BIT_STREAM_MEM_OPS, cuda_driver

from .gpu_order import GpuOrder, Key, SiblingFiles, WaitWatcher, drained

_MAGIC: Final = b"XDDPWORD"
_TOKEN_BYTES: Final = 8
_HANDLE_BYTES: Final = 64  # one entry of a slot's table of handles
_WORD_BYTES: Final = 8
_RELEASED: Final = 1 << 62
"""More than any turn, and positive as the device compares it."""


class Driver(Protocol):
    """The calls of `CudaDriver` that are needed here."""

    def attribute(self, index: int, attribute: int) -> int:
        """See `CudaDriver.attribute`."""

    def register(self, address: int, size_bytes: int) -> int:
        """See `CudaDriver.register`."""

    def unregister(self, address: int) -> None:
        """See `CudaDriver.unregister`."""

    def write(self, stream: int, address: int, value: int) -> None:
        """See `CudaDriver.write`."""

    def wait(self, stream: int, address: int, value: int) -> None:
        """See `CudaDriver.wait`."""


class Word:
    """A page of shared memory whose first eight bytes devices write and wait for.

    Args:
        descriptor: of the file, which this object closes.
        driver: registers the page.
    """

    def __init__(self, descriptor: int, driver: Driver) -> None:
        self._descriptor, self._driver = descriptor, driver
        try:
            if os.fstat(descriptor).st_size < mmap.PAGESIZE:
                raise RuntimeError("its page is cut short")
            self._page = mmap.mmap(descriptor, mmap.PAGESIZE)
            self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._page))
            self.address = driver.register(self._address, mmap.PAGESIZE)
        except BaseException:
            os.close(descriptor)
            raise

    def read(self) -> int:
        """Return the word as it is now."""
        return int.from_bytes(os.pread(self._descriptor, _WORD_BYTES, 0), sys.byteorder)

    def release(self) -> None:
        """End every wait for this word: its owner is dead."""
        os.pwrite(self._descriptor, _RELEASED.to_bytes(_WORD_BYTES, sys.byteorder), 0)

    def close(self) -> None:
        """Free the memory; no stream may still wait for it."""
        with contextlib.suppress(RuntimeError):  # a broken context has freed it itself
            self._driver.unregister(self._address)
        self._page.close()
        os.close(self._descriptor)


_in_use: Final[list[Word]] = []
"""Words of closed orders that a device may still read or write: they stay mapped until the process ends."""


class SemaphoreOrder(GpuOrder):
    """GPUs with 64-bit stream memory operations.

    Args:
        device: the GPU, as this process numbers it.
        siblings: the process's place among its siblings, beside which the words lie.
        driver: default the CUDA driver of this process.

    On failure: the constructor raises ``RuntimeError`` or ``OSError`` where the device or the driver cannot, or where
    there is no room for a page.
    """

    kind: ClassVar[str] = "semaphores"
    # With several streams an earlier turn's number could be written after a later one's.
    _ends_on_one_stream: ClassVar[bool] = True

    def __init__(self, device: torch.device, siblings: SiblingFiles, driver: Driver | None = None) -> None:
        self._driver = cuda_driver() if driver is None else driver
        if not self._driver.attribute(device.index or 0, CAN_USE_64_BIT_STREAM_MEM_OPS):
            raise RuntimeError("the driver says that the device has no 64-bit stream memory operations")
        super().__init__(device)
        self._siblings = siblings
        token = secrets.token_bytes(_TOKEN_BYTES)
        self._suffix = _suffix(token)
        with torch.cuda.device(device):
            self._last_end = torch.cuda.Event()
            self._last_end.record()  # also makes the context current, which registering needs
            descriptor = siblings.make_private_file(self._suffix)
            try:
                os.posix_fallocate(descriptor, 0, mmap.PAGESIZE)
            except OSError:
                os.close(descriptor)
                siblings.remove_private_file(self._suffix)
                raise
            self._word = Word(descriptor, self._driver)
        self.handles = (_MAGIC + token).ljust(_HANDLE_BYTES, b"\0")
        # None: it could not be opened.
        self._words: dict[Key, Word | None] = {}
        self._watch = WaitWatcher(device, lambda key: siblings.is_alive(*key))
        self._closed = False

    def _mark(self, turn: int, stream: torch.cuda.Stream) -> None:
        with torch.cuda.device(self._device):
            self._driver.write(stream.cuda_stream, self._word.address, turn)
        self._last_end.record(stream)

    def follow(self, key: Key, handles: bytes, turn: int) -> str | None:
        """Enqueue a wait for a number that the sibling has enqueued to be written, unless it is written already."""
        if key not in self._words:
            problem = self._open(key, handles)
            if problem is not None:
                return problem
        word = self._words[key]
        if word is None or word.read() >= turn:
            return None
        with torch.cuda.device(self._device):
            stream = torch.cuda.current_stream(self._device)
            self._driver.wait(stream.cuda_stream, word.address, turn)
            over = torch.cuda.Event()
            over.record(stream)
        self._watch.add(key, over.query, word.release)
        return None

    def _open(self, key: Key, handles: bytes) -> str | None:
        self._close_former(key[0])
        self._words[key] = None
        if not handles.startswith(_MAGIC) or len(handles) != _HANDLE_BYTES:
            return "the sibling orders its turns in another way: set the same CROSSOVER_DEVICE_ORDER in both jobs"
        token = handles[len(_MAGIC) : len(_MAGIC) + _TOKEN_BYTES]
        try:
            with torch.cuda.device(self._device):
                self._words[key] = Word(self._siblings.open_private_file(_suffix(token)), self._driver)
        except (OSError, RuntimeError) as error:
            return f"its word cannot be opened: {error}"
        return None

    def _close_former(self, slot: int) -> None:
        """Close the words of the slot's former owners, but those for which a stream may still wait."""
        for key, word in list(self._words.items()):
            if key[0] == slot and not self._watch.pending(key):
                del self._words[key]
                if word is not None:
                    word.close()

    def close(self) -> None:
        """Wait for the own last turn, for at most 30 s, then close the words."""
        if self._closed:
            return
        self._closed = True
        super().close()
        is_drained = drained([self._last_end])
        words = [word for word in (self._word, *self._words.values()) if word is not None]
        if self._watch.close() and is_drained:  # no stream waits for a word, or will write one
            for word in words:
                word.close()
        else:
            _in_use.extend(words)
        self._siblings.remove_private_file(self._suffix)


def _suffix(token: bytes) -> str:
    return f".{token.hex()}.word"

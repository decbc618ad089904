"""Let some tests run alone although several workers of pytest-xdist run tests.

Tests of faults and of the emulated cluster have bounds in seconds, which the tests of another worker would break. A
worker takes its own slot for the time of a test, and all slots for a test that runs alone. Who waits holds the gate, so
that a test which waits for all slots is not overtaken. The kernel gives the locks of a dead worker away.
"""

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path


class Turnstile:
    """The slots of some workers, as locked files.

    Args:
        directory: the same for all workers, and nobody else's.
        worker: this one's number, from 0.
        workers: how many there are.
    """

    def __init__(self, directory: Path, worker: int, workers: int) -> None:
        self._gate = (directory / "gate").open("w")
        self._slots = [(directory / f"slot{each}").open("w") for each in range(workers)]
        self._worker = worker

    @contextlib.contextmanager
    def passed(self, *, alone: bool) -> Iterator[None]:
        """Hold the own slot, or all, for the time of the block."""
        slots = self._slots if alone else [self._slots[self._worker]]
        fcntl.flock(self._gate, fcntl.LOCK_EX)
        for slot in slots:
            fcntl.flock(slot, fcntl.LOCK_EX)
        fcntl.flock(self._gate, fcntl.LOCK_UN)
        try:
            yield
        finally:
            for slot in slots:
                fcntl.flock(slot, fcntl.LOCK_UN)

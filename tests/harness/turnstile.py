"""Let some tests run alone, or beside their like only, although several workers of pytest-xdist run tests.

Tests of faults and of the emulated cluster have bounds in seconds. Most of them wait for most of their time: such
*quiet* tests run beside each other, not beside the *crowd* of tests that keep all cores busy. What keeps the cores busy
and has bounds runs *alone*. A worker takes a slot of its own for the time of a test, one of the test's kind, or all
slots for a test that runs alone. Who waits holds the gate, so that nobody who waits is overtaken. The kernel gives the
locks of a dead worker away.
"""

import contextlib
import fcntl
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path


class Company(IntEnum):
    """Beside which tests a test may run."""

    CROWD = 0
    QUIET = 1
    ALONE = 2


class Turnstile:
    """The slots of some workers, as locked files.

    Args:
        directory: the same for all workers, and nobody else's.
        worker: this one's number, from 0.
        workers: how many there are.
    """

    def __init__(self, directory: Path, worker: int, workers: int) -> None:
        self._gate = (directory / "gate").open("w")
        self._slots = {
            kind: [(directory / f"{kind.name.lower()}{each}").open("w") for each in range(workers)]
            for kind in (Company.CROWD, Company.QUIET)
        }
        self._worker = worker

    @contextlib.contextmanager
    def passed(self, company: Company) -> Iterator[None]:
        """Hold the own slot of a kind, or all slots, for the time of the block; nobody holds one of the other kind."""
        if company is Company.ALONE:
            own, others = [slot for slots in self._slots.values() for slot in slots], []
        else:
            (other,) = self._slots.keys() - {company}
            own, others = [self._slots[company][self._worker]], self._slots[other]
        fcntl.flock(self._gate, fcntl.LOCK_EX)
        for slot in others:
            fcntl.flock(slot, fcntl.LOCK_EX)
            fcntl.flock(slot, fcntl.LOCK_UN)
        for slot in own:
            fcntl.flock(slot, fcntl.LOCK_EX)
        fcntl.flock(self._gate, fcntl.LOCK_UN)
        try:
            yield
        finally:
            for slot in own:
                fcntl.flock(slot, fcntl.LOCK_UN)

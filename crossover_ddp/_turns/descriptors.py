"""Open files that a forked child closes before it does anything else. Our design.

[Note: forks]
A slot belongs to the process that holds the kernel's lock on it, and a process counts as alive while its bell has a
reader. A forked
child inherits the open files, and with them the lock and the bell, so it would keep the slot of its dead parent
alive. Therefore every child closes them first. It must know all of them: no thread may fork between the opening of
a descriptor and the moment when it is noted here, so both happen under `no_fork`.
"""

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Final

no_fork: Final = threading.RLock()
"""A fork waits for this lock. It is held only while files are opened or closed, never over a wait."""
_all: "weakref.WeakSet[Descriptors]" = weakref.WeakSet()
_guarded = False
_CLOSED: Final = -1  # a number that every system call refuses


class Descriptors:
    """The open files of one object, by any key. Thread-safe."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        with no_fork:
            _guard_forks()
            _all.add(self)

    def open(self, key: Hashable, opening: Callable[[], int]) -> int:
        """Note the descriptor that ``opening`` returns under ``key``, and return it."""
        with no_fork:
            number = self._numbers[key] = opening()
            return number

    def get(self, key: Hashable) -> int:
        """Return the descriptor under ``key``; -1, which every system call refuses, if none is open."""
        return self._numbers.get(key, _CLOSED)

    def close(self, key: Hashable) -> None:
        """Close the descriptor under ``key``, if it is open."""
        with no_fork:
            if key in self._numbers:
                os.close(self._numbers.pop(key))

    def close_all(self) -> None:
        """Close every descriptor. May be called again."""
        with no_fork:
            numbers, self._numbers = self._numbers, {}
            for number in numbers.values():
                with contextlib.suppress(OSError):
                    os.close(number)


def _guard_forks() -> None:
    global _guarded
    if not _guarded:
        os.register_at_fork(
            before=no_fork.acquire, after_in_parent=no_fork.release, after_in_child=_close_in_child
        )
        _guarded = True


def _close_in_child() -> None:
    for each in list(_all):
        each.close_all()
    no_fork.release()

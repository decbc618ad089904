"""Wait for conditions that other threads and processes bring about, within a bound."""

import time
from collections.abc import Callable
from pathlib import Path


def eventually(
    condition: Callable[[], bool], timeout_s: float = 60.0, *, every_s: float = 0.02
) -> bool:
    """Wait until a condition holds. Return False if it does not within ``timeout_s``."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(every_s)
    return True


def state(pid: int) -> str:
    """Return the kernel's letter for a process's state: R, S, T (stopped), …; X if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "X"


def gone(pid: int) -> bool:
    """Return whether a process has ended, reaped or not."""
    return state(pid) in "ZX"

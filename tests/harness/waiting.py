"""Wait for what other processes do, within a bound."""

import time
from collections.abc import Callable
from pathlib import Path


def eventually(condition: Callable[[], bool], timeout_s: float = 20.0) -> bool:
    """Tell whether the condition comes true in time."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.02)
    return True


def gone(pid: int) -> bool:
    """Tell whether a process has ended, reaped or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    except OSError:
        return True

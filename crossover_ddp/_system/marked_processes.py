"""Find processes by a variable that they have inherited, even if they have left their parent, group and session."""

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path


def processes_with(variable: str) -> Iterator[tuple[int, str]]:
    """Yield every other living process of this user that was started with ``variable``, and its value."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            value = value_of(int(entry.name), variable)
            if value is not None:
                yield int(entry.name), value


def value_of(pid: int, variable: str) -> str | None:
    """Return the value of a variable that a process of this user was started with; None if there is none."""
    process = Path("/proc", str(pid))
    try:
        if process.stat().st_uid != os.getuid():
            return None
        variables = (process / "environ").read_bytes().split(b"\0")
    except OSError:
        return None  # it is gone
    mark = f"{variable}=".encode()
    found = next((each for each in variables if each.startswith(mark)), None)
    return found.removeprefix(mark).decode(errors="replace") if found is not None else None


def memory_bytes(pid: int) -> int:
    """Return the memory of a process, pages shared with n others counted as 1/n; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    except (OSError, StopIteration, ValueError):
        return 0


def send(pids: Iterable[int], *numbers: int) -> None:
    """Send signals to processes; those that have ended are passed over."""
    for pid in pids:
        for number in numbers:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)

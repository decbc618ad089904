"""Run a command for a short while with its timeline recorded, and leave nothing of it behind.

[Note: whose processes] torchrun starts its workers in sessions of their own, so the command's process group is not all
of it. Every descendant inherits ``CROSSOVER_TIMELINE``, which names a directory that is ours alone: by that the rest is
found. What clears its environment is not found.
"""

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from ._marked_processes import processes_with, send
from ._signals import endings_raise, undisturbed
from ._timeline import DIRECTORY_VARIABLE

_LOOK_S: Final = 0.25
_GRACE_S: Final = 5.0
_TAIL_LINES: Final = 20
_TAIL_BYTES: Final = 16_384


@dataclass(frozen=True)
class Ended:
    """How a short run ended.

    Args:
        returncode: of the command, as subprocess tells it; None: it was ended here, as planned.
        tail: its last lines; empty if they were shown.
    """

    returncode: int | None
    tail: str


def run(
    command: Sequence[str],
    directory: Path,
    *,
    enough: Callable[[float], bool],
    show: bool = False,
    environment: Mapping[str, str] | None = None,
    grace_s: float = _GRACE_S,
) -> Ended:
    """Run ``command`` until it ends or ``enough``, then end it and all that it has started.

    Args:
        command: its words.
        directory: where timelines go; nobody else's.
        enough: called four times a second with the seconds since the start.
        show: let its output through, to stderr.
        environment: variables on top of this process's.
        grace_s: how long it may take to end after SIGTERM, until SIGKILL.

    On failure: ``OSError`` if it cannot be started. SIGTERM and SIGHUP end it like Ctrl-C, and raise ``SystemExit``.
    """
    variables = {"PYTHONUNBUFFERED": "1", **os.environ, **(environment or {})}
    variables[DIRECTORY_VARIABLE] = str(directory)
    with tempfile.TemporaryFile() as output, endings_raise():
        process = subprocess.Popen(
            list(command),
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=2 if show else output,  # ours is for the advice
            stderr=2 if show else output,
            start_new_session=True,
        )
        try:
            began_s = time.monotonic()
            while process.poll() is None and not enough(time.monotonic() - began_s):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_LOOK_S)
            returncode = process.poll()
        finally:
            with undisturbed():
                _end(process, directory, grace_s)
        return Ended(returncode, _tail(output))


def _end(process: "subprocess.Popen[bytes]", directory: Path, grace_s: float) -> None:
    """End the command and everything that carries its mark: politely first, then for sure."""
    for number in (signal.SIGTERM, signal.SIGCONT):  # a stopped process hears nothing
        _signal_group(process, number)
    deadline_s = time.monotonic() + grace_s
    while time.monotonic() < deadline_s and (process.poll() is None or _marked(directory)):
        if process.poll() is not None:
            send(_marked(directory), signal.SIGTERM)
        time.sleep(_LOOK_S / 5)
    # Again until none is found: one may fork between the look and the kill.
    deadline_s = time.monotonic() + grace_s
    while time.monotonic() < deadline_s and (process.poll() is None or _marked(directory)):
        _signal_group(process, signal.SIGKILL)
        send(_marked(directory), signal.SIGKILL)
        time.sleep(_LOOK_S / 25)


def _signal_group(process: "subprocess.Popen[bytes]", number: int) -> None:
    if process.poll() is None:  # afterwards the number may be somebody else's
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)


def _marked(directory: Path) -> list[int]:
    """Return the living processes that were started with this directory for their timelines."""
    return [pid for pid, value in processes_with(DIRECTORY_VARIABLE) if value == str(directory)]


def _tail(output: IO[bytes]) -> str:
    size = output.seek(0, os.SEEK_END)
    output.seek(max(0, size - _TAIL_BYTES))
    return "\n".join(output.read().decode(errors="replace").splitlines()[-_TAIL_LINES:])

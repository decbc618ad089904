"""Run a command for a short while with its timeline recorded, and leave nothing of it behind.

Every process that the command starts inherits ``CROSSOVER_TIMELINE``, whose directory no other run uses: that marks it.
See [Note: no process is left behind] in `crossover_ddp._system.children`.
"""

import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from crossover_ddp._system.children import SHELLS_OFFSET, Child, end, end_marked, wait_any
from crossover_ddp._system.environment import TIMELINE
from crossover_ddp._system.signals import endings_raise, undisturbed

_LOOK_S: Final = 0.25
_STDERR: Final = 2
_GRACE_S: Final = 5.0
_TAIL_LINES: Final = 20
_TAIL_BYTES: Final = 16_384


@dataclass(frozen=True)
class Ended:
    """How a short run ended.

    Args:
        returncode: of the command, as shells number it; None: it was ended here, as planned.
        tail: the last lines of its output; empty if they were shown.
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
    """Run ``command`` until it ends, or until ``enough`` returns True; then end it and all that it has started.

    Args:
        command: its words.
        directory: for the timelines; no other run may use it.
        enough: called four times a second with the seconds since the start.
        show: write its output to standard error.
        environment: variables on top of this process's.
        grace_s: how long it may take to end after SIGTERM, until SIGKILL.

    On failure: ``OSError`` if it cannot be started. SIGTERM and SIGHUP end it like Ctrl-C, and raise ``SystemExit``.
    """
    variables = {"PYTHONUNBUFFERED": "1", **os.environ, **(environment or {})}
    with tempfile.TemporaryFile() as output, endings_raise():
        # Our standard output is for the advice.
        shown = _STDERR if show else output.fileno()
        process = Child(
            command,
            {**variables, TIMELINE: str(directory)},
            stdin=subprocess.DEVNULL,
            stdout=shown,
            stderr=shown,
        )
        try:
            began_s = time.monotonic()
            while process.poll() is None and not enough(time.monotonic() - began_s):
                wait_any([process], _LOOK_S)
            returncode = process.poll()
        finally:
            with undisturbed():
                end([process], grace_s=grace_s)
                end_marked(TIMELINE, str(directory), grace_s=grace_s)
        if returncode is not None and returncode < 0:
            returncode = SHELLS_OFFSET - returncode
        return Ended(returncode, _tail(output))


def _tail(output: IO[bytes]) -> str:
    size = output.seek(0, os.SEEK_END)
    output.seek(max(0, size - _TAIL_BYTES))
    return "\n".join(output.read().decode(errors="replace").splitlines()[-_TAIL_LINES:])

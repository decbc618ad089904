"""A rank's process that writes down what it does, and the process that forks such ranks."""

import contextlib
import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.harness.children import Child, end, wait_any

_END_S = 5.0


@dataclass
class LoggedRank:
    """One rank's process and what it has logged."""

    pid: int
    log: Path

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def alive(self) -> bool:
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def records(self) -> list[Any]:
        """Return whole lines; the last one may be cut off."""
        lines = self.log.read_text().splitlines(keepends=True) if self.log.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]


def close_forker(process: Child) -> None:
    """End a process that forks ranks as it is told over its stdin."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    process.stdout.close()
    wait_any([process], _END_S)
    end([process], grace_s=0.0)

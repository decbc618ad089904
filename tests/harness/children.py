"""Child processes, as the lab has them, and lines of JSON that tests exchange with them."""

import json
import signal
import sys
import threading
from pathlib import Path
from typing import Any

sys.path.append(
    str(Path(__file__).resolve().parents[2] / "recipes")
)  # pytest has it already, other programs have not

from lab import children
from lab.children import end, wait_any

__all__ = ["Child", "end", "wait_any"]


class Child(children.Child):
    """A process that takes orders and answers."""

    def tell(self, order: Any) -> None:
        """Write a line of JSON to its standard input, which must be a pipe for text."""
        assert self.stdin is not None
        self.stdin.write(json.dumps(order) + "\n")
        self.stdin.flush()

    def hear(self, timeout_s: float) -> Any:
        """Return its next line of JSON on standard output, a pipe for text; one that says nothing in time is killed.

        Raises `EOFError` if it ends instead.
        """
        assert self.stdout is not None
        watchdog = threading.Timer(timeout_s, self.signal_session, [signal.SIGKILL])
        watchdog.start()
        try:
            line = self.stdout.readline()
        finally:
            watchdog.cancel()
            watchdog.join()
        if not line:
            raise EOFError(f"expected an answer of process {self.pid} within {timeout_s:.0f} s, got its end")
        return json.loads(line)

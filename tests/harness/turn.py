"""A mutex of a test's own, for any state's ``mutex=``: it notes what is done to it, and gives turns when told."""

import threading
from collections.abc import Callable
from typing import Final

_PATIENCE_S: Final = 60.0


class RecordingTurn:
    """Notes "release", "request" and "acquire" in `order`, each when it has ended, and their threads in `threads`.

    Args:
        shared: whether a sibling is present.
        gate: no turn is given before it is set. Default: at once.
        window_s: `release` lasts so long, unless somebody asks for the next turn by then, who then comes first in
            `order`.
        at_acquire: called when a turn is given, before it is noted.
        log: is `order`, where others note what they do, too; None: a list of its own.
    """

    def __init__(
        self,
        *,
        shared: bool = True,
        gate: threading.Event | None = None,
        window_s: float = 0.0,
        at_acquire: Callable[[], None] | None = None,
        log: list[str] | None = None,
    ) -> None:
        self.shared, self.mode = shared, "untried"
        self.ranks = None  # whatever group's
        self.order: list[str] = [] if log is None else log
        self.threads: list[threading.Thread] = []
        self._gate, self._window_s, self._at_acquire = gate, window_s, at_acquire
        self._asked = threading.Event()

    def release(self) -> None:
        """Give the turn away, slowly if there is a window."""
        self._asked.clear()
        self._asked.wait(self._window_s)
        self._note("release")

    def request(self) -> None:
        """Join the queue."""
        self._note("request")
        self._asked.set()

    def acquire(self, *, ahead: bool = False) -> None:
        """Wait for the gate."""
        self._asked.set()
        if self._gate is not None and not self._gate.wait(_PATIENCE_S):
            raise TimeoutError(f"the test's gate stayed closed for {_PATIENCE_S} s")
        if self._at_acquire is not None:
            self._at_acquire()
        self._note("acquire")

    def close(self) -> None:
        """Nothing to leave."""

    @property
    def taken_and_given(self) -> list[str]:
        """The calls without requests."""
        return [call for call in self.order if call != "request"]

    def stats(self) -> dict[str, int]:
        """Return how often each was called."""
        return {call: self.order.count(call) for call in ("release", "request", "acquire")}

    def _note(self, call: str) -> None:
        self.threads.append(threading.current_thread())
        self.order.append(call)

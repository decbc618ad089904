"""A mutex for tests, for any state's ``mutex=``: it records the calls and can delay them."""

import threading
from collections.abc import Callable


class RecordingTurn:
    """Records the calls of `release`, `request` and `acquire`.

    Args:
        window_s: the seconds that `release` lasts. A `request` or `acquire` in the meantime ends it
            early, and comes before it in `order`.
        at_acquire: called in `acquire`, before it returns.
    """

    def __init__(
        self, *, window_s: float = 0.0, at_acquire: Callable[[], object] = lambda: None
    ) -> None:
        self.awaits_device = True
        self.mode = "untried"  # as if a sibling were present
        self.ranks = None  # accepted for any process group
        # The names of the calls, each added when the call ends.
        self.order: list[str] = []
        # The thread of each call.
        self.threads: list[threading.Thread] = []
        self._window_s = window_s
        self._at_acquire = at_acquire
        # Set by a request for the next turn.
        self._asked = threading.Event()

    def release(self) -> None:
        self._asked.clear()
        self._asked.wait(self._window_s)
        self._note("release")

    def request(self) -> None:
        self._note("request")
        self._asked.set()

    def acquire(self, *, blocking: bool = True, ahead: bool = False) -> bool:
        if not blocking:
            return False
        self._asked.set()
        self._at_acquire()
        self._note("acquire")
        return True

    def close(self) -> None:
        """Do nothing: there is nothing to close."""

    @property
    def taken_and_given(self) -> list[str]:
        return [call for call in self.order if call != "request"]

    def stats(self) -> dict[str, int]:
        return {call: self.order.count(call) for call in ("release", "request", "acquire")}

    def _note(self, call: str) -> None:
        self.threads.append(threading.current_thread())
        self.order.append(call)

"""A mutex of a test's own, for any state's ``mutex=``: it notes what is done to it, and gives turns when told."""

import threading
from collections.abc import Callable


class RecordingTurn:
    """Notes "release", "request" and "acquire" in `order`, each when it has ended, and their threads in `threads`.

    Args:
        window_s: `release` lasts so long, unless somebody asks for the next turn by then, who comes first in `order`.
        at_acquire: called before a turn is given.
    """

    def __init__(
        self, *, window_s: float = 0.0, at_acquire: Callable[[], object] = lambda: None
    ) -> None:
        self.awaits_device, self.mode = True, "untried"  # a sibling is present
        self.ranks = None  # whatever group's
        self.order: list[str] = []
        self.threads: list[threading.Thread] = []
        self._window_s, self._at_acquire = window_s, at_acquire
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
        """Nothing to leave."""

    @property
    def taken_and_given(self) -> list[str]:
        return [call for call in self.order if call != "request"]

    def stats(self) -> dict[str, int]:
        return {call: self.order.count(call) for call in ("release", "request", "acquire")}

    def _note(self, call: str) -> None:
        self.threads.append(threading.current_thread())
        self.order.append(call)

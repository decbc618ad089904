"""A journey under way, as whoever waits for it sees it."""

import threading
from collections.abc import Callable

from .journeys import Journey


class Milestone:
    """A place on a journey's way that the program waits for."""

    def __init__(self) -> None:
        self._arrived = threading.Event()
        self._error: BaseException | None = None
        self._follow: Callable[[], None] | None = None

    def wait(self) -> None:
        """Block until it is reached; on a device order what the caller does behind it. May be called again.

        Raises what has ended the journeys of the group, if anything has.
        """
        self._arrived.wait()
        if self._error is not None:
            raise self._error.with_traceback(None)
        if self._follow is not None:
            self._follow()

    def reach(self, error: BaseException | None, follow: Callable[[], None]) -> None:
        """Let nobody wait any more; what comes first counts."""
        if not self._arrived.is_set():
            self._error, self._follow = error, follow
            self._arrived.set()


class Trip(Milestone):
    """A journey under way; its end is what is waited for.

    Args:
        name: of what travels, in errors.
        deferred: the program goes on without it; other ranks may need it although this one ends.
    """

    def __init__(self, name: str, *, deferred: bool = False) -> None:
        super().__init__()
        self.name, self.deferred = name, deferred
        self.journey: Journey | None = None

    def end(self, error: BaseException | None, follow: Callable[[], None]) -> None:
        """Let nobody wait any more."""
        self.journey = None  # no cycle that keeps its tensors
        self.reach(error, follow)

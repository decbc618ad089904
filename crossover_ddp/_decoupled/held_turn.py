"""The job's turn in decoupled training: taken before forward computes, or before owners do, and held until backward."""

import time
from collections.abc import Callable, Iterable

from crossover_ddp._engine.turns import Turn

from .shares import Share


class HeldTurn:
    """Take a turn once for each time that it is given away.

    Args:
        turn: the job's, if there is one.
    """

    def __init__(self, turn: Turn | None) -> None:
        self._turn = turn
        self.is_held = turn is None

    def given_away(self, *, and_taken: bool = False) -> None:
        """Note that the exchange has given the turn away; ``and_taken``: and takes it again before backward ends."""
        self.is_held = self._turn is None or and_taken

    def take(self, pending: Iterable[Share], waited: Callable[[float], None]) -> None:
        """Take the turn, unless it is held, once there is something to compute: the first gradients have come.

        Args:
            pending: buckets whose gradients forward needs.
            waited: told since when the turn was waited for.
        """
        if self._turn is None or self.is_held:
            return
        first = min(pending, key=lambda share: share.urgency, default=None)
        if first is not None:
            # Alone the host runs ahead of the device as it would without a mutex.
            if self._turn.shared:
                first.deferred.wait_on_host()
            else:
                first.deferred.wait()
        since_s = time.monotonic()
        self._turn.acquire()
        waited(since_s)
        self.is_held = True

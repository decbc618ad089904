"""The job's turn in decoupled training: forward takes it, the end of backward gives it away."""

import time
from collections.abc import Callable

from crossover_ddp._engine.buckets import Turn
from crossover_ddp._engine.exchange import Exchange


class ForwardTurn:
    """Takes the job's turn on the training thread, once a step."""

    def __init__(self, turn: Turn) -> None:
        self.turn = turn
        # Whether the job has the turn. The exchange gives it away with a step's last bucket.
        self.is_held = False

    def take(self, exchange: Exchange, until_needed: Callable[[], None]) -> None:
        """Take the turn, unless it is held.

        Args:
            exchange: records the wait.
            until_needed: waits until there is something to compute.
        """
        if self.is_held:
            return
        until_needed()
        since_s = time.monotonic()
        self.turn.acquire()
        exchange.waited(since_s)
        self.is_held = True

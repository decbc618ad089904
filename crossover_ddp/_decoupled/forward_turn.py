"""The job's turn in decoupled training: forward takes it, and the end of backward releases it."""

import time
from collections.abc import Callable

from crossover_ddp._engine.buckets import Turn
from crossover_ddp._engine.exchange import Exchange


class ForwardTurn:
    """Takes the job's turn on the training thread once per step."""

    def __init__(self, turn: Turn) -> None:
        self.turn = turn
        # Whether the job holds the turn. The exchange releases it with the last bucket of a step.
        self.is_held = False

    def take(self, exchange: Exchange, until_needed: Callable[[], None]) -> None:
        """Take the turn, unless this job already holds it.

        Args:
            exchange: the exchange that records how long the wait takes.
            until_needed: a function that waits until there is something to compute.
        """
        if self.is_held:
            return
        until_needed()
        since_s = time.monotonic()
        self.turn.acquire()
        exchange.steps.waited(since_s, exchange.passes.current.number)
        self.is_held = True

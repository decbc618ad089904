"""Elastic rounds on a thread of their own: training offers its parameters, and collects the pull when it is there.

[Note: rounds] All ranks' threads go through the same rounds. A round begins with a table: who offers, how many steps
that rank has done, who wants to hold, and how often each rank offers. Those that offer pull and are pulled; for the
others their thread takes part with zeros. So a slow rank delays nobody: its thread is there although its training is
not. A thread joins the next round when it has an offer, or at the latest when the fastest rank should have one. A pull
that a slow rank has not collected yet waits for it, and the rank offers nothing meanwhile: nothing is counted twice,
and nothing is lost. Our design.

[Note: holding] Rounds stop on all ranks behind the same table: that in which every rank wants to hold. Until then they
go on, so that a rank that has ended its steps early serves the slower ones.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import torch

from crossover_ddp._engine.exchange import Exchange
from crossover_ddp.errors import ExchangeError

from .centre import CentreParts, pull_of

_FIRST_PACE_S: Final = 0.05
_FIRST_INTERVAL_S: Final = 0.2
_LONGEST_PACE_S: Final = 5.0
_ROUNDS_KEPT: Final = 100_000
_JOIN_TIMEOUT_S: Final = 5.0


class ElasticRound(NamedTuple):
    """One round as one rank saw it.

    ``offered``: by rank, after how many steps it offered what went into this round; None if it took no part.
    ``collected``: after how many steps this rank collected its pull; None if it took no part, or has not yet.
    """

    number: int
    offered: tuple[int | None, ...]
    collected: int | None = None


class Pull(NamedTuple):
    """What is to be added to a rank's vectors, by block."""

    number: int
    deltas: list[torch.Tensor]


class Ending:
    """Ends the thread of the rounds with the process group."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.has_come = False
        self.thread: threading.Thread | None = None

    def tell(self) -> None:
        """Begin no round any more."""
        with self.changed:
            self.has_come = True
            self.changed.notify_all()

    def join(self) -> None:
        """Wait for the thread, which ends when its exchange has ended."""
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join(_JOIN_TIMEOUT_S)


class ElasticRounds:
    """See [Note: rounds]. All methods are called on the training thread and none waits, but `hold` and `close`.

    Args:
        exchange: used by this thread alone.
        centre: this rank's parts.
        sizes: a vector for each block, as long as it.
        moving_rate: α.
        ending: ends the thread.

    On failure: the thread ends, and every later call raises what ended it.
    """

    def __init__(
        self,
        exchange: Exchange,
        centre: CentreParts,
        sizes: Sequence[torch.Tensor],
        moving_rate: float,
        ending: Ending,
    ) -> None:
        self._exchange = exchange
        self._centre = centre
        self._rate = moving_rate
        self._vectors = [torch.empty_like(size) for size in sizes]
        self._ending = ending
        self._changed = ending.changed
        self._offer: int | None = None
        self._pull: Pull | None = None
        self._taken = False
        self._wants_hold = self._held = False
        self._resumed = 0
        self._failure: Exception | None = None
        self._pace_s = _FIRST_PACE_S
        self._interval_s = _FIRST_INTERVAL_S
        self._offered_s: float | None = None
        self._number = 0
        self.tables = 0
        self.log: deque[ElasticRound] = deque(maxlen=_ROUNDS_KEPT)
        ending.thread = threading.Thread(target=self._run, name="crossover-rounds", daemon=True)
        ending.thread.start()

    # --- the training thread ---------------------------------------------------------------------------------

    def offer(self, steps: int, fill: Callable[[Sequence[torch.Tensor]], bool]) -> bool:
        """Offer vectors that ``fill`` writes, unless a former offer is still in a round; tell whether they were taken.

        Args:
            steps: done so far.
            fill: writes a vector for each block, and returns whether they are fit to be sent.
        """
        with self._changed:
            self.check()
            if self._taken or self._pull is not None:
                return False
            if not fill(self._vectors):
                self._offer = None
                return True
            now_s = time.monotonic()
            if self._offered_s is not None:
                self._interval_s = now_s - self._offered_s
            self._offered_s, self._offer = now_s, steps
            self._changed.notify_all()
            return True

    def collect(self, steps: int, apply: Callable[[Pull], None], *, leave: bool = False) -> bool:
        """Let ``apply`` add the pull that has come, if one has; ``leave`` it there for another time."""
        with self._changed:
            self.check()
            pull = self._pull
        if pull is None:
            return False
        apply(pull)
        if not leave:
            with self._changed:
                self._pull = None
                for place in range(len(self.log) - 1, -1, -1):
                    if self.log[place].number == pull.number:
                        self.log[place] = self.log[place]._replace(collected=steps)
                        break
        return True

    def check(self) -> None:
        """Raise what has ended the rounds, if anything has."""
        if self._failure is not None:
            raise self._failure

    def hold(self) -> None:
        """Wait until the rounds of all ranks stand still; what was offered and in no round yet is taken back.

        **Collective**: it lasts until all ranks hold, or the exchange fails.
        """
        with self._changed:
            self._wait_for_hold()
            self.check()
            if not self._held:
                raise ExchangeError(
                    "expected rounds that run, got ended ones: the process group was destroyed; call it before"
                )
            self._offer = None

    def _wait_for_hold(self) -> None:
        self._wants_hold = True
        self._changed.notify_all()
        self._changed.wait_for(lambda: self._held or self._failure is not None or self._ending.has_come)

    def resume(self) -> None:
        """Go on after `hold`."""
        with self._changed:
            self._wants_hold = self._held = False
            self._resumed += 1
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread when all ranks close, see [Note: holding]. Raises nothing."""
        with self._changed:
            self._wait_for_hold()
        self._ending.tell()
        self._exchange.close()
        self._ending.join()

    # --- the thread of the rounds ----------------------------------------------------------------------------

    def _run(self) -> None:
        torch.get_num_threads()  # see `_system.worker`
        try:
            with torch.no_grad():
                while self._await_next():
                    self._go_round()
        except Exception as error:  # whatever it is, the training thread raises it
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _await_next(self) -> bool:
        """Wait for an offer or for the pace; return False when the rounds are over."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._ending.has_come or self._offer is not None or self._wants_hold,
                timeout=self._pace_s,
            )
            return not self._ending.has_come

    def _go_round(self) -> None:
        with self._changed:
            steps, holds = self._offer, self._wants_hold
            if steps is not None:
                self._taken, self._offer = True, None
        own = [-1.0 if steps is None else float(steps), float(holds), self._interval_s]
        table = self._exchange.gather_numbers(own, torch.device("cpu"))
        self.tables += 1
        offered = tuple([None if numbers[0] < 0 else int(numbers[0]) for numbers in table])
        pulling = sum(each is not None for each in offered)
        if pulling:
            self._exchange_vectors(offered, pulling, own=steps is not None)
        self._keep_pace(pulling > 0, min(numbers[2] for numbers in table))
        if all(numbers[1] for numbers in table):
            self._stand_still()

    def _exchange_vectors(self, offered: tuple[int | None, ...], pulling: int, *, own: bool) -> None:
        deltas = []
        # One block after the other, so that only one copy is under way.
        for place, vector in enumerate(self._vectors):
            former = vector.clone() if own else torch.zeros_like(vector)
            self._centre.begin_pull(place, former, pulling).wait()
            if own:
                deltas.append(pull_of(vector, former, self._rate))
        with self._changed:
            self.log.append(ElasticRound(self._number, offered))
            if own:
                self._pull, self._taken = Pull(self._number, deltas), False
            self._number += 1

    def _keep_pace(self, active: bool, fastest_s: float) -> None:
        if active:
            self._pace_s = min(max(fastest_s, 1e-3), _LONGEST_PACE_S)
        else:
            self._pace_s = min(2 * self._pace_s, _LONGEST_PACE_S)

    def _stand_still(self) -> None:
        with self._changed:
            self._held, resumed = True, self._resumed
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._ending.has_come or self._resumed != resumed)

"""The turns of a step in bands, one for each.

[Note: bands and turns]
With a mutex a step is cut in bands (`schedule.bands`), each of which is one turn of the job. What a rank waits for
inside a band comes from the same or an earlier band of its own job, whose turn has come on every device, since all
devices see one order of turns. So inside a turn nobody waits for another job, and turns stay free of deadlocks. A rank
that has nothing to compute in a band gives the turn back at once: that is where a sibling computes.

[Note: out of step]
Two jobs of one plan that begin together have their bubbles together. So a job that begins a step close behind a sibling
leaves some turns to it, until their steps are evenly apart; then each computes in the other's bubbles. The lead rank
decides, by what siblings tell of their steps, and its grant tells the job's ranks. Our design.
"""

import contextlib
from collections.abc import Iterator

from crossover_ddp.gpu_mutex import GPUMutex


class BandTurns:
    """One turn for each band of a step. All ranks of the job call the same, as with the mutex itself.

    Args:
        mutex: of the job.
        count: bands of a step.
    """

    def __init__(self, mutex: GPUMutex, count: int) -> None:
        self._mutex, self._count = mutex, count

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Let siblings see the job's step while the body runs."""
        try:
            yield
        finally:
            self._mutex._safely(lambda turns: turns.end_step())

    @contextlib.contextmanager
    def band(self, number: int) -> Iterator[None]:
        """Hold the turn of a band, from 0 on, while the body runs."""
        if number:
            self._mutex.acquire()
        else:
            self._begin()
        try:
            yield
        finally:
            self._mutex.release()
        if number + 1 < self._count:
            self._request(number + 1)

    def _begin(self) -> None:
        """Take the first band's turn, after those that are left to siblings; see [Note: out of step]."""
        for left in reversed(range(self._count)):  # a sibling that does not go on is not waited for longer
            self._request(0)
            self._mutex.acquire()
            if not (self._is_idle and left):
                return
            self._mutex.release()

    @property
    def _is_idle(self) -> bool:
        turns = self._mutex._turns
        return turns is not None and turns.idle

    def _request(self, number: int) -> None:
        phase = (number + 1) / self._count
        self._mutex._safely(lambda turns: turns.request(phase, may_idle=number == 0))

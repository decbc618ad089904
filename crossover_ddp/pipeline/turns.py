"""The turns of a step in bands, one for each.

[Note: bands and turns]
With a mutex a step is cut in bands (`schedule.bands`), each of which is one turn of the job. What a rank waits for
inside a band comes from the same or an earlier band of its own job, whose turn has come on every device, since all
devices see one order of turns. So inside a turn nobody waits for another job, and turns stay free of deadlocks. A rank
that has nothing to compute in a band gives the turn back at once: that is where a sibling computes.

[Note: out of step]
Two jobs of one plan that begin together have their bubbles together. So a job leaves some turns before its first step,
as many as its number says, which is drawn at random and the same on all its ranks. Our design.
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
        self._left = (mutex.job >> 1) % count  # turns left to siblings; numbers of jobs are odd

    @contextlib.contextmanager
    def band(self, number: int) -> Iterator[None]:
        """Hold the turn of a band, from 0 on, while the body runs."""
        for _ in range(self._left):  # see [Note: out of step]
            self._mutex.acquire()
            self._mutex.release()
        self._left = 0
        self._mutex.acquire()
        try:
            yield
        finally:
            self._mutex.release()
        if number + 1 < self._count:
            self._mutex.request()

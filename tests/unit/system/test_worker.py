"""The thread that runs jobs in order."""

import os
import signal

import pytest

from crossover_ddp._system.worker import Worker


def test_a_fork_is_refused_although_the_lock_was_held_when_it_was_made() -> None:
    worker = Worker("crossover-test")
    with worker._lock:  # as another thread might
        child = os.fork()
        if child == 0:
            code = 1
            try:
                signal.alarm(20)
                with pytest.raises(
                    RuntimeError, match="takes no more work: this process is a fork of its owner"
                ):
                    worker.put(lambda: None)
                worker.stop()
                code = 0
            finally:
                os._exit(code)
    assert os.waitpid(child, 0)[1] == 0

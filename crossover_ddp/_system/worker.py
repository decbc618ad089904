"""A daemon thread that runs jobs in order, started by the first of them."""

import os
import queue
import threading
from collections.abc import Callable
from typing import Final

import torch

Job = Callable[[], None]

_STOP: Final = None


class Worker:
    """Run jobs one after the other on one daemon thread.

    Between jobs the thread refers only to its queue, so it keeps no engine and no process group
    alive. It blocks on the queue and never polls.

    Args:
        name: the thread's name in debuggers.
        adopt: the thread calls this before its first job.
    """

    def __init__(self, name: str, adopt: Job = lambda: None) -> None:
        self._name = name
        self._adopt = adopt
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopped = False
        self._pid = os.getpid()

    def put(self, job: Job) -> None:
        """Queue ``job``, which must not raise. ``RuntimeError`` after `stop`, and in a fork."""
        # In a fork the lock may be held forever, by a thread that exists only in the parent.
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"thread {self._name} takes no more work: this process is a fork of its owner"
            )
        with self._lock:
            if self._stopped:
                raise RuntimeError(f"thread {self._name} takes no more work: it was closed")
            if self._thread is None:
                self._thread = threading.Thread(
                    target=_run, args=(self._jobs, self._adopt), name=self._name, daemon=True
                )
                self._thread.start()
            self._jobs.put(job)

    def stop(self, then: Job | None = None) -> None:
        """Accept no more jobs. The thread runs those in its queue, then ``then``, and ends.

        May be called again, with no effect, and in a fork.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
            if self._thread is not None:
                for job in (then, _STOP) if then is not None else (_STOP,):
                    self._jobs.put(job)
                return
        if then is not None:
            then()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread to end after `stop`. Return whether it has ended."""
        thread = self._thread
        if thread is None or thread is threading.current_thread() or os.getpid() != self._pid:
            return True
        thread.join(timeout_s)
        return not thread.is_alive()


def _run(jobs: "queue.SimpleQueue[Job | None]", adopt: Job) -> None:
    # torch.set_num_threads() on the main thread takes effect on another thread only with the first
    # parallel kernel there. Until then a matrix product may be divided, and so rounded,
    # differently. Reading the number applies it.
    torch.get_num_threads()
    adopt()
    del adopt
    while (job := jobs.get()) is not _STOP:
        job()
        # Or the last job would keep its bucket, engine and group alive while the queue is empty.
        del job

"""The parent's side of ranks: a pool of processes that wait for tasks.

A clean process returns to the pool after its task. Any other process is ended.
"""

import atexit
import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from ._preloaded import START_TIMEOUT_S, context, forked
from ._worker import CleanUp, Report, Task, serve

# Time from SIGABRT until the stacks of all threads are written, even on a busy machine.
DUMP_TIMEOUT_S = 5.0
OUTPUT_LIMIT_BYTES = 20_000


class Worker:
    """The parent's handle of one process of the pool."""

    def __init__(self, directory: Path) -> None:
        self.output = directory / f"output-{time.monotonic_ns()}"
        self.orders, theirs = context.Pipe()
        self.process = forked(serve, (theirs, str(self.output)))
        self.process.start()
        theirs.close()

    def wait_until_ready(self) -> None:
        if not self.orders.poll(START_TIMEOUT_S):
            raise TimeoutError(
                f"a rank did not start within {START_TIMEOUT_S:.0f} s\n{self.read_output()}"
            )
        self.orders.recv()

    def order(self, order: Task | CleanUp) -> None:
        """Send an order. If the process has died, `receive` reports it."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.orders.send(order)

    def receive(self) -> Report | None:
        """Return the report that has arrived, or None if the process ended without one."""
        with contextlib.suppress(EOFError, ConnectionResetError):
            if self.orders.poll():
                report: Report = self.orders.recv()
                return report
        self.process.join()
        return None

    def death(self) -> str:
        """Describe how the process has ended."""
        status = self.process.exitcode
        if status is not None and status < 0:
            return f"was killed by {signal.Signals(-status).name}"
        return f"exited with status {status} and without a result"

    def read_output(self) -> str:
        data = self.output.read_bytes() if self.output.exists() else b""
        return data[-OUTPUT_LIMIT_BYTES:].decode(errors="replace")

    def dump(self) -> None:
        """Write the stacks of all threads to the output. This ends the process."""
        assert self.process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGABRT)
            os.kill(self.process.pid, signal.SIGCONT)  # the process may be stopped
        self.process.join(DUMP_TIMEOUT_S)

    def end(self) -> None:
        """Kill the process and its children. Harmless if it has already ended."""
        assert self.process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()
        self.orders.close()
        self.output.unlink(missing_ok=True)


class Pool:
    """Idle processes, lent to one run at a time. Each imports torch once, not once per test."""

    def __init__(self) -> None:
        self._idle: list[Worker] = []
        self._directory: Path | None = None

    @contextlib.contextmanager
    def lend(self, count: int) -> Iterator[list[Worker]]:
        """Lend processes for the duration of the block. An exception in the block ends them all."""
        if self._directory is None:
            self._directory = Path(tempfile.mkdtemp(prefix="ranks-"))
            atexit.register(self.close)
        workers = self._idle[:count]
        del self._idle[:count]
        started = [Worker(self._directory) for _ in range(count - len(workers))]
        for worker in started:
            worker.wait_until_ready()
        workers += started
        try:
            yield workers
        except BaseException:
            for worker in workers:
                worker.end()
            raise
        for worker in reversed(workers):
            # Empty the output now, not when the process is lent again: if the process dies in
            # between, its last output must be kept.
            worker.output.write_bytes(b"")
            if worker.process.is_alive():
                self._idle.insert(0, worker)
            else:
                worker.end()

    def close(self) -> None:
        for worker in self._idle:
            worker.end()
        self._idle.clear()
        if self._directory is not None:
            atexit.unregister(self.close)
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None


def ready(workers: dict[int, Worker], timeout_s: float) -> list[int]:
    """Wait until a worker has reported or ended, and return the indices of those that have."""
    index_of: dict[Any, int] = {}
    for index, worker in workers.items():
        index_of[worker.orders] = index
        index_of[worker.process.sentinel] = index
    return sorted({index_of[each] for each in wait(list(index_of), timeout_s)})

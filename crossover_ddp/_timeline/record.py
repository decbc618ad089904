"""Record when a process computed, communicated and waited: spans, as JSON lines.

The first line of a file is a header that names the job, the rank, the device and the two
clocks; every further line is one span. Pictures and statistics are made from these
files elsewhere (`crossover_ddp._timeline.files`), so that recording stays cheap: a span
is one append to a list, and the file is written when some hundreds are waiting, or once
a second, so that most spans are in the file while a job runs, and after it was killed.
"""

import atexit
import contextlib
import itertools
import json
import logging
import os
import socket
import threading
import time
from pathlib import Path
from typing import Final

from crossover_ddp._system import environment
from crossover_ddp._system.machine import machine

_log = logging.getLogger(__name__)

FORMAT_VERSION: Final = 2
"""Of the files."""
_FLUSH_SPANS: Final = 512
_TIME_NAMESPACE: Final = "/proc/self/ns/time"
_FLUSH_S: Final = 1.0

Detail = int | float | str
_WaitingSpan = tuple[str, float, float, dict[str, Detail]]


class Timeline:
    """Record spans in a file of its own, ``directory/rank<r>-<pid>.jsonl``, or ``…-<pid>-2.jsonl`` if that is there.

    Args:
        directory: where the file goes; made if it is missing.
        rank: rank of this process in its job.
        device: name of the device, the same for all jobs that share it.
        job: a text that is the same on all ranks of the job and on no other job's; None if not known.

    On failure: if a file cannot be written there is one warning and no recording,
    never an exception on the way of a bucket. Not collective. Thread-safe.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        rank: int,
        device: str,
        job: str | None = None,
    ) -> None:
        # `_begin_file` may change it: another state, or an earlier process, may have a file of that name.
        self.path = Path(directory) / f"rank{rank}-{os.getpid()}.jsonl"
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._write_lock = threading.Lock()
        self._waiting: list[_WaitingSpan] = []
        self._written_s = time.monotonic()
        self._closed = False
        self._begin_file({"job": job, "rank": rank, "device": device})
        # Not a weak reference: a state dropped before the process ends must not lose its spans.
        atexit.register(self.close)

    @classmethod
    def from_environment(cls, *, rank: int, device: str, job: str | None = None) -> "Timeline | None":
        """Record into ``$CROSSOVER_TIMELINE``, or not at all when that is not set."""
        directory = os.environ.get(environment.TIMELINE)
        return cls(directory, rank=rank, device=device, job=job) if directory else None

    def span(self, kind: str, begin_s: float, end_s: float, **detail: Detail) -> None:
        """Note that ``kind`` lasted from ``begin_s`` to ``end_s`` (``time.monotonic()``)."""
        with self._lock:
            if self._closed:
                return
            self._waiting.append((kind, begin_s, end_s, detail))
            # The span's own end serves as the clock: no further call.
            due = len(self._waiting) >= _FLUSH_SPANS or end_s - self._written_s >= _FLUSH_S
            if due:
                self._written_s = end_s
        if due:
            self.flush()

    def flush(self) -> None:
        """Write what is waiting."""
        with self._write_lock:
            with self._lock:
                spans, self._waiting = self._waiting, []
            if spans and os.getpid() == self._pid:
                self._append("".join(_line(span) for span in spans))

    def close(self) -> None:
        """Write what is waiting and record nothing more. May be called again."""
        with self._lock:
            self._closed = True
        self.flush()
        atexit.unregister(self.close)

    def _begin_file(self, who: dict[str, Detail | None]) -> None:
        before_s, wall_s, after_s = time.monotonic(), time.time(), time.monotonic()
        header = {
            "version": FORMAT_VERSION,
            **who,
            "host": socket.gethostname(),
            "pid": self._pid,
            "clock": _clock_name(),
            "monotonic_s": (before_s + after_s) / 2,
            "wall_s": wall_s,
        }
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path = _new_file(self.path)
        except OSError as error:
            self._give_up(error)
        else:
            self._append(json.dumps(header) + "\n")

    def _append(self, text: str) -> None:
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, mode=0o666)
            try:
                os.write(descriptor, text.encode())
            finally:
                os.close(descriptor)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        with self._lock:
            already, self._closed = self._closed, True
            self._waiting.clear()
        if not already:
            _log.warning("no timeline is recorded in %s: %s", self.path, error)


def _new_file(path: Path) -> Path:
    """Make ``path``, or the first one of its name and a number that is not there yet."""
    numbered = (path.with_name(f"{path.stem}-{number}{path.suffix}") for number in itertools.count(2))
    for each in itertools.chain([path], numbered):
        with contextlib.suppress(FileExistsError):
            each.touch(exist_ok=False)
            return each
    raise AssertionError("numbers do not end")


def _clock_name() -> str:
    """Name the clock that ``time.monotonic()`` reads; it is the same in all containers of a machine."""
    try:
        return f"{machine()}/{os.readlink(_TIME_NAMESPACE)}"
    except OSError:  # a kernel without time namespaces
        return machine()


def _line(span: _WaitingSpan) -> str:
    kind, begin_s, end_s, detail = span
    return json.dumps({"kind": kind, "begin_s": begin_s, "end_s": end_s, **detail}) + "\n"

"""Who computed and who communicated when: spans of one process, as JSON lines.

The first line of a file is a header that names the rank, the device and the two
clocks; every further line is one span. Pictures and statistics are made from these
files elsewhere (``recipes/lab_analysis.py``), so that recording stays cheap: a span
is one append to a list, and the file is written when some hundreds are waiting, or once
a second, so that whoever watches a running job, or ends it, has most of what it did.
"""

import atexit
import json
import logging
import os
import socket
import threading
import time
from pathlib import Path
from typing import Final

_log = logging.getLogger(__name__)

DIRECTORY_VARIABLE: Final = "CROSSOVER_TIMELINE"
_FLUSH_SPANS: Final = 512
_FLUSH_S: Final = 1.0

Detail = int | float | str
_Span = tuple[str, float, float, dict[str, Detail]]


class Timeline:
    """Record the spans of this process in ``directory/rank<r>-<pid>.jsonl``.

    Args:
        directory: where the file goes; made if it is missing.
        rank: rank of this process in its job.
        device: name of the device, the same for all jobs that share it.

    On failure: a file that cannot be written costs one warning and the recording,
    never an exception on the way of a bucket. Not collective. Thread-safe.
    """

    def __init__(self, directory: str | os.PathLike[str], *, rank: int, device: str) -> None:
        self.path = Path(directory) / f"rank{rank}-{os.getpid()}.jsonl"
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._write_lock = threading.Lock()
        self._waiting: list[_Span] = []
        self._written_s = time.monotonic()
        self._closed = False
        self._begin_file(rank, device)
        # Not a weak reference: a state dropped before the process ends must not lose its spans.
        atexit.register(self.close)

    @classmethod
    def from_environment(cls, *, rank: int, device: str) -> "Timeline | None":
        """Record into ``$CROSSOVER_TIMELINE``, or not at all when that is not set."""
        directory = os.environ.get(DIRECTORY_VARIABLE)
        return cls(directory, rank=rank, device=device) if directory else None

    def span(self, kind: str, begin_s: float, end_s: float, **detail: Detail) -> None:
        """Note that ``kind`` lasted from ``begin_s`` to ``end_s`` (``time.monotonic()``)."""
        with self._lock:
            if self._closed:
                return
            self._waiting.append((kind, begin_s, end_s, detail))
            # The span's own end is the clock: no call more.
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

    def _begin_file(self, rank: int, device: str) -> None:
        header = {
            "rank": rank,
            "device": device,
            "host": socket.gethostname(),
            "pid": self._pid,
            "monotonic_s": time.monotonic(),
            "wall_s": time.time(),
        }
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self._give_up(error)
        else:
            # A second state in one process goes on in the same file.
            if not self.path.exists():
                self._append(json.dumps(header) + "\n")

    def _append(self, text: str) -> None:
        # One write to a file opened for appending: two recorders of one process
        # never mix their lines.
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
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


def _line(span: _Span) -> str:
    kind, begin_s, end_s, detail = span
    return json.dumps({"kind": kind, "begin_s": begin_s, "end_s": end_s, **detail}) + "\n"

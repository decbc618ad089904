"""Record when a process computed, communicated and waited: spans, as a trace that Perfetto opens.

The file is a JSON array of events in the Chrome format, one a line, whose end may be missing: it is a trace while the
job runs, and after it was killed. A process of the trace is a device, a thread a lane of one rank of one job; both
numbers are digests of names, so traces are merged by writing them one behind the other (`_timeline.trace`).
A span is one append to a list; the file is written when some hundreds are waiting, or once a second.
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
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

_log = logging.getLogger(__name__)

FORMAT_VERSION: Final = 3
"""Of the files."""
RECORDING: Final = "recording"
"""The name of the event that says whose trace it is; viewers ignore it."""
LANES: Final = {"compute": "turns", "wait": "turns", "exchange": "turns"}
_MICROSECONDS: Final = 1e6
_FLUSH_SPANS: Final = 512
_FLUSH_S: Final = 1.0

Detail = int | float | str
_WaitingSpan = tuple[str, float, float, dict[str, Detail]]


class Timeline:
    """Record spans in a file of its own, ``directory/rank<r>-<pid>.json``, or ``…-<pid>-2.json`` if that is there.

    Args:
        directory: where the file goes; made if it is missing.
        rank: rank of this process in its job.
        device: name of the device, the same for all jobs that share it.
        job: a text that is the same on all ranks of the job and on no other job's; None if not known.

    On failure: if a file cannot be written there is one warning and no recording,
    never an exception on the way of a bucket. Not collective. Thread-safe.
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, rank: int, device: str, job: str | None = None
    ) -> None:
        # `_begin_file` may change it: another state, or an earlier process, may have a file of that name.
        self.path = Path(directory).absolute() / f"rank{rank}-{os.getpid()}.json"
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._write_lock = threading.Lock()
        self._waiting: list[_WaitingSpan] = []
        self._written_s = time.monotonic()
        self._closed = False
        # Readings of this clock are brought to the wall clock's once: what NTP changes later does not bend the trace.
        self._wall_s = time.time() - time.monotonic()
        self._ends_s: dict[str, list[float]] = {}  # of the last span in each lane of a name
        self._rank_name = f"{job or self.path.parent.name} · rank {rank}"
        self._device_id = _digest(device)
        self._begin_file({"version": FORMAT_VERSION, "job": job, "rank": rank, "device": device})
        # Not a weak reference: a state dropped before the process ends must not lose its spans.
        atexit.register(self.close)

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
        if os.getpid() != self._pid:  # a fork, where locks may be held for ever
            return
        with self._write_lock:
            with self._lock:
                spans, self._waiting = self._waiting, []
            if spans:
                self._append("".join(event for span in spans for event in self._events(span)))

    def close(self) -> None:
        """Write what is waiting and record nothing more. May be called again."""
        if os.getpid() == self._pid:  # as in `flush`
            with self._lock:
                self._closed = True
            self.flush()
        atexit.unregister(self.close)

    def _begin_file(self, who: dict[str, Detail | None]) -> None:
        whose = {**who, "host": socket.gethostname(), "process": self._pid, "wall_s": self._wall_s}
        device = {"name": who["device"]}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path = _new_file(self.path)
        except OSError as error:
            self._give_up(error)
        else:
            names = self._metadata(RECORDING, 0, whose) + self._metadata("process_name", 0, device)
            self._append(f"[\n{names}")

    def _metadata(self, name: str, thread: int, args: Mapping[str, object]) -> str:
        return _line({"ph": "M", "name": name, "pid": self._device_id, "tid": thread, "args": args})

    def _events(self, span: _WaitingSpan) -> Iterator[str]:
        """Yield a span as an event, in a lane without a span that it overlaps, since a trace allows only nesting."""
        kind, begin_s, end_s, detail = span
        name = LANES.get(kind, kind.replace("_", "-"))
        ends_s = self._ends_s.setdefault(name, [])
        lane = next(
            (place for place, last_s in enumerate(ends_s) if last_s <= begin_s), len(ends_s)
        )
        title = f"{self._rank_name} · {name}" + f" {lane + 1}" * (lane > 0)
        thread = _digest(f"{self._device_id} {self.path} {title}")
        if lane == len(ends_s):
            ends_s.append(end_s)
            yield self._metadata("thread_name", thread, {"name": title})
        ends_s[lane] = end_s
        ts, dur = (
            round(each_s * _MICROSECONDS, 3) for each_s in (begin_s + self._wall_s, end_s - begin_s)
        )
        where = {"pid": self._device_id, "tid": thread, "ts": ts, "dur": dur}
        yield _line({"ph": "X", "name": _title(kind, detail), "cat": kind, **where, "args": detail})

    def _append(self, text: str) -> None:
        try:
            with open(
                self.path, "ab", buffering=0
            ) as file:  # a fork writes no buffer of ours once more
                rest = text.encode()
                while rest:  # a full disk takes a part, and refuses the next one
                    rest = rest[file.write(rest) :]
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
    numbered = (
        path.with_name(f"{path.stem}-{number}{path.suffix}") for number in itertools.count(2)
    )
    for each in itertools.chain([path], numbered):
        with contextlib.suppress(FileExistsError):
            each.touch(exist_ok=False)
            return each
    raise AssertionError("numbers do not end")


def _digest(name: str) -> int:
    return zlib.crc32(name.encode()) >> 1  # viewers take 31 bits


def _title(kind: str, detail: Mapping[str, Detail]) -> str:
    name, bucket, step = kind.replace("_", "-"), detail.get("bucket"), detail.get("step")
    if bucket is not None:
        return f"{name} of bucket {bucket}" if bucket != -1 else f"{name} beside the buckets"
    return name if step is None else f"{name} (step {step})"


def _line(event: Mapping[str, object]) -> str:
    return f"{json.dumps(event)},\n"

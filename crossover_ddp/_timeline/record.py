"""Records when a process computed, communicated and waited, as a trace that Perfetto opens.

The file is a JSON array of events in the Chrome format, with one event per line. The format allows
the closing bracket to be missing, so the file is a valid trace while the job runs, and after a
kill. In the trace, a process stands for a device, and a thread stands for a lane of one rank of one
job. The ids of both are digests of names, so traces can be merged by concatenation
(`_timeline.trace`).

Recording a span only appends to a list. The list is written to the file when some hundreds of spans
are waiting, or once a second.
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
"""The version of the file format."""
RECORDING: Final = "recording"
"""The name of the event that identifies the job, rank and device. Viewers ignore this event."""
LANES: Final = {"compute": "turns", "wait": "turns", "exchange": "turns"}
_MICROSECONDS: Final = 1e6
_FLUSH_SPANS: Final = 512
_FLUSH_S: Final = 1.0

Detail = int | float | str
_WaitingSpan = tuple[str, float, float, dict[str, Detail]]


class Timeline:
    """Record spans in a new file, ``directory/rank<r>-<pid>.json``.

    If that file exists, the name is ``rank<r>-<pid>-2.json``, and so on.

    Args:
        directory: the directory for the file. It is created if it is missing.
        rank: the rank of this process in its job.
        device: the name of the device. It must be the same in all jobs that share the device.
        job: a text that identifies the job. It must be the same on all its ranks. None if it is
            not known.

    On failure: a file that cannot be written causes one warning and ends the recording. No
    exception reaches the journey of a bucket. Not collective. Thread-safe.
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, rank: int, device: str, job: str | None = None
    ) -> None:
        # `_begin_file` changes the path if another state, or an earlier process with the same id,
        # has created that file.
        self.path = Path(directory).absolute() / f"rank{rank}-{os.getpid()}.json"
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._write_lock = threading.Lock()
        self._waiting: list[_WaitingSpan] = []
        self._written_s = time.monotonic()
        self._closed = False
        # The offset of the wall clock from the monotonic clock, which is added to all times. It is
        # computed once, so that later corrections by NTP do not distort the trace.
        self._wall_s = time.time() - time.monotonic()
        # When the last span of each lane ended. Lanes are grouped by name.
        self._ends_s: dict[str, list[float]] = {}
        self._rank_name = f"{job or self.path.parent.name} · rank {rank}"
        self._device_id = _digest(device)
        self._begin_file({"version": FORMAT_VERSION, "job": job, "rank": rank, "device": device})
        # This is not a weak reference, since no spans may be lost if a state is dropped before the
        # process exits.
        atexit.register(self.close)

    def span(self, kind: str, begin_s: float, end_s: float, **detail: Detail) -> None:
        """Record a span of time.

        Args:
            kind: the activity that filled the span, such as ``compute``.
            begin_s: when the span began, by ``time.monotonic()``.
            end_s: when the span ended, by the same clock.
            detail: further values to record with the span.
        """
        with self._lock:
            if self._closed:
                return
            self._waiting.append((kind, begin_s, end_s, detail))
            # The end of the span serves as the current time, which saves reading the clock.
            due = len(self._waiting) >= _FLUSH_SPANS or end_s - self._written_s >= _FLUSH_S
            if due:
                self._written_s = end_s
        if due:
            self.flush()

    def flush(self) -> None:
        """Write the waiting spans to the file."""
        if os.getpid() != self._pid:  # in a forked child, the locks may be held forever
            return
        with self._write_lock:
            with self._lock:
                spans = self._waiting
                self._waiting = []
            if spans:
                self._append("".join(event for span in spans for event in self._events(span)))

    def close(self) -> None:
        """Write the waiting spans, and stop recording. It is safe to call this more than once."""
        if os.getpid() == self._pid:  # see `flush`
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
        """Yield the event for a span. If the span needs a new lane, first yield the lane's event.

        Spans in one lane must not overlap, because a trace allows only nested spans in a thread.
        """
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
        event = {
            "ph": "X",
            "name": _title(kind, detail),
            "cat": kind,
            "pid": self._device_id,
            "tid": thread,
            "ts": _microseconds(begin_s + self._wall_s),
            "dur": _microseconds(end_s - begin_s),
            "args": detail,
        }
        yield _line(event)

    def _append(self, text: str) -> None:
        try:
            # Do not buffer: a forked child would write the contents of the buffer again.
            with open(self.path, "ab", buffering=0) as file:
                rest = text.encode()
                while rest:  # a nearly full disk accepts one part and refuses the next
                    rest = rest[file.write(rest) :]
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        with self._lock:
            was_closed = self._closed
            self._closed = True
            self._waiting.clear()
        if not was_closed:
            _log.warning("no timeline is recorded in %s: %s", self.path, error)


def _new_file(path: Path) -> Path:
    """Create a new file and return its path.

    This is ``path``, or the first of its numbered variants if that file exists already.
    """
    numbered = (
        path.with_name(f"{path.stem}-{number}{path.suffix}") for number in itertools.count(2)
    )
    for each in itertools.chain([path], numbered):
        with contextlib.suppress(FileExistsError):
            each.touch(exist_ok=False)
            return each
    raise AssertionError("unreachable: there is always another number")


def _digest(name: str) -> int:
    return zlib.crc32(name.encode()) >> 1  # viewers accept 31 bits


def _microseconds(seconds: float) -> float:
    return round(seconds * _MICROSECONDS, 3)


def _title(kind: str, detail: Mapping[str, Detail]) -> str:
    name = kind.replace("_", "-")
    bucket = detail.get("bucket")
    step = detail.get("step")
    if bucket == -1:
        return f"{name} beside the buckets"
    if bucket is not None:
        return f"{name} of bucket {bucket}"
    return name if step is None else f"{name} (step {step})"


def _line(event: Mapping[str, object]) -> str:
    return f"{json.dumps(event)},\n"

"""Emulated devices that run behind the host's back, for ranks of the fault campaign.

`LateEvents` stands for a GPU with IPC events: the host gives a turn back at once, the device ends it later. Time on the
device is computed, not waited for: an event holds when it fires. `LateThread` stands for a device without such
events: a thread of its own tells siblings when the device has ended.
"""

import os
import queue
import struct
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from crossover_ddp._turns.device_order import DeviceOrder, Process
from crossover_ddp._turns.slots import EVENT_COUNT, EVENT_HANDLE_BYTES

_RECORD = struct.Struct("=qd")  # the turn it was recorded in, when it fires


class DeviceTurn(NamedTuple):
    """A turn as the device saw it; seconds of the campaign's clock."""

    turn: int
    begins_s: float
    ends_s: float


class LateEvents(DeviceOrder):
    """A pool of events in files; who opens one sees its last record, as CUDA's waiters do.

    Args:
        directory: where events live, the same for all jobs.
        late_s: how long after the host each turn ends.
        now_s: the campaign's clock.
    """

    def __init__(self, directory: Path, late_s: float, now_s: Callable[[], float]) -> None:
        super().__init__(torch.device("cpu"))
        self._late_s = late_s
        self._now_s = now_s
        self._free_at_s = 0.0
        self._followed_s = 0.0
        self._files: dict[Process, list[int]] = {}
        names = [f"{os.getpid()}-{time.monotonic_ns()}-{number}" for number in range(EVENT_COUNT)]
        self._paths = [directory / name for name in names]
        self._own = [os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600) for path in self._paths]
        for event in self._own:
            os.pwrite(event, _RECORD.pack(0, 0.0), 0)
        self._directory = directory
        self.handles = b"".join(name.encode().ljust(EVENT_HANDLE_BYTES, b"\0") for name in names)
        self.turns: list[DeviceTurn] = []

    def finish(self, turn: int, publish: Callable[[], None], streams: Sequence[Any]) -> None:
        """Record behind what the device has to do, then publish."""
        begins_s = max(self._followed_s, self._free_at_s)
        self._free_at_s = max(self._now_s(), begins_s) + self._late_s
        record = _RECORD.pack(turn, self._free_at_s)
        os.pwrite(self._own[turn % len(self._own)], record, 0)
        self.turns.append(DeviceTurn(turn, begins_s, self._free_at_s))
        publish()

    def follow(
        self, process: Process, handles: bytes, turn: int, wake: Callable[[], None]
    ) -> threading.Event:
        """Let a thread wait for the sibling's last record, which must have happened."""
        if process not in self._files:
            self._files[process] = self._open(handles)
        events = self._files[process]
        recorded, fires_s = _RECORD.unpack(os.pread(events[turn % len(events)], _RECORD.size, 0))
        if recorded < turn:
            raise AssertionError(
                f"expected a wait for a record that has happened, got turn {turn} with {recorded} recorded"
            )
        self._followed_s = max(self._followed_s, fires_s)
        over = threading.Event()
        timer = threading.Timer(fires_s - self._now_s(), lambda: [over.set(), wake()])
        timer.daemon = True
        timer.start()
        return over

    def _open(self, handles: bytes) -> list[int]:
        names = [
            handles[start : start + EVENT_HANDLE_BYTES].rstrip(b"\0").decode(errors="replace")
            for start in range(0, len(handles), EVENT_HANDLE_BYTES)
        ]
        try:
            return [os.open(self._directory / Path(name).name, os.O_RDONLY) for name in names]
        except OSError as error:  # its owner has ended, or the handle is none
            raise RuntimeError(f"CUDA error: invalid resource handle ({error.strerror})") from error

    def close(self) -> None:
        """Destroy the events."""
        for path, event in zip(self._paths, self._own, strict=True):
            path.unlink(missing_ok=True)
            os.close(event)
        self._paths, self._own = [], []
        for events in self._files.values():
            for event in events:
                os.close(event)
        self._files = {}


class LateThread(DeviceOrder):
    """A device whose end of a turn a thread waits for and tells."""

    def __init__(self, late_s: float) -> None:
        super().__init__(torch.device("cpu"))
        self._late_s = late_s
        self._ended: queue.SimpleQueue[tuple[float, Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def finish(self, turn: int, publish: Callable[[], None], streams: Sequence[Any]) -> None:
        """Publish ``late_s`` from now, however many turns are on their way: the device is late, not slow."""
        self._ended.put((time.monotonic() + self._late_s, publish))

    def close(self) -> None:
        """Let the thread tell what is to be told, and end."""
        self._ended.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while (ended := self._ended.get()) is not None:
            due_s, publish = ended
            time.sleep(max(0.0, due_s - time.monotonic()))
            publish()

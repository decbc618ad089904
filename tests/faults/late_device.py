"""Emulated devices that run behind the host's back, for ranks of the fault campaign.

`LateEvents` stands for a GPU with IPC events: the host gives a turn back at once, the device ends it later. Time on the
device is computed, not waited for: an event holds when it fires. `LateThread` stands for a device without such
events: the turns' own thread waits for it.
"""

import os
import struct
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from crossover_ddp._turns.device_order import DeviceOrder, Process
from crossover_ddp._turns.segment import EVENT_HANDLE_BYTES

_RECORD = struct.Struct("=d")  # when it fires


class DeviceTurn(NamedTuple):
    """A turn as the device saw it; seconds of the campaign's clock."""

    begins_s: float
    ends_s: float


class LateDevice(DeviceOrder):
    """A device that is not CUDA's."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))

    def check_usable(self) -> None:
        """Allow all."""

    def streams(self) -> Sequence[Any]:
        """Return none."""
        return ()


class LateEvents(LateDevice):
    """An event in a file; who opens it sees its last record, as CUDA's waiters do.

    Args:
        directory: where events live, the same for all jobs.
        late_s: how long after the host each turn ends.
        now_s: the campaign's clock.
    """

    def __init__(self, directory: Path, late_s: float, now_s: Callable[[], float]) -> None:
        super().__init__()
        self._late_s, self._now_s = late_s, now_s
        self._free_at_s = self._followed_s = 0.0
        name = f"{os.getpid()}-{time.monotonic_ns()}"
        self._directory, self._path = directory, directory / name
        self._path.write_bytes(_RECORD.pack(0.0))
        self.handle = name.encode().ljust(EVENT_HANDLE_BYTES, b"\0")
        self.turns: list[DeviceTurn] = []

    def mark(self, streams: Sequence[Any] = ()) -> None:
        """Record behind what the device has to do."""
        begins_s = max(self._followed_s, self._free_at_s)
        self._free_at_s = max(self._now_s(), begins_s) + self._late_s
        with self._path.open(
            "r+b", buffering=0
        ) as event:  # in one piece: a rank may be stopped at any moment
            event.write(_RECORD.pack(self._free_at_s))
        self.turns.append(DeviceTurn(begins_s, self._free_at_s))

    def follow(self, process: Process, handle: bytes, wake: Callable[[], None]) -> threading.Event:
        """Let a thread wait for the sibling's last record."""
        name = Path(handle.rstrip(b"\0").decode(errors="replace")).name
        try:
            (fires_s,) = _RECORD.unpack((self._directory / name).read_bytes())
        except (OSError, struct.error) as error:  # its owner has ended, or the handle is none
            raise RuntimeError(f"CUDA error: invalid resource handle ({error})") from error
        self._followed_s = max(self._followed_s, fires_s)
        over = threading.Event()
        timer = threading.Timer(max(0.0, fires_s - self._now_s()), lambda: [over.set(), wake()])
        timer.daemon = True
        timer.start()
        return over

    def close(self) -> None:
        """Destroy the event."""
        self._path.unlink(missing_ok=True)


class LateThread(LateDevice):
    """A device for whose end of a turn a thread waits."""

    def __init__(self, late_s: float) -> None:
        super().__init__()
        self._late_s = late_s

    def mark(self, streams: Sequence[Any] = ()) -> Any:
        """Return when the device comes to the end."""
        return time.monotonic() + self._late_s

    def wait(self, end: Any) -> None:
        """Sleep until then."""
        time.sleep(max(0.0, end - time.monotonic()))

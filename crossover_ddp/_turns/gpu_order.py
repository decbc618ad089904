"""What every way of ordering turns on a GPU shares: the end of a turn, late publication, and watching over waits.

[Note: publishing late] A turn is published as soon as its end is *recorded*, and the siblings' devices wait for the
record. A sibling whose device cannot wait for ours says so in its slot (`waits_on_host`). While there is such a
sibling, a turn is published only after its kernels have *finished*, by a thread that waits for them: the hand-over
then takes the time that hosts need to notice, no kernels overlap, and no training thread waits.

[Note: waits that nobody ends] A wait in a stream cannot be taken back. It is enqueued only for a record that a living
process has enqueued before, so it ends when the device reaches that record. One thing can still go wrong:
that process is killed first, and its queue with it. So a thread looks twice a second at each wait that is not over;
what can be done then depends on the way of ordering.
"""

import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple, Protocol

import torch

from crossover_ddp._system.cuda_driver import adopt_thread
from crossover_ddp._system.worker import Worker
from crossover_ddp.errors import UnsupportedConfigurationError

logger = logging.getLogger(__name__)

Key = tuple[int, int]
"""A sibling process: its slot and incarnation."""
Streams = Sequence["torch.cuda.Stream"]

_JOIN_TIMEOUT_S = 10.0
_DRAIN_TIMEOUT_S = 30.0
_DRAIN_STEP_S = 1e-3
_LOOK_S = 0.5
_SETTLE_TIMEOUT_S = 5.0


class SiblingFiles(Protocol):
    """What orders need of the process's place among its siblings; `TurnSegment` provides it."""

    def is_alive(self, slot: int, incarnation: int) -> bool:
        """Return whether that process lives and still has that slot."""

    def make_private_file(self, suffix: str) -> int:
        """Make a file beside the segment's and return its descriptor."""

    def open_private_file(self, suffix: str) -> int:
        """Open a sibling's file beside the segment's."""

    def remove_private_file(self, suffix: str) -> None:
        """Remove a file of the process's own."""


class _Wait(NamedTuple):
    """A wait in a stream that may not be over."""

    key: Key
    over: Callable[[], bool]
    recorder_died: Callable[[], None]


class WaitWatcher:
    """A thread that watches over waits in streams until they are over; see [Note: waits that nobody ends].

    Args:
        device: where the waits are.
        is_alive: returns whether a sibling still lives.
    """

    def __init__(self, device: torch.device, is_alive: Callable[[Key], bool]) -> None:
        self._device = device
        self._is_alive = is_alive
        self._changed = threading.Condition()
        self._waits: list[_Wait] = []
        self._closed = False
        self._thread: threading.Thread | None = None

    def add(self, key: Key, over: Callable[[], bool], recorder_died: Callable[[], None]) -> None:
        """Watch over a wait: call ``recorder_died`` at each look while it is not ``over`` and ``key`` is dead."""
        with self._changed:
            if self._closed:
                return
            self._waits.append(_Wait(key, over, recorder_died))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="crossover-turn-watch", daemon=True)
                self._thread.start()
            self._changed.notify()

    def pending(self, key: Key) -> bool:
        """Return whether a wait for ``key`` may not be over."""
        with self._changed:
            waits = [wait for wait in self._waits if wait.key == key]
        return any(_may_last(wait) for wait in waits)

    def close(self) -> bool:
        """Stop looking when all waits are over, or after 5 s; return whether they are."""
        deadline_s = time.monotonic() + _SETTLE_TIMEOUT_S
        while self._lasting() and time.monotonic() < deadline_s:
            time.sleep(_DRAIN_STEP_S)
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_TIMEOUT_S)
        return not self._lasting()

    def _lasting(self) -> bool:
        with self._changed:
            waits = list(self._waits)
        return any(_may_last(wait) for wait in waits)

    def _run(self) -> None:
        torch.cuda.set_device(self._device)
        adopt_thread()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._waits)
                # Most waits are over by then, and the thread goes back to sleep.
                self._changed.wait_for(lambda: self._closed, timeout=_LOOK_S)
                if self._closed:
                    return
                waits = list(self._waits)
            lasting = {id(wait) for wait in waits if self._lasts(wait)}
            with self._changed:
                looked_at = {id(wait) for wait in waits}
                self._waits = [
                    wait for wait in self._waits if id(wait) in lasting or id(wait) not in looked_at
                ]

    def _lasts(self, wait: _Wait) -> bool:
        try:
            if wait.over():
                return False
            if not self._is_alive(wait.key):
                wait.recorder_died()
        except (
            RuntimeError,
            OSError,
        ) as error:  # the device is broken, or the segment gone: the job will notice
            logger.debug("no longer watches over a wait for %s: %s", wait.key, error)
            return False
        return True


def _may_last(wait: _Wait) -> bool:
    try:
        return not wait.over()
    except RuntimeError:  # the device is broken
        return False


class GpuOrder:
    """A GPU's order of turns; see `crossover_ddp._turns.device_order.DeviceOrder` for what its methods promise."""

    kind: ClassVar[str] = ""
    on_device: ClassVar[bool] = True
    waits_on_host: ClassVar[bool] = False
    _ends_on_one_stream: ClassVar[bool] = False
    """Whether the marks of all turns must come one after the other, whatever streams the turns were on."""
    handles: bytes = b""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._publisher = Worker("crossover-turn-end")
        self._late = 0  # turns given back whose kernels have not finished
        self._lock = threading.Lock()
        self._end_stream: torch.cuda.Stream | None = None

    def check_usable(self) -> None:
        """Raise ``UnsupportedConfigurationError`` while the current stream captures a CUDA graph."""
        if torch.cuda.is_current_stream_capturing():
            raise UnsupportedConfigurationError(
                "expected turns to begin and end outside of a CUDA graph, got a stream that is capturing: a replay "
                "would take no turn; acquire before replay() and release after it"
            )

    def finish(
        self, turn: int, publish: Callable[[], None], *, on_host: bool = False, streams: Streams = ()
    ) -> None:
        """Mark the end, then publish; see [Note: publishing late]."""
        stream = self._end_of_turn(streams)
        self._mark(turn, stream)
        with self._lock:
            # In order: a turn published at once must not overtake one that is published late.
            late = on_host or self.waits_on_host or self._late > 0
            self._late += late
        if late:
            done = torch.cuda.Event(blocking=True)
            done.record(stream)
            self._publisher.put(functools.partial(self._publish_late, done, publish))
        else:
            publish()

    def _end_of_turn(self, streams: Streams) -> "torch.cuda.Stream":
        """Return a stream that reaches its end when the current stream and ``streams`` have reached theirs."""
        current = torch.cuda.current_stream(self._device)
        if not (self._ends_on_one_stream or streams):
            return current
        if self._end_stream is None:
            self._end_stream = torch.cuda.Stream(self._device)
        for stream in (current, *streams):
            self._end_stream.wait_stream(stream)
        return self._end_stream

    def _mark(self, turn: int, stream: "torch.cuda.Stream") -> None:
        """Enqueue what siblings' devices wait for."""

    def _publish_late(self, done: "torch.cuda.Event", publish: Callable[[], None]) -> None:
        torch.cuda.set_device(self._device)
        adopt_thread()
        try:
            done.synchronize()
        except RuntimeError as error:  # nothing of a broken context runs any more; training will see it too
            logger.debug("a turn on %s ended with an error of the device: %s", self._device, error)
        publish()
        with self._lock:
            self._late -= 1

    def admit(self, streams: Streams) -> None:
        """Let ``streams`` wait for what the current stream waits for."""
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream(self._device))

    def follow(self, key: Key, handles: bytes, turn: int) -> str | None:
        """Do nothing: the sibling publishes late."""
        return None

    def close(self) -> None:
        """Let the thread publish the turns that it has, and end."""
        self._publisher.stop()
        self._publisher.join(_JOIN_TIMEOUT_S)


def drained(events: Sequence["torch.cuda.Event"]) -> bool:
    """Wait until the device has reached ``events``; return whether it has within 30 s.

    Not `synchronize`, which has no limit: the own stream may wait for a sibling that is dead.
    """
    deadline_s = time.monotonic() + _DRAIN_TIMEOUT_S
    for event in events:
        while not event.query():
            if time.monotonic() > deadline_s:
                logger.warning(
                    "the device is still busy %.0f s after the last turn; this job leaves its siblings nevertheless",
                    _DRAIN_TIMEOUT_S,
                )
                return False
            time.sleep(_DRAIN_STEP_S)
    return True

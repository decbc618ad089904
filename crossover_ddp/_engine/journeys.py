"""Coroutines that go from thread to thread, and the devices that their work is issued on.

A journey runs on the thread that starts it until it awaits something that it cannot have at once. What it awaits keeps
the rest of it, and lets it go on later, on a thread of its own choice.

[Note: threads] What belongs to a thread (grad mode, a stream, a lock) may not be held by a ``with`` around an
``await``: it would be entered on one thread and left on another. `Journey` enters it around each piece of the way.

"""

import functools
import math
import threading
import time
import types
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
import torch.distributed as dist

from crossover_ddp._system.worker import Job, Worker

GradientFuture = torch.futures.Future[torch.Tensor]
Begin = Callable[[], Awaitable[None]]
Stop = Callable[[Job], None]
"""What a coroutine yields: it is given the rest, and has it called once."""
Stops = Generator[Stop, None, None]
_AS_IT_IS: Final = nullcontext()


class Station(Worker):
    """A daemon thread where journeys go on, first come first served."""

    def __await__(self) -> Stops:
        """Go on here. Raises ``RuntimeError`` if the thread takes no more work."""
        yield self.put


def stop_all(stations: Sequence[Station], timeout_s: float) -> bool:
    """End all threads after what they have; return whether each did in ``timeout_s`` seconds.

    A thread that takes longer still ends the next one when it ends itself. One that gives work to another comes before.
    """
    stop: Job = nothing
    for station in reversed(stations):
        stop = functools.partial(station.stop, stop)
    stop()
    return all(station.join(timeout_s) for station in stations)


class Gate:
    """Where journeys wait until it is opened, once, on whatever thread; there they go on, the latest one first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[Job] = []
        self.is_open = False

    def __await__(self) -> Stops:
        yield self._put

    @types.coroutine
    def passed_first(self) -> Stops:
        """Open it, and go on before all that wait."""

        def put_and_open(go_on: Job) -> None:
            self._put(go_on)
            self.open()

        yield put_and_open

    def open(self) -> None:
        """Let all go on that wait, and all later ones at once. May be called again."""
        with self._lock:
            self.is_open = True
            waiting, self._waiting = self._waiting, []
        for go_on in reversed(waiting):
            go_on()

    def _put(self, go_on: Job) -> None:
        with self._lock:
            if is_closed := not self.is_open:
                self._waiting.append(go_on)
        if not is_closed:
            go_on()


class Journey:
    """One coroutine on its way. At most one thread runs it at a time.

    Args:
        way: awaits nothing but stations, gates, and coroutines made of these.
        ended: called once, on the thread of its last piece, with what it raised, or None.
        where: makes the context of each piece of the way. Not by `contextlib.contextmanager`: a coroutine ends with a
            StopIteration, which a generator may not let through.
        launched: called once, on the thread that starts the journey, outside of ``where``, after the first piece and
            before another thread hears of it.
    """

    def __init__(
        self,
        way: Coroutine[Any, None, None],
        ended: Callable[[BaseException | None], None],
        where: Callable[[], AbstractContextManager[object]],
        launched: Callable[[], None] | None = None,
    ) -> None:
        self._way, self._ended, self._where, self._launched = way, ended, where, launched
        self._lock = threading.Lock()
        self._is_parked = True  # nobody runs it; who makes this False does
        self._doom: BaseException | None = None

    def go_on(self) -> None:
        """Run to the next stop, on this thread. Does nothing if something was thrown into it meanwhile."""
        if self._claim():
            self._run()

    def throw(self, error: BaseException) -> None:
        """Have ``error`` raised where the journey is: at once if nobody runs it, else at its next stop."""
        if self._claim(error):
            self._run()

    def _claim(self, doom: BaseException | None = None) -> bool:
        with self._lock:
            self._doom = self._doom or doom
            claimed, self._is_parked = self._is_parked, False
            return claimed

    def _run(self) -> None:
        while True:
            try:
                with self._where():
                    stop = self._way.send(None) if self._doom is None else self._way.throw(self._doom)
            except StopIteration:
                self._launch()
                self._ended(None)
                return
            except BaseException as error:
                self._launch()
                self._ended(error)
                if isinstance(error, Exception):
                    return
                raise  # Ctrl-C, on the training thread
            self._launch()
            if self._park():
                try:
                    stop(self.go_on)
                    return
                except Exception as error:  # its thread has ended, so that nobody will
                    if not self._claim(error):
                        return

    def _launch(self) -> None:
        launched, self._launched = self._launched, None
        if launched is not None:
            launched()

    def _park(self) -> bool:
        with self._lock:
            self._is_parked = self._doom is None
            return self._is_parked


class Meter:
    """What has travelled for one hook, and for how long the program has waited, see docs/choosing.md.

    ``under_way_s``: in which any journey was under way. ``is_timed``: whether the host sees when journeys end.
    """

    def __init__(self) -> None:
        self.steps = self.bytes_sent = self._count = 0
        self.under_way_s = self.exposed_s = 0.0
        self.is_timed, self.is_told = True, False
        self._since_s = math.inf

    def begin(self) -> None:
        """Count a journey that begins. One call at a time, as of `end`."""
        self._count += 1

    def end(self, begun_s: float, end_s: float, sent_bytes: int) -> None:
        """Count a journey that has ended."""
        self.bytes_sent += sent_bytes
        self._count -= 1
        self._since_s = min(self._since_s, begun_s)
        if not self._count:
            self.under_way_s += max(0.0, end_s - self._since_s)
            self._since_s = math.inf


class Milestone:
    """A place on a journey's way that the program waits for.

    ``waits``: counts for how long.
    """

    waits: Meter | None = None

    def __init__(self) -> None:
        self._arrived = threading.Event()
        self._error: BaseException | None = None
        self._follow: Callable[[], None] | None = None

    def wait(self) -> None:
        """Block until it is reached; on a device order what the caller does behind it. May be called again.

        Raises what has ended the journeys of the group, if anything has.
        """
        since_s = time.monotonic()
        self._arrived.wait()
        if self.waits is not None:
            self.waits.exposed_s += time.monotonic() - since_s
        if self._error is not None:
            raise self._error.with_traceback(None)
        if self._follow is not None:
            self._follow()

    def reach(self, error: BaseException | None, follow: Callable[[], None]) -> None:
        """Let nobody wait any more; what comes first counts."""
        if not self._arrived.is_set():
            self._error, self._follow = error, follow
            self._arrived.set()


class Trip(Milestone):
    """A journey under way; its end is what is waited for.

    Args:
        name: of what travels, in errors.
        deferred: the program goes on without it; other ranks may need it although this one ends.

    ``meter``: counts what travels, as ``sent`` tells. ``begun_s``: when that was there, on a device, too.
    """

    def __init__(self, name: str, *, deferred: bool = False) -> None:
        super().__init__()
        self.name, self.deferred = name, deferred
        self.journey: Journey | None = None
        self.meter: Meter | None = None
        self.sent: Callable[[], int] = int
        self.begun_s = math.inf

    def begins(self) -> None:
        """Note that what travels is there."""
        self.begun_s = time.monotonic()

    def ends(self, end_s: float) -> None:
        """Count what has travelled until this moment; one call at a time of a meter."""
        if self.meter is not None:
            self.meter.end(self.begun_s, end_s, self.sent())

    def end(self, error: BaseException | None, follow: Callable[[], None]) -> None:
        self.journey = None  # no cycle that keeps its tensors
        self.reach(error, follow)


class Place:
    """Where the tensors of journeys are: a CPU, where what has been called has been done."""

    def follow(self) -> Begin:
        """Note, on the thread that starts a journey, what it comes after; it awaits what the result returns."""
        return at_once

    def side(self) -> AbstractContextManager[object]:
        return _AS_IT_IS

    def mark(self) -> Callable[[], None]:
        """Return what orders its caller's work behind all that journeys have issued until now."""
        return nothing

    def reached(self) -> Callable[[], None]:
        """Return what blocks until all that journeys have issued until now is done."""
        return nothing

    def future(self) -> GradientFuture:
        """Make a Future; who waits for it is ordered behind what the stream that completes it has been given."""
        return GradientFuture()

    def adopt_thread(self) -> None:
        """Make the calling thread, which is ours, fit for journeys: gradients are not recorded there."""
        torch.set_grad_enabled(False)

    def close(self, timeout_s: float) -> bool:
        """End threads; return whether they did in time."""
        return True


def living(group: "weakref.ref[dist.ProcessGroup]") -> dist.ProcessGroup:
    if (found := group()) is None:
        raise RuntimeError("the process group was destroyed while an exchange was under way")
    return found


async def at_once() -> None:
    return None


def nothing() -> None:
    """Do nothing."""

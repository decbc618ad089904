"""Coroutines that go from thread to thread, and the devices that their work is issued on.

A journey runs on the thread that starts it until it awaits something that it cannot have at once. What it awaits keeps
the rest of it, and lets it go on later, on a thread of its own choice.

[Note: threads] What belongs to a thread (grad mode, a stream, a lock) may not be held by a ``with`` around an
``await``: it would be entered on one thread and left on another. `Trip` enters it around each piece of the way.
"""

import functools
import math
import threading
import time
import types
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch import Tensor

from crossover_ddp._ddp.compiled import Function, uncompiled
from crossover_ddp._system.worker import Job, Worker

GradientFuture = torch.futures.Future[torch.Tensor]
Begin = Callable[[], Awaitable[None]]
Way = Coroutine[Any, Any, None]
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
        if not self.is_open:  # or who passes many would go on within himself each time
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


class Meter:
    """What has travelled for one hook, and for how long the program has waited, see docs/troubleshooting.md.

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
        self.bytes_sent += sent_bytes
        self._count -= 1
        self._since_s = min(self._since_s, begun_s)
        if not self._count:
            self.under_way_s += max(0.0, end_s - self._since_s)
            self._since_s = math.inf


class Milestone:
    """A place on a journey's way that the program waits for; ``waits`` counts for how long."""

    waits: Meter | None = None
    _is_followed = False

    def __init__(self) -> None:
        self._is_reached, self._away = (
            False,
            threading.Lock(),
        )  # held until then; an Event costs ten times as much
        self._away.acquire()
        self._error: BaseException | None = None
        self._follow: Callable[[], None] = nothing

    def wait(self) -> None:
        """Block until it is reached; on a device order what the caller does behind it. May be called again.

        Raises what has ended the journeys of the group, if anything has.
        """
        since_s = time.monotonic()
        self.block()
        if self.waits is not None:
            self.waits.exposed_s += time.monotonic() - since_s
        if self._error is not None:
            raise self._error.with_traceback(None)
        self._follow()
        self._is_followed = True

    def block(self, timeout_s: float = -1) -> None:
        """Block until it is reached, or ``timeout_s`` is over; -1: without a bound."""
        # A signal's handler may wait, too, in the moment when this holds the lock.
        if not self._is_reached and self._away.acquire(timeout=timeout_s):
            self._away.release()

    def reach(self, error: BaseException | None, follow: Callable[[], None]) -> None:
        """Let nobody wait any more; what comes first counts."""
        if not self._is_reached:
            self._error, self._follow, self._is_reached = error, follow, True
            self._away.release()


class Trip(Milestone):
    """A journey under way: one coroutine, which one thread runs at a time. Its end is what is waited for.

    Args:
        name: of what travels, in errors.
        place: of its tensors; each piece of the way is issued there.
        sent: returns how many bytes have been sent since it was called before.
        deferred: the program goes on without it; other ranks may need it although this one ends.

    ``tensor``: memory that it writes, which lives as long; None: a bucket's. ``meter``: counts what travels.
    ``begun_s``: when that was there, on a device, too. ``done_s``: when nothing travelled any more, if it waits for
    something else then.
    """

    tensor: Tensor | None = None
    meter: Meter | None = None
    begun_s = math.inf
    done_s: float | None = None

    def __init__(
        self, name: str, place: "Place", sent: Callable[[], int] = int, *, deferred: bool = False
    ) -> None:
        super().__init__()
        self.name, self.place, self.deferred, self.sent = name, place, deferred, sent
        self._lock = threading.Lock()
        self._order = place.here()
        self._is_parked = (
            False  # nobody runs it; who makes this False does, first of all who starts it
        )
        self._doom: BaseException | None = None

    def start(
        self,
        begin: Begin,
        way: Way,
        then: Begin,
        ended: Callable[["Trip", BaseException | None], None],
    ) -> None:
        """Run what ``begin`` returns, ``way``, and what ``then`` returns, to the first stop.

        ``way`` awaits nothing but stations, gates, and coroutines made of these. ``ended`` is called once, on the
        thread of the last piece, with what that raised, or None. It must not hold the trip, whose tensors would wait
        for Python's collector then.
        """
        self._way, self._ended = self._whole(begin, way, then), ended
        self._run()

    async def _whole(self, begin: Begin, way: Way, then: Begin) -> None:
        try:
            await begin()
        except BaseException:
            way.close()
            raise
        self.begun_s = time.monotonic()
        await way
        await then()

    def go_on(self) -> None:
        """Run to the next stop, on this thread. Does nothing if something was thrown into it meanwhile."""
        if self._claim():
            self._run()

    def throw(self, error: BaseException) -> None:
        """Have ``error`` raised where the journey is: at once if nobody runs it, else at its next stop."""
        if self._claim(error):
            self._run()

    def __del__(self) -> None:
        """What has its memory next comes behind it, if nobody has waited for it."""
        writes = self.tensor is None or self.tensor.numel()
        if writes and not self._is_followed and self._error is None:
            with suppress(
                Exception
            ):  # at the end of a process, or in a fork: nobody has that memory next
                self._order(self._follow)

    def _claim(self, doom: BaseException | None = None) -> bool:
        with self._lock:
            self._doom = self._doom or doom
            claimed, self._is_parked = self._is_parked, False
            return claimed

    def _run(self) -> None:
        while True:
            try:
                with self.place.side():
                    stop = (
                        self._way.send(None) if self._doom is None else self._way.throw(self._doom)
                    )
            except StopIteration:
                self._ended(self, None)
                return
            except BaseException as error:
                self._ended(self, error)
                if isinstance(error, Exception):
                    return
                raise  # Ctrl-C, on the training thread
            self.launched()
            with self._lock:
                is_parked = self._is_parked = self._doom is None
            if is_parked:
                try:
                    stop(self.go_on)
                    return
                except Exception as error:  # its thread has ended, so that nobody will
                    if not self._claim(error):
                        return

    def launched(self) -> None:
        """Hear that a piece of the way has been issued, before another thread does."""

    def end(self, error: BaseException | None) -> None:
        """Let nobody wait any more. Raises if the device is lost, without an ``error`` only."""
        self.reach(error, self.place.mark() if error is None else nothing)


class Place:
    """Where the tensors of journeys are: a CPU, where what has been called has been done."""

    def follow(self) -> Begin:
        """Note, on the thread that starts a journey, what it comes after; it awaits what the result returns."""
        return at_once

    def here(self) -> Callable[[Callable[[], None]], None]:
        """Return what calls a function as if by the caller's stream, on any thread."""
        return lambda follow: None

    def side(self) -> AbstractContextManager[object]:
        """Return what is around each piece of a way.

        Not made by `contextlib.contextmanager`: a coroutine ends with a StopIteration, which a generator may not let
        through.
        """
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


def uncompiled_when_called(function: Function) -> Function:
    """Keep dynamo out of ``function``, which compiled code may call through ``backward()``.

    For functions of a module: `uncompiled` loads dynamo, which takes seconds; DDP has loaded it by the first call.
    """
    made: list[Function] = []

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not made:
            made.append(uncompiled(function))
        return made[0](*args, **kwargs)

    return cast(Function, call)


def nothing() -> None:
    """Do nothing."""

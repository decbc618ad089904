"""Journeys: coroutines that threads resume, and the devices that their work is issued on.

A journey runs on the thread that starts it until it awaits something that is not there yet. The awaitable
stores the continuation, and calls it later on a thread of its own choice.

[Note: threads] Thread-local context (grad mode, a stream, a lock) must not be held by a ``with`` around an
``await``: it would be entered on one thread and left on another. `Journey` enters it around each segment.
"""

import functools
import os
import queue
import threading
import time
import types
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Final, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from crossover_ddp._ddp.compiled import Function, uncompiled

GradientFuture = torch.futures.Future[torch.Tensor]
Begin = Callable[[], Awaitable[None]]
JourneyCoroutine = Coroutine[Any, Any, None]
Job = Callable[[], None]
Stop = Callable[[Job], None]
"""A coroutine yields one of these: it receives the continuation and must call it exactly once."""
Stops = Generator[Stop, None, None]

_NO_CONTEXT: Final = nullcontext()
_STOP: Final = None


# --- threads and gates ----------------------------------------------------------------------------


class JourneyThread:
    """A daemon thread that runs jobs in order, started by the first of them. Journeys await it.

    Between jobs the thread holds only its queue, so it keeps no engine and no process group alive. It
    blocks on the queue and never polls.

    Args:
        name: of the thread, as debuggers show it.
        adopt: called on the thread before the first job.
    """

    def __init__(self, name: str, adopt: Job = lambda: None) -> None:
        self._name = name
        self._adopt = adopt
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopped = False
        self._pid = os.getpid()

    def __await__(self) -> Stops:
        """Resume on this thread. Raises ``RuntimeError`` if it takes no more jobs."""
        yield self.put

    def put(self, job: Job) -> None:
        """Queue ``job``, which must not raise. Raises ``RuntimeError`` after `stop` and in a fork."""
        if os.getpid() != self._pid:  # the lock may be held forever there
            raise RuntimeError(
                f"thread {self._name} takes no more work: this process is a fork of its owner"
            )
        with self._lock:
            if self._stopped:
                raise RuntimeError(f"thread {self._name} takes no more work: it was closed")
            if self._thread is None:
                work = (self._jobs, self._adopt)
                self._thread = threading.Thread(
                    target=_run_jobs, args=work, name=self._name, daemon=True
                )
                self._thread.start()
            self._jobs.put(job)

    def stop(self, then: Job | None = None) -> None:
        """Take no more jobs. The thread ends after its queued jobs and the first call's ``then``.

        May be called again, and in a fork.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
            has_thread = self._thread is not None
            if has_thread:
                if then is not None:
                    self._jobs.put(then)
                self._jobs.put(_STOP)
        if not has_thread and then is not None:
            then()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread to end after `stop`. Returns whether it has."""
        thread = self._thread
        if thread is None or thread is threading.current_thread() or os.getpid() != self._pid:
            return True
        thread.join(timeout_s)
        return not thread.is_alive()


def _run_jobs(jobs: "queue.SimpleQueue[Job | None]", adopt: Job) -> None:
    # torch.set_num_threads() on the main thread reaches another thread only with that thread's first
    # parallel kernel. Until then a matrix product may be divided, and so rounded, differently.
    # Asking for the number applies it.
    torch.get_num_threads()
    adopt()
    del adopt
    while (job := jobs.get()) is not _STOP:
        job()
        # Otherwise the last job would keep its bucket, engine and group alive while the queue is empty.
        del job


def stop_all(stations: Sequence[JourneyThread], timeout_s: float) -> bool:
    """Stop threads after their queued jobs. Returns whether each ended within ``timeout_s`` seconds.

    Args:
        stations: a thread that gives jobs to another one stands before it. A thread that takes longer
            than the timeout still stops the next one when it ends.
        timeout_s: for each thread.
    """
    stop: Job = nothing
    for station in reversed(stations):
        stop = functools.partial(station.stop, stop)
    stop()
    return all(station.join(timeout_s) for station in stations)


class Gate:
    """A one-shot gate. Journeys that await it resume on the thread that opens it, in LIFO order."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[Job] = []
        self.is_open = False

    def __await__(self) -> Stops:
        # Yielding at an open gate would nest one `Journey._run` per gate and overflow the stack.
        if not self.is_open:
            yield self._put

    @types.coroutine
    def passed_first(self) -> Stops:
        """Open the gate, and resume before all journeys that wait for it."""

        def put_and_open(go_on: Job) -> None:
            self._put(go_on)
            self.open()

        yield put_and_open

    def open(self) -> None:
        """Resume all waiting journeys; later ones do not wait. May be called again."""
        with self._lock:
            self.is_open = True
            waiting = self._waiting
            self._waiting = []
        for go_on in reversed(waiting):
            go_on()

    def _put(self, go_on: Job) -> None:
        with self._lock:
            is_closed = not self.is_open
            if is_closed:
                self._waiting.append(go_on)
        if not is_closed:
            go_on()


# --- journeys -------------------------------------------------------------------------------------


class WaitCounter(Protocol):
    """Counts how long the program has waited for journeys, in seconds."""

    exposed_s: float


class Observer(Protocol):
    """Is told when journeys begin and end. Calls come one at a time, under a lock: they must not block."""

    def begins(self, journey: "Journey") -> None: ...

    def ends(self, journey: "Journey", end_s: float, failure: BaseException | None) -> None:
        """The journey has ended; ``end_s``: when its last collective did."""


class Completion:
    """An event that the program waits for: a journey's end, or a point on its coroutine."""

    waits: WaitCounter | None = None  # counts the time that callers of `wait` spend there
    _is_followed = False  # whether a caller's stream has been ordered behind the event

    def __init__(self) -> None:
        self._is_reached = False
        # Held until the event: a threading.Event costs ten times as much.
        self._away = threading.Lock()
        self._away.acquire()
        self._error: BaseException | None = None
        self._follow: Callable[[], None] = nothing

    def wait(self) -> None:
        """Block until the event. On a device the caller's later work is ordered behind it.

        May be called again. Raises the failure of the process group if there was one.
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
        """Block until the event, at most ``timeout_s`` seconds; -1 is without a bound."""
        # A signal handler may wait as well, just when this thread holds the lock: it is released at once.
        if not self._is_reached and self._away.acquire(timeout=timeout_s):
            self._away.release()

    def reach(self, error: BaseException | None, follow: Callable[[], None]) -> None:
        """Release all waiters. The first call counts.

        Args:
            error: what `wait` raises; None: the event has happened.
            follow: orders its caller's stream behind the event.
        """
        if not self._is_reached:
            self._error = error
            self._follow = follow
            self._is_reached = True
            self._away.release()


class Journey(Completion):
    """A journey: one coroutine, which one thread runs at a time. Its end is the event to wait for.

    Args:
        name: of the tensor that travels, for errors.
        place: the device of the tensor; each segment of the coroutine is issued there.
        sent: returns the bytes sent since its last call.
        deferred: the program goes on without it. Other ranks may need it although this rank ends.
    """

    # Memory that the journey writes, kept alive until it ends. None: a bucket of DDP.
    tensor: Tensor | None = None
    # `time.monotonic()` when the tensor was computed, on a device as well.
    begun_s = float("inf")
    # When the last collective ended, if the journey then waits for something else.
    done_s: float | None = None
    # Set by the exchange that starts it.
    observers: Sequence[Observer] = ()
    when_computed: Begin | None = None

    def __init__(
        self,
        name: str,
        place: "Place",
        sent: Callable[[], int] = int,
        *,
        deferred: bool = False,
    ) -> None:
        super().__init__()
        self.name = name
        self.place = place
        self.deferred = deferred
        self.sent = sent
        self._lock = threading.Lock()
        self.as_starter = place.here()
        # True while parked. The thread that flips it to False owns the next run.
        self._is_parked = False
        self._doom: BaseException | None = None  # thrown into the coroutine at its next stop

    async def computed(self) -> None:
        """Wait until the device has computed the tensor. On a CPU it has; on NCCL the stream waits."""
        if self.when_computed is not None:
            when_computed = self.when_computed
            self.when_computed = None
            await when_computed()
            self.begun_s = time.monotonic()

    def start(
        self, coroutine: JourneyCoroutine, ended: Callable[["Journey", BaseException | None], None]
    ) -> None:
        """Run ``coroutine`` to its first stop.

        Args:
            coroutine: awaits nothing but stations, gates, and coroutines made of these.
            ended: called once on the thread of the last segment, with the error that it raised, or None. It
                must not hold the journey, or its tensors would live until Python's collector runs.
        """
        self._way = coroutine
        self._ended = ended
        self._run()

    def go_on(self) -> None:
        """Run to the next stop on this thread. No-op if an error was thrown into it meanwhile."""
        if self._claim():
            self._run()

    def throw(self, error: BaseException) -> None:
        """Raise ``error`` inside the coroutine: at once if it is parked, else at its next stop."""
        if self._claim(error):
            self._run()

    def __del__(self) -> None:
        """If nobody waited for it, make the next user of its memory wait for the device."""
        writes = self.tensor is None or self.tensor.numel()
        if writes and not self._is_followed and self._error is None:
            # At the end of a process and in a fork there is no next user.
            with suppress(Exception):
                self.as_starter(self._follow)

    def _claim(self, doom: BaseException | None = None) -> bool:
        with self._lock:
            self._doom = self._doom or doom
            claimed = self._is_parked
            self._is_parked = False
            return claimed

    def _run(self) -> None:
        while True:
            try:
                with self.place.side():
                    if self._doom is None:
                        stop = self._way.send(None)
                    else:
                        stop = self._way.throw(self._doom)
            except StopIteration:
                self._ended(self, None)
                return
            except BaseException as error:
                self._ended(self, error)
                if isinstance(error, Exception):
                    return
                raise  # Ctrl-C on the training thread
            with self._lock:
                self._is_parked = self._doom is None
                is_parked = self._is_parked
            if is_parked:
                try:
                    stop(self.go_on)
                    return
                except Exception as error:  # the thread that should resume it has ended
                    if not self._claim(error):
                        return

    def end(self, error: BaseException | None) -> None:
        """Release all waiters. Raises if the device is lost and there is no ``error``."""
        self.reach(error, self.place.mark() if error is None else nothing)


# --- devices --------------------------------------------------------------------------------------


class Place:
    """The device of a journey's tensors. This one is a CPU, where a call returns when its work is done."""

    def follow(self) -> Begin:
        """Called on the thread that starts a journey, behind the work that computes its tensor.

        Returns a function whose awaitable ends when that work is done.
        """
        return at_once

    def here(self) -> Callable[[Callable[[], None]], None]:
        """Return a function that runs a callback on the caller's current stream, from any thread."""
        return _call

    def side(self) -> AbstractContextManager[object]:
        """Return the context manager entered around each segment of a journey.

        It is not made by `contextlib.contextmanager`: a coroutine ends with a StopIteration, which a
        generator may not let through.
        """
        return _NO_CONTEXT

    def mark(self) -> Callable[[], None]:
        """Return a function that orders its caller's work behind all that journeys have issued so far."""
        return nothing

    def reached(self) -> Callable[[], None]:
        """Return a function that blocks until all that journeys have issued so far is done."""
        return nothing

    def future(self) -> GradientFuture:
        """Make a Future. Its waiter is ordered behind the work of the stream that completes it."""
        return GradientFuture()

    def adopt_thread(self) -> None:
        """Prepare the calling thread, which is ours, for journeys: gradients are not recorded there."""
        torch.set_grad_enabled(False)

    def close(self, timeout_s: float) -> bool:
        """Stop the threads of the device. Returns whether they ended within ``timeout_s`` seconds."""
        return True


def _call(callback: Callable[[], None]) -> None:
    callback()


def living(group: "weakref.ref[dist.ProcessGroup]") -> dist.ProcessGroup:
    """Return the process group. Raises ``RuntimeError`` if it was destroyed."""
    if (found := group()) is None:
        raise RuntimeError("the process group was destroyed while an exchange was under coroutine")
    return found


async def at_once() -> None:
    """Wait for nothing."""


def uncompiled_when_called(function: Function) -> Function:
    """Keep dynamo out of ``function``, which compiled code may call through ``backward()``.

    For functions of a module. `uncompiled` loads dynamo, which takes seconds; DDP has loaded it by the
    first call.
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

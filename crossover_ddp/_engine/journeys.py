"""Journeys: coroutines that threads resume, and the devices that their work is issued on.

A journey runs on the thread that starts it until it awaits something that is not ready. The
awaitable stores the continuation, and later calls it on a thread of its own choice.

[Note: threads] A ``with`` around an ``await`` must not hold thread-local context (grad mode, a
stream, a lock): it would be entered on one thread and left on another. `Journey` enters it around
each segment.
"""

import enum
import functools
import os
import queue
import threading
import time
import types
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
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
"""A coroutine yields a function that gets the continuation, and must call it exactly once."""
Stops = Generator[Stop, None, None]

_NO_CONTEXT: Final = nullcontext()
_STOP: Final = None


@contextmanager
def outside_of_autograd() -> Iterator[None]:
    """Record no gradients, and make tensors that other threads may write to.

    User code may call a method in inference mode, whose tensors cannot be written elsewhere.
    """
    # Most journeys start in backward, where neither is in force.
    if not torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


# --- threads and gates ----------------------------------------------------------------------------


class JourneyThread:
    """A daemon thread that runs jobs in order. A journey awaits it to resume there.

    The first job starts the thread. Between jobs the thread holds only its queue, so it keeps no
    engine and no process group alive. It blocks on the queue and never polls.

    Args:
        name: the thread's name, as debuggers show it.
        adopt: a function to call on the thread before the first job.
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
        """Resume on this thread. Raises ``RuntimeError`` if the thread takes no more jobs."""
        yield self.put

    def put(self, job: Job) -> None:
        """Queue ``job``, which must not raise. Raises ``RuntimeError`` after `stop` and in a fork."""
        if os.getpid() != self._pid:  # in a fork the lock may be held forever
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
        """Take no more jobs. The thread ends after its queued jobs, with ``then`` as its last job.

        It is safe to call it more than once, and in a fork. Only the first call's ``then`` runs.
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
        """Wait for the thread to end after `stop`, and return whether it has ended."""
        thread = self._thread
        if thread is None or thread is threading.current_thread() or os.getpid() != self._pid:
            return True
        thread.join(timeout_s)
        return not thread.is_alive()


def _run_jobs(jobs: "queue.SimpleQueue[Job | None]", adopt: Job) -> None:
    # torch.set_num_threads() on the main thread reaches another thread only with that thread's
    # first parallel kernel. Until then a matrix product may be divided, and so rounded,
    # differently. Asking for the number applies it.
    torch.get_num_threads()
    adopt()
    del adopt
    while (job := jobs.get()) is not _STOP:
        job()
        # Otherwise the last job would keep its bucket, its engine and its group alive while the
        # queue is empty.
        del job


def stop_all(stations: Sequence[JourneyThread], timeout_s: float) -> bool:
    """Stop threads after their queued jobs, and return whether all of them ended in time.

    Args:
        stations: the threads. A thread that gives jobs to another one must come first. If it takes
            longer than the timeout, it still stops the next thread when it ends.
        timeout_s: the number of seconds to wait for each thread.
    """
    stop: Job = nothing
    for station in reversed(stations):
        stop = functools.partial(station.stop, stop)
    stop()
    return all(station.join(timeout_s) for station in stations)


class Gate:
    """A gate that opens once. Journeys that await it resume on the thread that opens it.

    They resume in LIFO order.
    """

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
        """Open the gate, and resume ahead of all journeys that wait for it."""

        def put_and_open(go_on: Job) -> None:
            self._put(go_on)
            self.open()

        yield put_and_open

    def open(self) -> None:
        """Resume all waiting journeys. Later journeys do not wait.

        It is safe to call it more than once.
        """
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
    """An object that observes when journeys begin and end.

    The exchange calls it under a lock, one call at a time, so the methods must not block.
    """

    def begins(self, journey: "Journey") -> None: ...

    def ends(self, journey: "Journey", end_s: float, failure: BaseException | None) -> None:
        """Note that the journey has ended. ``end_s`` is the time when its last collective ended."""


class Completion:
    """An event that the program waits for: the end of a journey, or a point in its coroutine."""

    waits: WaitCounter | None = None  # counts the time that callers of `wait` spend there
    _is_followed = False  # whether a caller's stream has been ordered behind the event

    def __init__(self) -> None:
        self._is_reached = False
        # This lock is held until the event. A threading.Event costs ten times as much.
        self._away = threading.Lock()
        self._away.acquire()
        self._error: BaseException | None = None
        self._follow: Callable[[], None] = nothing

    def wait(self) -> None:
        """Block until the event has happened. On a device, order the caller's later work behind it.

        It is safe to call it more than once. If the process group has failed, it raises that
        failure.
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
        """Block until the event has happened, or for ``timeout_s`` seconds; -1 means no limit."""
        # A signal handler may wait too, just while this thread holds the lock. So it is released at
        # once.
        if not self._is_reached and self._away.acquire(timeout=timeout_s):
            self._away.release()

    def reach(self, error: BaseException | None, follow: Callable[[], None]) -> None:
        """Release all waiters. Only the first call counts.

        Args:
            error: the error that `wait` is to raise; None if the event has happened.
            follow: a function that orders its caller's stream behind the event.
        """
        if not self._is_reached:
            self._error = error
            self._follow = follow
            self._is_reached = True
            self._away.release()


class Phase(enum.Enum):
    """The phases of a journey. Only `Journey._enter` changes the phase."""

    # The coroutine has not run yet. This is the first phase.
    NEW = enum.auto()
    # Entered when the journey starts, and by the thread that resumes it. That thread runs the
    # coroutine.
    RUNNING = enum.auto()
    # Entered when the coroutine awaits something that is not ready. No thread runs the coroutine,
    # and the first thread that makes the journey leave this phase runs it next.
    STOPPED = enum.auto()
    # Entered when the journey is to fail. From now on each stop raises the error inside the
    # coroutine, which may still clean up.
    DOOMED = enum.auto()
    # Entered when the coroutine has returned or raised, or will never run. Never left.
    ENDED = enum.auto()


# Python 3.11 looks up a member of an enum by a Python function, which is slow where each bucket
# compares several.
_NEW, _RUNNING, _STOPPED, _DOOMED, _ENDED = Phase


class Journey(Completion):
    """One coroutine, which one thread at a time runs. Its end is the event to wait for.

    Args:
        name: the name of the tensor that travels, for error messages.
        place: the device of the tensor. Each segment of the coroutine issues its work there.
        sent: a function that returns the number of bytes sent since its previous call.
        deferred: whether the program continues without waiting. Other ranks may then still need the
            journey when this rank ends.
    """

    # The memory that the journey writes, kept alive until it ends. None for a bucket of DDP.
    tensor: Tensor | None = None
    # The `time.monotonic()` at which the tensor had been computed, also on a device.
    begun_s = float("inf")
    # The time when the last collective ended, if the journey then waits for something else.
    done_s: float | None = None
    # The exchange that starts the journey sets these two.
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
        self._phase = _NEW
        self._doom: BaseException | None = None  # the error of a doomed journey

    async def computed(self) -> None:
        """Wait until the device has computed the tensor.

        On a CPU that is already the case. On NCCL the stream waits instead of the host.
        """
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
            coroutine: a coroutine that awaits only threads, gates, and coroutines made of these.
            ended: a function that is called once, on the thread of the last segment, with the error
                that the coroutine raised or None. It must not hold the journey; otherwise the
                journey's tensors would live until Python's collector runs.
        """
        self._coroutine = coroutine
        self._ended = ended
        self._enter(_RUNNING)
        self._run()

    def go_on(self) -> None:
        """Run to the next stop on this thread, unless `throw` has run the journey meanwhile."""
        if self._enter(_RUNNING) is _STOPPED:
            self._run()

    def throw(self, error: BaseException) -> None:
        """Raise ``error`` inside the coroutine: at once if it is stopped, else at its next stop."""
        if self._enter(_DOOMED, error) is _STOPPED:
            self._run()

    def __del__(self) -> None:
        """Order the starter's stream behind the journey, unless a thread has waited for it.

        Then the next user of the memory waits for the device.
        """
        writes = self.tensor is None or self.tensor.numel()
        if writes and not self._is_followed and self._error is None:
            # At the end of a process, or in a fork, there is no next user.
            with suppress(Exception):
                self.as_starter(self._follow)

    def _enter(self, phase: Phase, doom: BaseException | None = None) -> Phase:
        """Enter ``phase`` if it may follow the current phase. Return the former phase.

        An ended journey stays as it is, and a doomed one can only end. If the former phase is
        STOPPED, the calling thread must run the coroutine.
        """
        with self._lock:
            former = self._phase
            if former is _ENDED or (former is _DOOMED and phase is not _ENDED):
                return former
            self._phase = phase
            self._doom = doom
            return former

    def _run(self) -> None:
        while True:
            try:
                with self.place.side():
                    if self._doom is None:
                        stop = self._coroutine.send(None)
                    else:
                        stop = self._coroutine.throw(self._doom)
            except StopIteration:
                self._ended(self, None)
                return
            except BaseException as error:
                self._ended(self, error)
                if isinstance(error, Exception):
                    return
                raise  # Ctrl-C on the training thread
            if self._enter(_STOPPED) is _DOOMED:
                continue
            try:
                stop(self.go_on)
                return
            except Exception as error:  # the thread that should resume the journey has ended
                if self._enter(_DOOMED, error) is not _STOPPED:
                    return

    def end(self, error: BaseException | None) -> None:
        """Release all waiters. Raises if ``error`` is None but the device is lost."""
        self._enter(_ENDED)
        self.reach(error, self.place.mark() if error is None else nothing)


# --- devices --------------------------------------------------------------------------------------


class Place:
    """The device of a journey's tensors. The base class is a CPU.

    On a CPU, work is done when the call that issued it returns.
    """

    def follow(self) -> Begin:
        """Return a function whose awaitable ends when the journey's tensor has been computed.

        It is called on the thread that starts the journey, after the work that computes the tensor
        has been issued.
        """
        return at_once

    def here(self) -> Callable[[Callable[[], None]], None]:
        """Return a function that runs a callback on the caller's current stream, from any thread."""
        return _call

    def side(self) -> AbstractContextManager[object]:
        """Return the context manager to enter around each segment of a journey.

        It must not come from `contextlib.contextmanager`: a coroutine ends with a StopIteration,
        which a generator may not let through.
        """
        return _NO_CONTEXT

    def mark(self) -> Callable[[], None]:
        """Return a function that orders its caller's work behind all earlier work of journeys."""
        return nothing

    def reached(self) -> Callable[[], None]:
        """Return a function that blocks until all earlier work of journeys is done."""
        return nothing

    def future(self) -> GradientFuture:
        """Return a new Future. Its waiter is ordered behind the stream that completes it."""
        return GradientFuture()

    def adopt_thread(self) -> None:
        """Prepare the calling thread, which is one of ours, for journeys.

        Gradients are not recorded there.
        """
        torch.set_grad_enabled(False)

    def close(self, timeout_s: float) -> bool:
        """Stop the device's threads, and return whether they ended within ``timeout_s`` seconds."""
        return True


def _call(callback: Callable[[], None]) -> None:
    callback()


def living(group: "weakref.ref[dist.ProcessGroup]") -> dist.ProcessGroup:
    """Return the process group behind ``group``. Raises ``RuntimeError`` if it was destroyed."""
    if (found := group()) is None:
        raise RuntimeError("the process group was destroyed while an exchange was under way")
    return found


async def at_once() -> None:
    """Wait for nothing."""


def uncompiled_when_called(function: Function) -> Function:
    """Keep dynamo out of ``function``, which compiled code may call through ``backward()``.

    Use it for module-level functions. `uncompiled` loads dynamo, which takes seconds. This
    decorator applies `uncompiled` at the first call, when DDP has already loaded dynamo.
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

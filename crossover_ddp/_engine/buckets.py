"""Buckets of one backward pass, and how a failure among them reaches the training thread.

[Note: errors after backward] An exception must not leave a hook: DDP is unusable afterwards. An exception in the Future
that the hook returned surfaces as a misleading cast error. So a failing bucket is completed like any other, and the
failure is raised on the training thread after DDP's own end of backward, by a callback of the autograd engine:
``backward()`` raises the very error. DDP queues its end of backward after our hook ran, hence a callback that queues
another one. Where nothing will look for the error (outside of a backward pass, as in Join's shadow pass) the Future
does carry the exception.
"""

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Final, NamedTuple

import torch.distributed as dist
from torch.autograd import Variable

from crossover_ddp._ddp.module_buffers import BufferCopy
from crossover_ddp._timeline.record import Timeline
from crossover_ddp.errors import ExchangeError

from .journeys import Gate, Milestone, Trip
from .links import GradientFuture, Layout, Link, Place

BucketWay = Callable[["Bucket", Link], Coroutine[Any, Any, None]]

_STEPS_KEPT: Final = 16


class Backward:
    """The buckets of one backward pass, up to the one that DDP calls the last.

    Args:
        number: of the pass.

    ``gathers``: where buckets that backward does not wait for stay until all are summed, since forward needs the last
    one first. ``is_whole``: the last one was handed out.
    """

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self.gathers, self.is_whole = Gate(), False
        self.ready: list[tuple[int, float]] = []  # by bucket: bytes, moment of the hook
        self.futures: list[GradientFuture] = []  # of somebody else's hook
        self._lock = threading.Lock()
        self._watching = 0
        self._error: BaseException | None = None
        self.compute_ended = False

    def watch(self, *, is_last: bool) -> None:
        """Have a failure raised when DDP is through with this backward pass; call it in each bucket's hook.

        The first bucket's watch catches early failures; the last one's sees the end of backward even if earlier
        buckets were ready in a nested backward pass that ended before.
        """
        if (not self.ready or is_last) and _queue(self._at_end_of_backward):
            with self._lock:
                self._watching += 1

    def leave(self, error: BaseException) -> bool:
        """Leave ``error`` to be raised after backward; return False if nothing will look for it."""
        with self._lock:
            if self._watching:
                self._error = self._error or error
            return self._watching > 0

    def refuse(self, grad_bucket: dist.GradBucket, error: Exception) -> GradientFuture:
        """Answer a bucket of which nothing was sent: it completes as it is."""
        future = GradientFuture()
        if self.leave(error):
            future.set_result(grad_bucket.buffer())
        else:
            future.set_exception(error)  # type: ignore[arg-type]
        return future

    def _at_end_of_backward(self) -> None:
        if not _queue(self._after_ddp):
            self._after_ddp()

    def _after_ddp(self) -> None:
        # A nested backward pass (re-entrant checkpointing) may end before the last bucket: from then on
        # nobody watches, and a later failure goes into its Future.
        with self._lock:
            self._watching -= 1
            error, self._error = self._error, None
        if error is not None:
            raise error


class Bucket(Trip):
    """A bucket of DDP on its way.

    Args:
        grad_bucket: DDP's.
        layout: equal parts.
        backward: the pass that it belongs to.
        place: where its tensors are.
        timeline: is told who waits for it.
        link: that its messages belong to.

    ``flat``: its buffer, with a version counter of its own: what is changed through the gradients shows in theirs.
    ``keeps_turn``: its way says, in the hook, that owners' work after the reduce-scatter is part of the turn, which
    ``compute_ends`` gives away. ``half``: reached with the own part of the sums. ``buffers``: the model's, behind the
    last bucket.
    """

    def __init__(
        self,
        grad_bucket: dist.GradBucket,
        layout: Layout,
        backward: Backward,
        place: Place,
        timeline: Timeline | None,
        link: Link,
    ) -> None:
        super().__init__(f"bucket {grad_bucket.index()}")
        self.index, self.last = grad_bucket.index(), grad_bucket.is_last()
        self.result = grad_bucket.buffer()
        self.flat, self.layout = self.result.data, layout
        self.backward, self.place, self.link = backward, place, link
        self.future, self.half = place.future(), Milestone()
        self.buffers: BufferCopy | None = None
        self.done_s: float | None = None
        self.keeps_turn = False
        self.compute_ends: Callable[[], None] = _nothing
        self._timeline, self._is_dropped = timeline, False
        self._on_device: Callable[[], None] = _nothing

    # --- for its journey -------------------------------------------------------------------------------------

    def hand_back(self) -> None:
        """Let backward go on as if it were exchanged, in the hook; from now on whoever needs it waits for it."""
        self.deferred = True
        self.future.set_result(self.result)

    async def summed(self) -> bool:
        """Note that the own part is there, and wait for the other buckets' sums; return whether it is still needed.

        The last bucket opens the gate and goes first: sums end in the order of buckets, so all are there with its own.
        """
        self.half.reach(None, self.place.mark())
        gathers = self.backward.gathers
        await (gathers.passed_first() if self.last else gathers)
        return not self._is_dropped

    def exchanged(self) -> None:
        """Note that nothing travels any more, before the turn is waited for."""
        self.done_s = time.monotonic()

    # --- for whoever needs one that was handed back ----------------------------------------------------------

    def wait(self, *, on_host: bool = False) -> None:
        """Block until the mean is there; on a device order what the caller does behind it. May be called again.

        Args:
            on_host: also block until the device has it.
        """
        gathers = self.backward.gathers
        if not self.backward.is_whole and not gathers.is_open:
            if self.link.in_program_order:
                raise ExchangeError(
                    "expected a bucket whose gather is under way, got one of a backward that did not end; restart the "
                    "job"
                )
            gathers.open()
        self._wait(super().wait)
        if on_host:
            self._on_device()

    def wait_for_sum(self) -> None:
        """Block until the own part of the mean is there; on a device order what the caller does behind it."""
        self._wait(self.half.wait)

    def _wait(self, wait: Callable[[], None]) -> None:
        begin_s = time.monotonic()
        wait()
        if self._timeline is not None:
            self._timeline.span("stall", begin_s, time.monotonic(), bucket=self.index)

    def drop(self) -> None:
        """Let its memory be used by the next backward pass: nobody is going to wait for it, on no rank."""
        self._is_dropped = self.link.in_program_order and not self.backward.is_whole
        if self._is_dropped:
            self.wait_for_sum()
        else:
            self.wait()

    # --- for the exchange ------------------------------------------------------------------------------------

    def end(self, error: BaseException | None, follow: Callable[[], None]) -> None:
        """Complete the Future, or leave the error to be raised after backward, if that waits for it."""
        if self.deferred:
            self._on_device = self.place.reached()
        super().end(error, follow)
        self.half.reach(error, follow)
        if self.deferred:
            return
        with self.place.side():
            if error is None or self.backward.leave(error):
                self.future.set_result(self.result)
            else:
                self.future.set_exception(error)  # type: ignore[arg-type]


async def split(bucket: Bucket, link: Link) -> None:
    """Average over the ranks; nothing happens between the halves."""
    await link.all_reduce(bucket.flat, bucket.layout)


def after_backward(callback: Callable[[], None]) -> bool:
    """Have ``callback`` called when DDP is through with this backward pass; False outside of one.

    Call it in a hook. What ``callback`` raises is raised by ``backward()``.
    """

    def at_end_of_backward() -> None:
        if not _queue(callback):
            callback()

    return _queue(at_end_of_backward)


def _queue(callback: Callable[[], None]) -> bool:
    try:
        Variable._execution_engine.queue_callback(callback)
    except RuntimeError:
        return False
    return True


def _nothing() -> None:
    return None


class StepRecord(NamedTuple):
    """One step that backward waited for; seconds since the exchange before it was done.

    ``buckets``: bytes, and when the bucket's hook was called.
    """

    buckets: tuple[tuple[int, float], ...]


class StepRecords:
    """The last steps, which all had the same buckets. Filled on the thread that ends a step."""

    def __init__(self) -> None:
        self._steps: deque[StepRecord] = deque(maxlen=_STEPS_KEPT)

    def add(self, buckets: list[tuple[int, float]], begin_s: float | None) -> None:
        """Note a step of ``buckets`` (bytes, moment of the hook); ``begin_s`` None: unknown, it does not count."""
        if begin_s is None or not buckets:
            return
        record = StepRecord(tuple([(size_bytes, ready_s - begin_s) for size_bytes, ready_s in buckets]))
        if self._steps and sizes_of(self._steps[-1]) != sizes_of(record):
            self._steps.clear()
        self._steps.append(record)

    def last(self) -> list[StepRecord]:
        """Return the recorded steps."""
        return [*self._steps]

    def compute_s(self) -> float | None:
        """Return the median seconds from an exchange's end to the next step's last bucket; None without a record."""
        return statistics.median(each.buckets[-1][1] for each in self._steps) if self._steps else None


def sizes_of(record: StepRecord) -> list[int]:
    """Return the bytes of a step's buckets."""
    return [size_bytes for size_bytes, _ in record.buckets]

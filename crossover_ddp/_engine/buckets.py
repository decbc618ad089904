"""The buckets of one backward pass, whose failures reach the training thread, and the turn around the last one.

[Note: errors after backward] An exception must not leave a hook: DDP is unusable afterwards. An exception in
the Future that the hook returned surfaces as a misleading cast error. So a failing bucket is completed like any
other, and the failure is raised on the training thread after DDP's own end of backward, by a callback of the
autograd engine: ``backward()`` raises that very error. DDP queues its end of backward after our hook has run,
hence a callback that queues another one. Outside of a backward pass, as in Join's shadow pass, no callback runs.
There the Future carries the exception.

[Note: the turn in a journey] The journey of a step's last bucket releases the job's turn, requests the next one
and acquires it, in this order, on all ranks. The step's compute is launched when the hook of the last bucket
runs, so ``release()`` comes first, on the hook's thread, unless owners compute for this step as well. The request
travels while gradients are gathered: a sibling that computes meanwhile sees that this job waits. ``acquire()``
comes before DDP's Future completes, since optimizer and forward follow. A deferred journey acquires nothing: the
next forward does.
"""

import functools
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable

from crossover_ddp.errors import ExchangeError

from .journeys import (
    Completion,
    Gate,
    GradientFuture,
    Journey,
    JourneyCoroutine,
    Place,
    nothing,
    uncompiled_when_called,
)
from .links import Layout, Link

if TYPE_CHECKING:
    from .observe import Meter


class Turn(Protocol):
    """What the engine needs of a mutex. ``backward()`` raises what a method raises."""

    @property
    def awaits_device(self) -> bool:
        """Whether the device must have finished a step's buckets before the next turn is acquired."""

    @property
    def mode(self) -> str:
        """How the job computes beside its siblings, for the timeline."""

    def release(self) -> None:
        """Give the turn away: the step's compute is launched. Never blocks.

        Called on the hook's thread, or on the thread of owners' work.
        """

    def request(self) -> None:
        """Join the siblings' queue before `acquire`. Called on a thread of the engine."""

    def acquire(self, *, blocking: bool = True) -> bool:
        """Acquire the next turn, see ``awaits_device``.

        Called on a thread that may block, unless ``blocking`` is False: then return False where it would.
        """


class Backward:
    """The buckets of one backward pass, up to the one that DDP calls the last."""

    turn: Turn | None = None
    # Whether DDP has handed out the last bucket.
    is_whole = False
    # Whether the step's compute has been launched, so that a sibling may have the turn.
    compute_ended = False
    # Until when the program has waited for these buckets, as far as that was counted.
    waited_s: float | None = None

    def __init__(
        self, number: int = 0, compute_ends: Callable[["Backward"], None] | None = None
    ) -> None:
        self.number = number
        # Deferred buckets stay here until all are reduced, since forward needs the last one first.
        self.gathers = Gate()
        # Of each bucket: its bytes, and when its hook ran.
        self.ready: list[tuple[int, float]] = []
        # Of another library's hook below `crossover_wrapper`.
        self.futures: list[GradientFuture] = []
        self._compute_ends = compute_ends
        self._lock = threading.Lock()
        self._watching = 0  # callbacks that will run at the end of backward
        self._error: BaseException | None = None

    def watch(self, *, is_last: bool) -> None:
        """Raise a failure when DDP has finished this backward pass. Call it in each bucket's hook.

        The first bucket's callback catches early failures. The last one's runs at the end of backward even
        if earlier buckets were ready in a nested backward pass that ended before.
        """
        if (not self.ready or is_last) and after_backward(self._after_ddp):
            with self._lock:
                self._watching += 1

    def complete(self, future: GradientFuture, result: Tensor, error: BaseException | None) -> None:
        """Complete a bucket's Future. It carries an error only if no callback will raise that."""
        with self._lock:
            is_watched = self._watching > 0
            if is_watched:
                self._error = self._error or error
        if error is None or is_watched:
            try:
                return future.set_result(result)
            except RuntimeError as lost:  # the device has failed
                error = error or lost
        future.set_exception(error)  # type: ignore[arg-type]

    def _after_ddp(self) -> None:
        # A nested backward pass (re-entrant checkpointing) may end before the last bucket. From then on no
        # callback is left, and a later failure goes into its Future.
        with self._lock:
            self._watching -= 1
            error = self._error
            self._error = None
        if error is not None:
            raise error

    def end_compute(self) -> None:
        """Release the turn: the step's compute is launched. Only the first call counts."""
        if self.compute_ended:
            return
        self.compute_ended = True
        if self._compute_ends is not None:
            self._compute_ends(self)
        if self.turn is not None:
            self.turn.release()

    def refuse(self, grad_bucket: dist.GradBucket) -> None:
        """A bucket is not exchanged. The last one still ends the step's compute, and opens the gate."""
        if grad_bucket.is_last():
            self.end_compute()
            self.gathers.open()


class Bucket(Journey):
    """The journey of one of DDP's buckets."""

    # Of the hook; set by the exchange that starts the journey.
    meter: "Meter"
    # Whether the memory will be reused before the gather: `summed` returns False then.
    _is_dropped = False

    def __init__(
        self,
        grad_bucket: dist.GradBucket,
        layout: Layout,
        backward: Backward,
        place: Place,
        link: Link,
    ) -> None:
        super().__init__(f"bucket {grad_bucket.index()}", place, link.sent)
        self.index = grad_bucket.index()
        self.last = grad_bucket.is_last()
        self.result = grad_bucket.buffer()
        # The same memory with a version counter of its own: user code that writes to gradients bumps theirs.
        self.flat = self.result.data
        self.layout = layout  # equal shards
        self.backward = backward
        self.link = link
        self.future = place.future()
        self.own_shard = Completion()  # this rank's shard is reduced
        self._on_device: Callable[[], None] = nothing

    async def all_reduced(self) -> bool:
        """Mark this rank's shard as reduced, and wait until all buckets of the step are.

        The last bucket opens the gate and resumes first: reductions end in the order of buckets. Returns
        False if the bucket was dropped meanwhile.
        """
        self.own_shard.reach(None, self.place.mark())
        gathers = self.backward.gathers
        if self.last:
            await gathers.passed_first()
        else:
            await gathers
        return not self._is_dropped

    def wait(self, *, on_host: bool = False) -> None:
        """Block until the mean has arrived. On a device the caller's later work is ordered behind it.

        May be called again.

        Args:
            on_host: also block until the device has it.
        """
        gathers = self.backward.gathers
        if not self.backward.is_whole and not gathers.is_open:
            if self.link.in_program_order:
                raise ExchangeError(
                    "backward() ended with an exception before the last bucket, so that the gather of this bucket was "
                    "never issued; restart the job"
                )
            gathers.open()
        super().wait()
        if on_host:
            self._on_device()

    def drop(self) -> None:
        """Let the next backward pass use the memory: no rank will wait for this bucket."""
        self._is_dropped = self.link.in_program_order and not self.backward.is_whole
        if self._is_dropped:
            self.own_shard.wait()
        else:
            self.wait()

    def exposed_until(self, end_s: float) -> float:
        """Return the seconds that backward has waited for this bucket alone: from the last hook on."""
        backward = self.backward
        since_s = self.begun_s if self.last else backward.waited_s
        if since_s is None or end_s <= since_s:
            return 0.0
        backward.waited_s = end_s
        return end_s - since_s

    def end(self, error: BaseException | None) -> None:
        """Complete the Future. An error is raised after backward, if that waits for the bucket."""
        if error is None and self.when_computed is not None:
            raise RuntimeError("its journey has sent it without awaiting bucket.computed() first")
        if self.last:
            self.backward.end_compute()  # if the journey ended before it released the turn
        if self.deferred and error is None:
            self._on_device = self.place.reached()
        super().end(error)
        self.own_shard.reach(error, self._follow)
        if not self.deferred:
            self._is_followed = True  # by the waiter of the Future
            with self.place.side():
                self.backward.complete(self.future, self.result, error)


Join = Callable[[], Turn]


class JourneyTurn:
    """The job's turn, for the journey of a bucket, see [Note: the turn in a journey].

    Its methods do nothing for other buckets than the last, and without a mutex. `request` and `acquire` do
    nothing in a deferred journey either: the next forward acquires.

    Args:
        bucket: the bucket.
        link: its link.
        turn: the mutex of the job; None: it has none, or has yet to join its siblings.
        join: joins them, and returns the mutex. It is collective and may block, so it is called in `request`
            over gloo, and in `acquire` on NCCL and with one rank: all ranks reach these in the same order.
    """

    def __init__(self, bucket: Bucket, link: Link, turn: Turn | None, join: Join | None) -> None:
        self._bucket = bucket
        self._link = link
        self._turn = turn
        self._join = join
        self._is_shared = bucket.last and (turn is not None or join is not None)
        # On NCCL: blocks until the device has reached the point of the request.
        self._reached = bucket.place.reached() if self._is_shared else nothing

    @property
    def awaits_device(self) -> bool:
        """See `Turn.awaits_device`. The first time is before the job has joined."""
        if self._turn is None:
            return self._is_shared
        return self._is_shared and self._turn.awaits_device

    def release(self) -> None:
        """Give the turn to a sibling: this step's compute is launched. Later calls do nothing."""
        bucket = self._bucket
        if not bucket.last:
            return
        if bucket.when_computed is None:
            bucket.backward.end_compute()  # owners' work ends on the journey's stream
        else:
            bucket.as_starter(bucket.backward.end_compute)  # backward's kernels are on the hook's

    def request(self) -> None:
        """Join the siblings' queue: the exchange is half-way."""
        if not self._is_shared or self._bucket.deferred:
            return
        if self._link.in_program_order:
            # Ranks may issue nothing but collectives here; `acquire` requests when the device is there.
            self._reached = self._bucket.place.reached()
        elif self._link.size > 1:
            self._joined().request()

    async def acquire(self) -> None:
        """Wait for the next turn. With no sibling the host runs ahead of its device as without a mutex."""
        if not self._is_shared or self._bucket.deferred:
            return
        turn = self._turn
        in_program_order = self._link.in_program_order
        whole_way = self._bucket.place.reached()
        self._bucket.done_s = time.monotonic()
        if turn is not None and not in_program_order and turn.acquire(blocking=False):
            return  # without a hop to another thread
        await self._link.settle()
        if in_program_order and self.awaits_device:
            self._reached()
            self._joined().request()
            whole_way()
            self._bucket.done_s = time.monotonic()
        self._joined().acquire()

    def _joined(self) -> Turn:
        if self._turn is None:
            assert self._join is not None
            self._turn = self._join()
        return self._turn


BucketJourney = Callable[[Bucket, Link, JourneyTurn], JourneyCoroutine]


def after_backward(callback: Callable[[], None]) -> bool:
    """Call ``callback`` when DDP has finished this backward pass. Returns False outside of one.

    Call it in a hook. ``backward()`` raises what ``callback`` raises.
    """
    return _queue(functools.partial(_run_at_end, callback))


@uncompiled_when_called
def _run_at_end(callback: Callable[[], None]) -> None:
    if not _queue(functools.partial(_run, callback)):
        callback()


@uncompiled_when_called
def _run(callback: Callable[[], None]) -> None:
    callback()


def _queue(callback: Callable[[], None]) -> bool:
    try:
        Variable._execution_engine.queue_callback(callback)
    except RuntimeError:
        return False
    return True

"""Starts the journeys of a process group, fails them and closes them.

[Note: failed] An error in a journey is a failure, because other ranks may wait for data that the
journey would have sent. The first failure is final for the process group. It is thrown into every
journey of this rank, and the connections are closed, so that it reaches all ranks.
"""

import functools
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from crossover_ddp._ddp.checks import CAPTURED, PYTHON_REDUCER, check_turn, resolve_group
from crossover_ddp._ddp.groups import on_destruction
from crossover_ddp._ddp.layout import equal_lengths
from crossover_ddp.errors import CrossoverError, ExchangeError, UnsupportedConfigurationError

from .buckets import (
    Backward,
    BehindLastBucket,
    Bucket,
    BucketChecks,
    BucketJourney,
    Join,
    JourneyTurn,
    Passes,
    Turn,
    fold_of,
)
from .journeys import (
    GradientFuture,
    Journey,
    JourneyCoroutine,
    Observer,
    outside_of_autograd,
    uncompiled_when_called,
)
from .links import Layout, Link
from .networks import DESTROYED, Networks
from .observe import Meter, StepObserver, at_each_step, timeline_of
from .states import HookState, log_summary

Around = Callable[[Link], Link]

_END_S: Final = 0.5
_NEEDED_BY_OTHERS_S: Final = 30.0
_SUMMARY_AFTER: Final = 100  # the number of steps after which statistics are logged
_TIMED_OUT: Final = (
    " (another rank has stopped, computes for longer than the group's timeout, or makes fewer steps than this one: "
    "give all ranks as many batches)"
)


class Exchange:
    """Starts the journeys of one process group, fails them and closes them.

    It keeps no strong reference to the group.
    """

    _of_group: ClassVar["weakref.WeakKeyDictionary[dist.ProcessGroup, Exchange]"] = (
        weakref.WeakKeyDictionary()
    )
    _registry_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._pid = os.getpid()
        self.rank = group.rank()
        self.size = group.size()
        self.networks = Networks(group)
        self.steps = StepObserver(timeline_of(group))
        self.passes = Passes(self.steps.compute_ends)
        self.checks = BucketChecks(group)
        self.behind = BehindLastBucket(group, at_each_step)
        self.meter = Meter()  # for hooks without a state
        # Must be set to the same value on all ranks before the first backward. This is not checked.
        self.leaves_buffers_to_ddp = False
        self._numbers = itertools.count()  # for journeys that belong to no bucket
        self._lock = threading.Lock()
        self._under_way: set[Journey] = set()
        self._failure: CrossoverError | None = None
        self._leave_group = on_destruction(group, self._end)

    @classmethod
    def of(cls, process_group: dist.ProcessGroup | None) -> "Exchange":
        """Return the exchange of ``process_group``, or of the default group for None.

        The exchange lives as long as its group. Not collective.
        """
        group = dist.group.WORLD if process_group is None else process_group
        with cls._registry_lock:
            if group is None or group not in cls._of_group:
                group = resolve_group(process_group)
                cls._of_group[group] = cls(group)
            return cls._of_group[group]

    def begin(
        self,
        make: Callable[[Link], JourneyCoroutine],
        tensor: Tensor,
        name: str,
        *,
        deferred: bool = False,
        link: Link | None = None,
        around: Around | None = None,
        meter: Meter | None = None,
    ) -> Journey:
        """Start a journey for a tensor that belongs to no bucket.

        Args:
            make: a function that takes the link and returns the coroutine.
            tensor: the tensor that travels. The journey runs on its device, and keeps it alive.
            name: the name of the tensor in error messages.
            deferred: whether the program continues without waiting. Other ranks may then still need
                the journey when this rank ends.
            link: the link of an earlier journey that this one continues. By default the network
                supplies its next link.
            around: a function that wraps the network's link. It may raise.
            meter: the meter that counts the traffic and the waits; None counts nothing.

        **Collective**: all ranks must start the same journeys in the same order.
        """
        self._check_process()
        network = self.networks[tensor.device]
        if link is None:
            link = network.link() if around is None else around(network.link())
            link = self.steps.traced(link, step=next(self._numbers), bucket=-1)
        journey = Journey(name, network.place, link.sent, deferred=deferred)
        journey.tensor = tensor
        journey.waits = meter
        self._start(journey, _when_computed(journey, make, link), () if meter is None else (meter,))
        return journey

    def send(
        self,
        grad_bucket: dist.GradBucket,
        make: BucketJourney,
        *,
        turn: Turn | None = None,
        join: Join | None = None,
        state: object = None,
        around: Around | None = None,
        hands_back: bool = False,
        leaves_buffers: bool = False,
    ) -> Bucket:
        """Start a bucket's journey. Call it in the bucket's hook.

        The ``future`` of the returned bucket will hold DDP's buffer.

        Args:
            grad_bucket: the bucket that DDP passed to the hook.
            make: a function that takes the bucket, its link and the turn, and returns the
                coroutine. It is called here, and may raise to refuse the bucket. An error in the
                coroutine, even before its first ``await``, is a failure instead, see
                [Note: failed]. So an ``async def`` cannot refuse.
            turn: the job's mutex; None if the job takes no turns, or has yet to join its siblings.
            join: a function that joins the siblings and returns the mutex. It is called within the
                first journey.
            state: the state that the hook was registered with, see `ModuleBuffers`. If it has a
                meter, that meter counts this bucket.
            around: a function that wraps the bucket's link. It may raise to refuse the bucket.
            hands_back: whether to complete the Future at once. Code that needs the bucket must then
                call its ``wait()``.
            leaves_buffers: whether to leave the model's buffers to DDP, which broadcasts them in
                forward.

        If the bucket is refused, the call raises the reason.
        """
        backward = self._enter(grad_bucket, turn)
        meter = self.meter_of(state)
        # A refused bucket takes a link too, so that all ranks count the same.
        network, fold = self.networks[grad_bucket.buffer().device], fold_of(grad_bucket)
        link = network.link() if fold is None else fold.link(grad_bucket, network)
        try:
            bucket = self._bucket(grad_bucket, link, backward, meter)
            if around is not None:
                link = around(link)
            link = self.steps.traced(link, step=backward.number, bucket=bucket.index)
            bucket.link = link
            if hands_back:
                bucket.deferred = True
                bucket.future.set_result(bucket.result)
            if bucket.last and not (leaves_buffers or self.leaves_buffers_to_ddp):
                # Ahead of the bucket, since the next forward begins with the buffers, and gathers
                # arrive one after the other.
                self.behind.send_buffers(self, grad_bucket, state, meter)
            coroutine = make(bucket, link, JourneyTurn(bucket, link, turn, join))
        except Exception:
            backward.refuse(grad_bucket)
            raise
        meter.steps += bucket.last
        meter.is_timed = not link.in_program_order
        self._start(bucket, coroutine, (meter, self.steps))
        return bucket

    def follow(
        self,
        future: GradientFuture,
        grad_bucket: dist.GradBucket,
        make: Callable[[Sequence[GradientFuture], Bucket, Link, JourneyTurn], JourneyCoroutine],
        *,
        state: object,
        turn: Turn | None = None,
        join: Join | None = None,
    ) -> GradientFuture:
        """Register a bucket that another library's hook exchanges, and return the Future for DDP.

        ``future`` is what that hook returned. For the step's last bucket, ``make`` gets the Futures
        of all buckets of the step, and returns the coroutine of a journey. DDP then gets that
        journey's Future. For any other bucket it gets ``future`` itself.
        """
        futures = self.passes.current.futures
        futures.append(future)
        if not grad_bucket.is_last():
            self._enter(grad_bucket, turn)
            return future
        make_last = functools.partial(make, futures)
        started = self.send(
            grad_bucket, make_last, turn=turn, join=join, state=state, leaves_buffers=True
        )
        return started.future

    def run(
        self, grad_bucket: dist.GradBucket, start: "StartExchange", state: object
    ) -> GradientFuture:
        """Call ``start`` for a bucket. If it is the last, compare the parameters behind it.

        **Collective**.
        """
        entered = self.passes.entered
        try:
            future = start(self)
        except Exception:
            # It was refused before a journey was started, but all ranks must count the same.
            if self.passes.entered == entered:
                self._enter(grad_bucket).refuse(grad_bucket)
                self.networks[grad_bucket.buffer().device].link()
            raise
        self.behind.compare(self, grad_bucket, state)
        return future

    def gather_numbers(self, numbers: Sequence[float], device: torch.device) -> list[list[float]]:
        """Return the numbers of every rank, by rank. Blocks until all ranks have made the call.

        All ranks must pass equally many numbers. They travel over the network of ``device``.

        **Collective**.
        """
        flat = torch.zeros(self.size, len(numbers), dtype=torch.float64, device=device)
        flat[self.rank] = torch.tensor(numbers, dtype=flat.dtype)
        self.gather(flat.flatten(), [len(numbers)] * self.size, "a table of numbers")
        return flat.tolist()

    def gather(self, flat: Tensor, layout: Layout, name: str) -> None:
        """Copy each rank's shard of ``flat`` to all ranks, and wait until it is there.

        **Collective**.
        """
        with outside_of_autograd():
            # Our threads cannot write to a tensor that was made in inference mode.
            memory = flat.clone() if flat.is_inference() else flat
            self.begin(lambda link: link.all_gather(memory, layout), memory, name).wait()
        if memory is not flat:
            flat.copy_(memory)

    def equal_layout(self, flat: Tensor) -> Layout:
        """Return a layout that cuts ``flat`` into equal shards, aligned as its network prefers."""
        network = self.networks[flat.device]
        return equal_lengths(
            flat.numel(), self.size, max(1, network.alignment_bytes // flat.itemsize)
        )

    def meter_of(self, state: object) -> Meter:
        """Return the meter of a hook, which may have no state.

        After the first steps rank 0 also logs the statistics of the hook, once.
        """
        meter = state.meter if isinstance(state, HookState) else self.meter
        if meter.steps == _SUMMARY_AFTER and self.rank == 0:
            log_summary(meter, state)
        return meter

    def _enter(self, grad_bucket: dist.GradBucket, turn: Turn | None = None) -> Backward:
        self._check_process()
        return self.passes.enter(grad_bucket, turn)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ExchangeError(
                "this process is a fork of a rank; train in the rank, or start a new process"
            )

    def _bucket(
        self, grad_bucket: dist.GradBucket, link: Link, backward: Backward, meter: Meter
    ) -> Bucket:
        """Create the journey for ``grad_bucket``. Raises if `BucketChecks` refuses it."""
        flat = grad_bucket.buffer()
        self.checks.check(grad_bucket)
        backward.ready.append((flat.nbytes, time.monotonic()))
        place = self.networks[flat.device].place
        return Bucket(grad_bucket, self.equal_layout(flat), backward, place, link, meter)

    def _start(
        self, journey: Journey, coroutine: JourneyCoroutine, observers: Sequence[Observer]
    ) -> None:
        journey.observers = observers
        try:
            journey.when_computed = journey.place.follow()
        except BaseException:
            coroutine.close()
            raise
        with self._lock:
            self._under_way.add(journey)
            for observer in observers:
                observer.begins(journey)
            failure = self._failure
        if failure is None:
            with outside_of_autograd():
                journey.start(coroutine, self._ended)
        else:
            coroutine.close()
            self._ended(journey, failure)

    def _ended(self, journey: Journey, error: BaseException | None) -> None:
        failure = None if error is None else self.fail(journey.name, error)
        end_s = journey.done_s or time.monotonic()
        with self._lock:
            self._under_way.discard(journey)
            for observer in journey.observers:
                observer.ends(journey, end_s, failure)
        try:
            journey.end(failure)
        except RuntimeError as lost:  # the device is lost
            journey.end(self.fail(journey.name, lost))

    def fail(self, name: str, cause: BaseException) -> CrossoverError:
        """Fail every journey of the group and close its connections, so that peers fail as well.

        See [Note: failed].

        Args:
            name: the name of the tensor whose journey failed.
            cause: the error that made it fail.

        Returns:
            The group's failure. If the group had failed already, this is the earlier failure.
            Otherwise it is ``cause`` if that is a `CrossoverError`, else an ``ExchangeError`` that
            names the tensor and the cause.
        """
        lower = str(cause).lower()
        hint = _TIMED_OUT if "timed out" in lower or "timeout" in lower else ""
        text = (
            f"rank {self.rank} of {self.size}: the exchange of {name} failed: {cause}{hint}; no later exchange on this "
            "process group can succeed, restart the job"
        )
        with self._lock:
            if self._failure is not None:
                return self._failure
            failure = cause if isinstance(cause, CrossoverError) else ExchangeError(text)
            self._failure = failure
            if failure is not cause:
                failure.__cause__ = cause
            doomed = [*self._under_way]
        self.networks.interrupt()
        for journey in doomed:
            journey.throw(failure)
        return failure

    def close(self) -> None:
        """Stop the threads once the journeys under way have ended. Later journeys fail.

        It is safe to call it more than once.
        """
        self._leave_group()
        self._end()

    def _end(self) -> None:
        """Shut down: the process group, the interpreter or the owner of this exchange is going away.

        Peers may still need data from this rank, so it waits for deferred journeys. A thread that
        returns from gloo while the interpreter is torn down would crash the process, so all threads
        must end first.
        """
        if os.getpid() != self._pid:
            return
        if self.steps.timeline is not None:
            self.steps.timeline.flush()
        end_s = time.monotonic() + _NEEDED_BY_OTHERS_S
        for journey in list(self._under_way):
            # No rank waits for the buckets of a backward pass that has not ended.
            is_needed = not isinstance(journey, Bucket) or journey.backward.is_whole
            if journey.deferred and is_needed:
                journey.block(max(0.0, end_s - time.monotonic()))
        if not self.networks.close(_END_S):
            cause = RuntimeError("the process group was destroyed meanwhile")
            self.fail("a tensor under way", cause)
            self.networks.close(_END_S)
        with self._lock:  # data that has arrived stays usable
            self._failure = self._failure or ExchangeError(DESTROYED)


async def _when_computed(
    journey: Journey, make: Callable[[Link], JourneyCoroutine], link: Link
) -> None:
    """Wait until the device has computed the tensor, then run the coroutine that ``make`` returns."""
    await journey.computed()
    await make(link)


StartExchange = Callable[[Exchange], GradientFuture]


@uncompiled_when_called
def run_hook(
    state: Any,
    bucket: dist.GradBucket | tuple[Tensor, ...],
    kind: type[HookState] | None,
    remedy: str,
    start: StartExchange,
    *,
    compares: bool = True,
    is_wrapped: bool = False,
    plain: Callable[[Any, dist.GradBucket], GradientFuture] = allreduce_hook,
    refused: Callable[[], None] | None = None,
) -> GradientFuture:
    """Check a hook's arguments, run the hook for ``bucket``, and return the Future for DDP.

    ``backward()`` raises any error. With torch's Python reducer nothing would report the error
    later, so it is raised here.

    Args:
        state: a `HookState`, or a process group if ``kind`` is None. ``fingerprint(bucket)`` of the
            state must return the same on all ranks.
        bucket: the bucket that DDP passed to the hook.
        kind: the class that ``state`` must have; None if ``state`` is the process group.
        remedy: the end of the error message for a state of another class: the code to write
            instead.
        start: a function that starts the bucket's journey.
        compares: whether to compare the ranks' parameters behind the last bucket, see
            `BehindLastBucket.compare`.
        is_wrapped: whether another library's hook exchanges the bucket.
        plain: the hook that runs instead if ``CROSSOVER_DISABLE=1``.
        refused: a function to call before ``backward()`` gets an error.
    """
    if isinstance(bucket, tuple):
        raise UnsupportedConfigurationError(PYTHON_REDUCER)
    try:
        group = state
        if kind is not None:
            if not isinstance(state, kind):
                raise UnsupportedConfigurationError(
                    f"expected a {kind.__name__}, got state={type(state).__name__}; {remedy}"
                )
            group, agreement = state.process_group, state.agreement
            if not agreement.made:
                mutex = state.mutex  # type: ignore[attr-defined]
                if mutex is not None and not agreement.disabled:
                    check_turn(mutex.ranks, resolve_group(group))
                agreement.make(resolve_group(group), lambda: state.fingerprint(bucket))  # type: ignore[attr-defined]
            if agreement.disabled:
                return plain(group, bucket)
        if bucket.buffer().is_cuda and torch.cuda.is_current_stream_capturing():
            raise UnsupportedConfigurationError(CAPTURED)
        if (fold := fold_of(bucket)) is not None:
            fold.add_to(bucket, state, is_wrapped=is_wrapped)
        exchange = Exchange.of(group)
        return exchange.run(bucket, start, state) if compares else start(exchange)
    except Exception as error:
        if refused is not None:
            refused()
        backward, future = Backward(), GradientFuture()
        backward.watch(is_last=True)
        # The buffer is unchanged, since nothing was sent.
        backward.complete(future, bucket.buffer(), error)
        return future

"""The journey of a bucket: reduce-scatter, the owner's step, all-gather, and the Future that DDP waits for.

[Note: two workers] On gloo somebody must add what arrives and pass it on. Two threads do that, the *reducer*
and the *gatherer*, so that the reduce-scatter of the next bucket is under way while the parts of this one
are gathered. Both block in gloo or on an empty queue and never poll; each wakes up once per chunk (the
gatherer of two ranks once per bucket). They are daemons, are started by the first bucket that needs them,
and end with the engine. Both work strictly in the order of the buckets, which is the same on all ranks, so
that no rank waits for a bucket that a peer will not come to. A third one, the *follower*, waits for the
collectives of somebody else's hook, which may use this engine itself.

[Note: native order] On NCCL and its like every collective is issued by the thread that runs the hook: the
model's own collectives (SyncBatchNorm, buffer broadcasts) share the communicator, and only the program's
order is the same on all ranks. Deferred gathers follow the step's last reduce-scatter, last bucket first.
"""

import contextlib
import functools
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import ClassVar, Final

import torch
import torch.distributed as dist

from ._collectives import HostBuffer, NativeHalves, Ring
from ._ddp_checks import Bucket, check_group, flat_gradients, largest_bytes
from ._endings import end_engine, on_destruction, stop_workers
from ._exchange_spans import ExchangeSpans, timeline_of
from ._gathers import GatherOrder
from ._journey import Cargo, Deferred, Failure, Freight, Journey, OwnerStep, RingTrip, Turn
from ._layout import Layout, Span
from ._module_buffers import BufferCopy, ModuleBuffers
from ._staging import Side, StagedBuffer
from ._step import GradientFuture, Step, after_backward
from ._timeline import Timeline
from ._worker import Worker
from .errors import CrossoverError

_JOIN_TIMEOUT_S: Final = 5.0
_AS_IT_IS: Final = contextlib.nullcontext()
# NCCL is much slower on shares that begin elsewhere (pytorch#195450, nccl#413).
_NATIVE_ALIGNMENT_BYTES: Final = 128


class Exchange:
    """Average buckets over the ranks of one process group, several at a time, in one order on all ranks.

    Args:
        process_group: whose ranks take part; held weakly. gloo for CPU tensors (CUDA tensors are then
            staged through the host), or a backend with a native reduce-scatter.
        timeline: where spans are noted; None notes nothing.
        chunk_bytes: size of the pieces that travel on a gloo ring; None chooses by the bucket's size.

    On failure: the first failure of any bucket is final. The buckets in flight and all later ones fail at
    once with the same cause, as ``ExchangeError`` raised by ``backward()``. Nothing waits longer than the
    process group's timeout.
    Collective: all ranks must submit the same buckets in the same order.
    """

    _engines: ClassVar["weakref.WeakKeyDictionary[dist.ProcessGroup, Exchange]"] = weakref.WeakKeyDictionary()
    _channels: ClassVar["weakref.WeakKeyDictionary[dist.ProcessGroup, Iterator[int]]"] = (
        weakref.WeakKeyDictionary()
    )
    _registry_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        *,
        timeline: Timeline | None = None,
        chunk_bytes: int | None = None,
    ) -> None:
        self.rank = process_group.rank()
        self.world_size = process_group.size()
        self._spans = ExchangeSpans(timeline, process_group)
        self._group = weakref.ref(process_group)
        self._backends = _backends(process_group)
        self._checked: set[tuple[int, int]] = set()
        self._buffers = ModuleBuffers(self.rank)
        with Exchange._registry_lock:
            channel = next(Exchange._channels.setdefault(process_group, itertools.count()))
        self._ring = Ring.over(process_group, channel=channel, chunk_bytes=chunk_bytes)
        self._native = NativeHalves(process_group)
        self._reducer = Worker("crossover-reduce")
        self._gatherer = Worker("crossover-gather")
        self._follower = Worker("crossover-follow")
        self._workers = self._reducer, self._gatherer, self._follower
        self._order = GatherOrder(self._ring)
        self._sequence = itertools.count()
        self._step = Step()
        self._sides: dict[torch.device, Side] = {}
        self._lock = threading.Lock()
        self._in_flight: set[Journey] = set()
        self._failure: Failure | None = None
        self._turn_taken_s: float | None = None
        on_destruction(process_group, self._spans.flush)  # what is registered first comes last
        # Also at interpreter exit, and when the group goes and with it the last reference to this engine.
        end = functools.partial(end_engine, self._workers, self._ring, self._order)
        weakref.finalize(self, end)
        on_destruction(process_group, end)

    @classmethod
    def of(cls, process_group: dist.ProcessGroup) -> "Exchange":
        """Return the engine of ``process_group``, which lives as long as the group. Not collective."""
        with cls._registry_lock:
            engine = cls._engines.get(process_group)
        if engine is None:
            engine = cls(process_group, timeline=timeline_of(process_group))
            with cls._registry_lock:
                engine = cls._engines.setdefault(process_group, engine)
        return engine

    def submit(
        self,
        bucket: dist.GradBucket,
        *,
        turn: Turn | None = None,
        owner_step: OwnerStep | None = None,
        layout: Layout | None = None,
        load: Callable[[], Cargo] | None = None,
        state: object = None,
    ) -> GradientFuture:
        """Begin to average ``bucket``; the Future holds the bucket's own buffer with the mean over the ranks.

        Args:
            bucket: what DDP gave to the hook.
            turn: given away after the last bucket, taken again before the last Future completes.
            owner_step: changes the averaged own part in place, between the halves; None changes nothing.
            layout: who owns which part; None cuts equally.
            load: returns what travels instead of the buffer, which its ``unload`` fills; the Futures of all such
                buckets of a step complete together, also if ``load`` raises.
            state: that the hook was registered with; see `ModuleBuffers`.
        """
        step = self._enter(bucket)
        try:
            cargo = None if load is None else load()
            journey = self._journey(bucket, step, turn)
            journey.owner_step, journey.layout = owner_step, layout or journey.layout
            if cargo is not None:
                journey.load(cargo)
            step.keeps_turn = step.keeps_turn or journey.keeps_turn
        except Exception as error:  # whatever it is, it must not leave the hook
            future = _refused(bucket, step, error)
            for held in step.let_go(refused=True) if _is_last(bucket) else ():
                self._finish(held, None)
        else:
            future = journey.future
            buffers = self._launch_with_buffers(journey, bucket, state)
            if buffers is not None:
                after_backward(buffers.claim_and_unpack)
        if _is_last(bucket):
            self._leave(step, turn)
        return future

    def reduce(self, cargo: Cargo) -> None:
        """Begin to sum ``cargo`` into its owners, ahead of the next backward's buckets; a failure is theirs too."""
        tensor, layout = cargo.scatter
        journey = Journey(
            index=-1,
            tensor=tensor,
            layout=layout,
            sequence=next(self._sequence),
            step=self._step,
            last=False,
            side=self._side(tensor.device),
        )
        journey.load(cargo)
        self._launch(journey)

    def defer(
        self,
        bucket: dist.GradBucket,
        *,
        turn: Turn | None = None,
        urgency: int = 0,
        state: object = None,
    ) -> tuple[GradientFuture, Deferred | None]:
        """Begin to average ``bucket`` in the background; backward does not wait for it.

        Args:
            bucket: what DDP gave to the hook; its gradients must be views of its buffer.
            turn: given away after the last bucket; the caller takes it again.
            urgency: the gather comes before those of the same step with a greater one. Only rank 0's counts.
            state: that the hook was registered with; see `ModuleBuffers`.

        Returns:
            The Future for DDP, complete already, and where to wait; None for the latter if the bucket was refused.
        """
        step = self._enter(bucket)
        deferred = None
        try:
            journey = self._journey(bucket, step, turn)
            # Its own version counter: the user's changes show in the gradients', ours do not.
            journey.tensor, journey.urgency = journey.tensor.data, urgency
        except Exception as error:  # whatever it is, it must not leave the hook
            future = _refused(bucket, step, error)
        else:
            deferred = Deferred(journey, self._spans.timeline)
            future = journey.side.future()
            deferred.buffers = self._launch_with_buffers(journey, bucket, state)
            if deferred.buffers is not None:
                after_backward(deferred.buffers.claim)
            future.set_result(bucket.buffer())
        if _is_last(bucket):
            self._leave(step, turn)
        return future, deferred

    def begin_compute(self) -> None:
        """Note that forward begins, for the timeline."""
        self._turn_taken_s = time.monotonic()

    def waited(self, since_s: float) -> None:
        """Note that forward waited for its turn until now, for the timeline."""
        self._spans.wait(self._step.number, since_s, time.monotonic())

    @staticmethod
    def refuse(bucket: dist.GradBucket, error: Exception) -> GradientFuture:
        """Answer a bucket that cannot be exchanged: ``error`` is raised after backward, not out of the hook."""
        step = Step()
        step.raise_after_backward()
        return _refused(bucket, step, error)

    def follow(self, future: GradientFuture, bucket: dist.GradBucket, *, turn: Turn) -> GradientFuture:
        """Put the turn around somebody else's collective, whose result for ``bucket`` is ``future``.

        The Future of a step's last bucket is replaced by one that completes when all the step's Futures are
        done and the turn is taken again.
        """
        step = self._enter(bucket)
        step.futures.append(future)
        if not bucket.is_last():
            return future
        journey = self._journey(bucket, step, turn)
        self._leave(step, turn)
        follow = functools.partial(self._follow, journey)
        self._guarded(journey, "start", lambda: self._put(self._follower, journey, "wrapped hook", follow))
        return journey.future

    def close(self) -> None:
        """End the threads, after the buckets in flight. Later buckets fail. May be called again."""
        with Exchange._registry_lock:
            for group, engine in list(Exchange._engines.items()):
                if engine is self:
                    del Exchange._engines[group]
        stop_workers(self._workers, _JOIN_TIMEOUT_S)

    # On the hook's thread.

    def _enter(self, bucket: dist.GradBucket) -> Step:
        step = self._step
        # The first bucket's watch catches early failures; the last one's sees the end of backward even if
        # earlier buckets were ready in a nested backward pass that ended before.
        if not step.entered or _is_last(bucket):
            step.raise_after_backward()
        step.entered = True
        return step

    def _leave(self, step: Step, turn: Turn | None) -> None:
        self._step = Step(step.number + 1)
        self._end_compute(step, turn)

    def _end_compute(self, step: Step, turn: Turn | None) -> None:
        """Give the turn away, once a step.

        Always before a worker hears of the last bucket: it may take the next turn at any moment from then on.
        """
        if step.compute_ended or step.keeps_turn:
            return
        step.compute_ended = True
        self._spans.compute(step, self._turn_taken_s)
        if turn is not None:
            turn.release()

    def _end_kept_compute(self, journey: Journey) -> None:
        """Give away a turn that was kept for the owners' steps, which are done, or will not be."""
        if journey.last and journey.keeps_turn:
            journey.step.keeps_turn = False
            with journey.side.current():
                self._end_compute(journey.step, journey.turn)

    def _side(self, device: torch.device) -> Side:
        side = self._sides.get(device)
        if side is None:
            side = self._sides[device] = Side(device)
        return side

    def _journey(self, bucket: dist.GradBucket, step: Step, turn: Turn | None) -> Journey:
        tensor = flat_gradients(bucket)
        self._check_group(bucket, tensor)
        step.last_hook_s = time.monotonic()
        return Journey(
            index=bucket.index(),
            tensor=tensor,
            layout=self._equal_layout(tensor),
            sequence=next(self._sequence),
            step=step,
            last=bucket.is_last(),
            side=self._side(tensor.device),
            turn=turn,
            ready_s=step.last_hook_s,
            largest_bytes=largest_bytes(bucket) if self._spans.timeline is not None else 0,
        )

    def _equal_layout(self, tensor: torch.Tensor) -> Layout:
        on_ring = self._backends.get(tensor.device.type) == "gloo"
        multiple = 1 if on_ring else max(1, _NATIVE_ALIGNMENT_BYTES // tensor.itemsize)
        return Layout.equal(tensor.numel(), self.world_size, multiple=multiple)

    def _check_group(self, bucket: dist.GradBucket, tensor: torch.Tensor) -> None:
        key = (bucket.index(), tensor.numel())
        group = self._group()
        if key not in self._checked and group is not None:
            check_group(bucket, group)
            self._checked.add(key)

    def _launch(self, journey: Journey) -> None:
        if self.world_size == 1:
            begin = self._begin_alone
        elif self._is_on_ring(journey):
            begin = self._begin_ring
        else:
            begin = self._begin_native
        self._guarded(journey, "start", functools.partial(begin, journey))

    def _launch_with_buffers(
        self, journey: Journey, bucket: dist.GradBucket, state: object
    ) -> BufferCopy | None:
        """Launch a bucket, and with the step's last one the model's buffers; return these."""
        buffers = None
        if journey.last and self.world_size > 1 and isinstance(bucket, dist.GradBucket):
            buffers = self._buffers.copy(bucket, state, functools.partial(self._agree, journey))
        if buffers is None or self._is_on_ring(journey):
            self._launch(journey)
        if buffers is not None:
            # Rank 0 owns all of it.
            layout = Layout.of_lengths([buffers.flat.numel()] + [0] * (self.world_size - 1))
            buffers.arrived = self._spread(Freight(buffers.flat, layout), journey.step)
            if not self._is_on_ring(journey):  # deferred gathers stand behind the last bucket
                self._launch(journey)
        return buffers

    def _agree(self, journey: Journey, number: int) -> bool:
        """Tell whether all ranks have this number, and it is not 0. Collective."""
        device = torch.device("cpu") if self._is_on_ring(journey) else journey.tensor.device
        numbers = torch.zeros(self.world_size, dtype=torch.int64, device=device)
        numbers[self.rank] = number
        self._spread(Freight(numbers, Layout.equal(self.world_size, self.world_size)), journey.step).wait()
        return number > 0 and bool((numbers == number).all())

    def _spread(self, freight: Freight, step: Step) -> GradientFuture:
        """Begin to copy each owner's part to all ranks, behind the buckets so far."""
        tensor, layout = freight
        journey = Journey(
            index=-1,
            tensor=tensor,
            layout=layout,
            sequence=next(self._sequence),
            step=step,
            last=False,
            side=self._side(tensor.device),
        )
        journey.side.follow_compute()
        if self._is_on_ring(journey):
            self._put(
                self._reducer,
                journey,
                "broadcast of buffers",
                functools.partial(self._spread_on_ring, journey),
            )
        else:
            self._guarded(journey, "start", functools.partial(self._spread_natively, journey))
        return journey.future

    def _spread_on_ring(self, journey: Journey) -> None:
        self._gather_alone(journey, Freight(journey.tensor, journey.layout))
        self._finish(journey, None)

    def _spread_natively(self, journey: Journey) -> None:
        with journey.side.current():
            for work in self._native.all_gather(journey.tensor, journey.layout):
                work.wait()
        self._finish(journey, None)

    def _is_on_ring(self, journey: Journey) -> bool:
        return self._backends.get(journey.tensor.device.type) == "gloo"

    def _end_own_compute(self, journey: Journey) -> None:
        if journey.last:
            self._end_compute(journey.step, journey.turn)

    def _begin_alone(self, journey: Journey) -> None:
        if journey.owner_step is not None:
            journey.owner_step(journey.tensor)
        journey.side.follow_compute()
        self._end_own_compute(journey)
        self._end_kept_compute(journey)
        if journey.last_turn is None:
            self._arrive_half_way(journey, journey.tensor)
            self._complete(journey)
        else:
            self._put(self._gatherer, journey, "turn", functools.partial(self._end_alone, journey))

    def _begin_ring(self, journey: Journey) -> None:
        # Divided before the sum, as torch's allreduce_hook does: half precision must not overflow.
        journey.tensor.div_(self.world_size)
        buffer = self._buffer(journey, Freight(journey.tensor, journey.layout))
        gather = (
            self._ring.all_gather(buffer, journey.layout, journey.sequence) if journey.goes_back else None
        )
        if gather is not None and journey.side.copier is None:
            journey.take_owner_step(gather.offer_first)
        # Nothing to do in between: a chunk of the own part goes out again as soon as it is summed.
        at_once = gather is not None and journey.owner_step is None and not journey.deferred
        on_owned = gather.offer if gather is not None and at_once else self._teller(journey)
        scatter = self._ring.reduce_scatter(buffer, journey.layout, journey.sequence, on_owned)
        journey.trip = trip = RingTrip(buffer, scatter, gather)
        self._end_own_compute(journey)
        if journey.deferred:
            self._order.scatter_begins(journey)
        self._put(self._reducer, journey, "reduce-scatter", functools.partial(self._reduce, journey, trip))

    def _teller(self, journey: Journey) -> Callable[[Span], None] | None:
        """Return what tells the owner how much of its part has arrived, on the gatherer; None if it need not know."""
        arriving = journey.cargo.arriving if journey.cargo is not None else None
        if arriving is None or journey.side.copier is not None:
            return None
        start = journey.layout.part(self.rank).start

        def tell(span: Span) -> None:
            self._put(self._gatherer, journey, "owner's step", functools.partial(arriving, span.stop - start))

        return tell

    def _buffer(self, journey: Journey, freight: Freight, *, own_only: bool = False) -> HostBuffer:
        copier = journey.side.copier
        if copier is None:
            return HostBuffer(freight.tensor)
        with journey.side.current() if own_only else _AS_IT_IS:
            return StagedBuffer(freight.tensor, freight.layout, self.rank, copier, own_only=own_only)

    def _begin_native(self, journey: Journey) -> None:
        # All collectives are issued here, see [Note: native order].
        journey.tensor.div_(self.world_size)
        side = journey.side
        side.follow_compute()
        self._end_own_compute(journey)
        with side.current():
            for work in self._native.reduce_scatter(journey.tensor, journey.layout):
                work.wait()
            half_way = side.mark()
            part = journey.layout.part(self.rank)
            if journey.owner_step is not None:
                journey.owner_step(journey.tensor[part.start : part.stop])
            self._end_kept_compute(journey)
            if journey.deferred:
                self._arrive_half_way(journey, journey.tensor[part.start : part.stop])
                self._gather_natively_at_the_end(journey)
                return
            back = (
                journey.cargo.gather if journey.cargo is not None else Freight(journey.tensor, journey.layout)
            )
            for work in self._native.all_gather(*back) if back is not None else ():
                work.wait()
            whole_way = side.mark()
        if journey.last_turn is None:
            self._complete(journey, meets=False)  # on the host; the device is still at it
        else:
            end = functools.partial(self._end_native, journey, half_way, whole_way)
            self._put(self._gatherer, journey, "exchange", end)

    def _gather_natively_at_the_end(self, journey: Journey) -> None:
        """Gather the step's deferred buckets behind its last reduce-scatter, see [Note: native order]."""
        journey.step.deferred.append(journey)
        if not journey.last:
            return
        for each in reversed(journey.step.deferred):
            for work in self._native.all_gather(each.tensor, each.layout):
                work.wait()
            self._complete(each)

    def _put(self, worker: Worker, journey: Journey, doing: str, drive: Callable[[], None]) -> None:
        worker.put(functools.partial(self._guarded, journey, doing, drive, on_worker=True))

    # On the reducer.

    def _reduce(self, journey: Journey, trip: RingTrip) -> None:
        begin_s = time.monotonic()
        if trip.gather is not None and not journey.deferred:
            trip.gather.start()
        trip.scatter.start()
        trip.scatter.wait()
        self._spans.half("reduce_scatter", begin_s, journey)
        if journey.last_turn is not None and not journey.keeps_turn:
            journey.last_turn.request()
        if journey.deferred:
            part = journey.layout.part(self.rank)
            trip.buffer.landed(part)
            self._arrive_half_way(journey, journey.tensor[part.start : part.stop])
            self._order.scatter_ends(journey)
            self._put(self._gatherer, journey, "choice of the next gather", self._gather_next)
        else:
            self._put(self._gatherer, journey, "all-gather", functools.partial(self._gather, journey, trip))

    # On the gatherer.

    def _gather(self, journey: Journey, trip: RingTrip) -> None:
        begin_s = time.monotonic()
        if trip.gather is not None and journey.deferred:
            # Not before: gloo's thread pays dearly for every receive that waits long.
            trip.gather.start()
        if journey.owner_step is not None:
            trip.buffer.step(journey.layout.part(self.rank), journey.owner_step)
        self._end_kept_compute(journey)
        if journey.keeps_turn and journey.last_turn is not None:
            journey.last_turn.request()
        if trip.gather is not None and (journey.owner_step is not None or journey.deferred):
            trip.gather.offer_all()
        self._gather_buffer(journey, trip)
        self._spans.half("all_gather", begin_s, journey)
        self._complete(journey)
        if journey.deferred:
            self._order.gathered()

    def _gather_buffer(self, journey: Journey, trip: RingTrip) -> None:
        buffer, scatter, gather = trip
        if gather is not None:
            gather.wait()
        scatter.drain()
        back = journey.cargo.gather if journey.cargo is not None and gather is None else None
        if back is not None:
            buffer.release()
            self._gather_alone(journey, back)
            return
        if gather is not None:
            gather.drain()
        buffer.release()

    def _gather_alone(self, journey: Journey, freight: Freight) -> None:
        """Gather what was not reduced before."""
        buffer = self._buffer(journey, freight, own_only=True)
        gather = self._ring.all_gather(buffer, freight.layout, journey.sequence)
        gather.start()
        buffer.ready(freight.layout.part(self.rank))
        gather.offer_all()
        gather.wait()
        gather.drain()
        buffer.release()

    def _gather_next(self) -> None:
        """Gather one deferred bucket, see [Note: order of gathers]."""
        chosen = self._order.next()
        assert chosen.trip is not None
        self._guarded(chosen, "all-gather", functools.partial(self._gather, chosen, chosen.trip))

    def _end_alone(self, journey: Journey) -> None:
        if journey.turn is not None:
            journey.turn.request()
        self._complete(journey)

    def _end_native(
        self, journey: Journey, half_way: Callable[[], None], whole_way: Callable[[], None]
    ) -> None:
        # Alone the host runs ahead of the device as it would without a mutex.
        shared = journey.turn is not None and journey.turn.shared
        if journey.turn is not None and shared:
            half_way()
            journey.turn.request()
            whole_way()
        self._complete(journey, ahead=not shared)

    def _follow(self, journey: Journey) -> None:
        with journey.side.current():
            for future in journey.step.futures:
                result = future.wait()
            journey.tensor = result
            whole_way = journey.side.mark()
        shared = journey.turn is not None and journey.turn.shared
        if shared:
            whole_way()
        # Somebody else's hook: nobody knows for whose data it waited.
        self._complete(journey, ahead=not shared, meets=False)

    def _complete(self, journey: Journey, *, ahead: bool = False, meets: bool = True) -> None:
        """End a journey that succeeded; the step's last one takes the turn first.

        ``ahead``: the device may still be busy with it. ``meets``: it could not end before all ranks had begun.
        """
        if journey.cargo is not None:
            with journey.side.current():
                journey.cargo.unload()
            if not journey.last and journey.index >= 0 and journey.step.hold(journey):
                return
        if journey.last and not journey.deferred:
            done_s = time.monotonic()
            if journey.turn is not None:
                with journey.side.current():
                    journey.turn.acquire(ahead=ahead)
            self._turn_taken_s = time.monotonic()
            self._spans.exchange(journey, done_s, meets=meets and not ahead)
            self._spans.wait(journey.step.number + 1, done_s, self._turn_taken_s)
        for other in journey.step.let_go() if journey.last else ():
            self._finish(other, None)
        self._finish(journey, None)

    # On any thread.

    def _arrive_half_way(self, journey: Journey, own_part: torch.Tensor) -> None:
        if journey.deferred:
            with journey.side.current():
                journey.reduced.set_result(own_part)

    def _guarded(
        self, journey: Journey, doing: str, drive: Callable[[], None], *, on_worker: bool = False
    ) -> None:
        """Run ``drive`` unless the exchange has failed before; turn its exception into the failure of all."""
        with self._lock:
            failure = self._failure
            if failure is None and not journey.finished:
                self._in_flight.add(journey)
        if failure is not None:
            self._finish(journey, failure.error())
            return
        try:
            if on_worker:
                journey.side.adopt_thread()
                if torch.is_grad_enabled():
                    torch.set_grad_enabled(False)  # for the thread's whole life
            # Nearly every backward pass records nothing anyway.
            with torch.no_grad() if torch.is_grad_enabled() else _AS_IT_IS:
                drive()
        except Exception as error:
            self._fail(journey, doing, error)

    def _fail(self, journey: Journey, doing: str, cause: Exception) -> None:
        text = (
            f"rank {self.rank} of {self.world_size}: the {doing} of bucket {journey.index} failed: {cause}; "
            "no later exchange on this process group can succeed, restart the job"
        )
        with self._lock:
            failure = self._failure = self._failure or Failure(text, cause)
            doomed = list(self._in_flight)
        self._order.abandon()
        for other in doomed:
            self._finish(other, failure.error())

    def _finish(self, journey: Journey, error: CrossoverError | None) -> None:
        with self._lock:
            if journey.finished:
                return
            journey.finished = True
            self._in_flight.discard(journey)
        if error is not None:
            self._end_kept_compute(journey)
        with journey.side.current():
            if error is None or (not journey.deferred and journey.step.leave(error)):
                journey.future.set_result(journey.tensor if journey.result is None else journey.result)
                return
            for future in (journey.future, journey.reduced):
                if not future.done():
                    future.set_exception(error)  # type: ignore[arg-type]


def _refused(bucket: Bucket, step: Step, error: Exception) -> GradientFuture:
    """Answer a bucket that cannot be exchanged; nothing was sent, so the engine goes on."""
    future: GradientFuture = torch.futures.Future()
    if step.leave(error):
        future.set_result(bucket[0] if isinstance(bucket, tuple) else bucket.buffer())
    else:
        future.set_exception(error)  # type: ignore[arg-type]
    return future


def _is_last(bucket: Bucket) -> bool:
    return isinstance(bucket, tuple) or bucket.is_last()


def _backends(process_group: dist.ProcessGroup) -> dict[str, str]:
    """Return the name of the backend by device type."""
    config = dist.get_backend_config(process_group)
    return dict(pair.split(":", 1) for pair in str(config).split(",") if ":" in pair)

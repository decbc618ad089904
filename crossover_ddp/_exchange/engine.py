"""The journey of a bucket: reduce-scatter, the owner's step, all-gather, and the Future that DDP waits for.

The engine knows steps, turns and failures; how buckets travel is the matter of three ways: over gloo's messages
(`RingWay`), by collectives of a backend such as NCCL (`NativeWay`), or not at all (`AloneWay`). Each process group has
one engine.
"""

import contextlib
import functools
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, Final

import torch
import torch.distributed as dist

from crossover_ddp._system.worker import Worker
from crossover_ddp._timeline.record import Timeline
from crossover_ddp.errors import CrossoverError

from .collectives import NativeHalves, Ring
from .ddp_checks import Bucket, check_group, flat_gradients, largest_bytes
from .endings import end_engine, on_destruction, stop_workers
from .gathers import GatherOrder
from .layout import Layout
from .module_buffers import BufferCopy, ModuleBuffers
from .native_way import NativeWay
from .ring_way import RingWay
from .spans import ExchangeSpans, timeline_of
from .staging import Side
from .step import GradientFuture, Step, after_backward
from .transfer import Cargo, Deferred, Failure, Freight, Journey, OwnerStep, Turn
from .ways import AloneWay, Way

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
        self.spans = ExchangeSpans(timeline, process_group)
        self._group = weakref.ref(process_group)
        self._backends = _backends(process_group)
        self._checked: set[tuple[int, int]] = set()
        self._buffers = ModuleBuffers(self.rank)
        with Exchange._registry_lock:
            channel = next(Exchange._channels.setdefault(process_group, itertools.count()))
        ring = Ring.over(process_group, channel=channel, chunk_bytes=chunk_bytes)
        reducer, gatherer = Worker("crossover-reduce"), Worker("crossover-gather")
        self._follower = Worker(
            "crossover-follow"
        )  # waits for others' collectives, which may use this engine
        self._workers = reducer, gatherer, self._follower
        self._order = GatherOrder(ring)
        self._ring = RingWay(ring, self._order, reducer, gatherer)
        self._native = NativeWay(NativeHalves(process_group), gatherer)
        self._alone = AloneWay(gatherer)
        self._sequence = itertools.count()
        self._step = Step()
        self._sides: dict[torch.device, Side] = {}
        self._lock = threading.Lock()
        self._in_flight: set[Journey] = set()
        self._failure: Failure | None = None
        self._turn_taken_s: float | None = None
        on_destruction(process_group, self.spans.flush)  # what is registered first comes last
        # Also at interpreter exit, and when the group goes and with it the last reference to this engine.
        end = functools.partial(end_engine, self._workers, ring, self._order)
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
                self.finish(held, None)
        else:
            future = journey.future
            buffers = self._launch_with_buffers(journey, bucket, state)
            if buffers is not None:
                after_backward(buffers.claim_and_unpack)
        if _is_last(bucket):
            self._leave(step, turn)
        return future

    def reduce(self, cargo: Cargo, *, behind: bool = False) -> GradientFuture:
        """Begin to sum ``cargo`` into its owners, ahead of the next backward's buckets; a failure is theirs too.

        Args:
            cargo: nothing of it comes back.
            behind: only when all buckets so far are gathered, where ranks exchange messages on a ring.

        Returns:
            A Future that completes when the owner's step is done.
        """
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
        way = self._way(journey)
        self.guarded(journey, "start", functools.partial(way.trail if behind else way.begin, self, journey))
        return journey.future

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
            deferred = Deferred(journey, self.spans.timeline)
            future = journey.side.future()
            deferred.buffers = self._launch_with_buffers(journey, bucket, state)
            if deferred.buffers is not None:
                after_backward(deferred.buffers.claim)
            future.set_result(bucket.buffer())
        if _is_last(bucket):
            self._leave(step, turn)
        return future, deferred

    def gather_numbers(self, numbers: Sequence[float], device: torch.device) -> list[list[float]]:
        """Return every rank's numbers by rank, once all have asked; on a hook's thread.

        Args:
            numbers: as many on all ranks.
            device: of the buckets.

        Collective.
        """
        table = torch.zeros(
            self.world_size,
            len(numbers),
            dtype=torch.float64,
            device="cpu" if self._is_on_ring(device) else device,
        )
        table[self.rank] = torch.tensor(numbers)
        flat = table.flatten()
        self._spread(Freight(flat, Layout.equal(flat.numel(), self.world_size)), self._step).wait()
        return flat.view_as(table).tolist()

    def begin_compute(self) -> None:
        """Note that forward begins, for the timeline."""
        self._turn_taken_s = time.monotonic()

    def waited(self, since_s: float) -> None:
        """Note that forward waited for its turn until now, for the timeline."""
        self.spans.wait(self._step.number, since_s, time.monotonic())

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
        self.guarded(journey, "start", lambda: self.put(self._follower, journey, "wrapped hook", follow))
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
        self._give_turn_away(step, turn)

    def _give_turn_away(self, step: Step, turn: Turn | None) -> None:
        """Give the turn away, once a step.

        Always before a worker hears of the last bucket: it may take the next turn at any moment from then on.
        """
        if step.compute_ended or step.keeps_turn:
            return
        step.compute_ended = True
        self.spans.compute(step, self._turn_taken_s)
        if turn is not None:
            turn.release()

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
            largest_bytes=largest_bytes(bucket) if self.spans.timeline is not None else 0,
        )

    def _equal_layout(self, tensor: torch.Tensor) -> Layout:
        multiple = (
            1 if self._is_on_ring(tensor.device) else max(1, _NATIVE_ALIGNMENT_BYTES // tensor.itemsize)
        )
        return Layout.equal(tensor.numel(), self.world_size, multiple=multiple)

    def _check_group(self, bucket: dist.GradBucket, tensor: torch.Tensor) -> None:
        key = (bucket.index(), tensor.numel())
        group = self._group()
        if key not in self._checked and group is not None:
            check_group(bucket, group)
            self._checked.add(key)

    def _launch(self, journey: Journey) -> None:
        begin = functools.partial(self._way(journey).begin, self, journey)
        self.guarded(journey, "start", begin)

    def _way(self, journey: Journey) -> Way:
        if self.world_size == 1:
            return self._alone
        return self._ring if self._is_on_ring(journey.tensor.device) else self._native

    def _launch_with_buffers(
        self, journey: Journey, bucket: dist.GradBucket, state: object
    ) -> BufferCopy | None:
        """Launch a bucket, and with the step's last one the model's buffers; return these."""
        buffers = None
        if journey.last and self.world_size > 1 and isinstance(bucket, dist.GradBucket):
            buffers = self._buffers.copy(bucket, state, functools.partial(self._agree, journey.tensor.device))
        if buffers is None or self._is_on_ring(journey.tensor.device):
            self._launch(journey)
        if buffers is not None:
            # Rank 0 owns all of it.
            layout = Layout.of_lengths([buffers.flat.numel()] + [0] * (self.world_size - 1))
            buffers.arrived = self._spread(Freight(buffers.flat, layout), journey.step)
            if not self._is_on_ring(journey.tensor.device):  # deferred gathers stand behind the last bucket
                self._launch(journey)
        return buffers

    def _agree(self, device: torch.device, number: int) -> bool:
        """Tell whether all ranks have this number, and it is not 0. Collective."""
        everyone = self.gather_numbers([number], device)
        return number > 0 and everyone == [[number]] * self.world_size

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
        self.guarded(journey, "start", functools.partial(self._way(journey).spread, self, journey))
        return journey.future

    def _is_on_ring(self, device: torch.device) -> bool:
        return self._backends.get(device.type) == "gloo"

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
        self.complete(journey, ahead=not shared, meets=False)

    # For the ways; see `Engine`.

    def end_compute(self, journey: Journey) -> None:
        """See `Engine`."""
        if journey.last:
            self._give_turn_away(journey.step, journey.turn)

    def end_kept_compute(self, journey: Journey) -> None:
        """See `Engine`; also where the owners' steps will not be done."""
        if journey.last and journey.keeps_turn:
            journey.step.keeps_turn = False
            with journey.side.current():
                self._give_turn_away(journey.step, journey.turn)

    def put(self, worker: Worker, journey: Journey, doing: str, drive: Callable[[], None]) -> None:
        """See `Engine`."""
        worker.put(functools.partial(self.guarded, journey, doing, drive, on_worker=True))

    def guarded(
        self, journey: Journey, doing: str, drive: Callable[[], None], *, on_worker: bool = False
    ) -> None:
        """See `Engine`; after a failure nothing runs any more."""
        with self._lock:
            failure = self._failure
            if failure is None and not journey.finished:
                self._in_flight.add(journey)
        if failure is not None:
            self.finish(journey, failure.error())
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

    def complete(self, journey: Journey, *, ahead: bool = False, meets: bool = True) -> None:
        """See `Engine`."""
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
            self.spans.exchange(journey, done_s, meets=meets and not ahead)
            self.spans.wait(journey.step.number + 1, done_s, self._turn_taken_s)
        for other in journey.step.let_go() if journey.last else ():
            self.finish(other, None)
        self.finish(journey, None)

    def finish(self, journey: Journey, error: CrossoverError | None) -> None:
        """See `Engine`."""
        with self._lock:
            if journey.finished:
                return
            journey.finished = True
            self._in_flight.discard(journey)
        if error is not None:
            self.end_kept_compute(journey)
        with journey.side.current():
            if error is None or (not journey.deferred and journey.step.leave(error)):
                journey.future.set_result(journey.tensor if journey.result is None else journey.result)
                return
            for future in (journey.future, journey.reduced):
                if not future.done():
                    future.set_exception(error)  # type: ignore[arg-type]

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
            self.finish(other, failure.error())


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

"""What hooks call: a bucket goes in, and out comes the Future that DDP waits for.

One bucket on gloo, from hook to Future: `Exchange.submit` makes a `Transfer`; `RingWay.begin` posts its messages and,
with the step's last bucket, gives the turn away (the hook's thread); `RingWay._reduce` ends the reduce-scatter (the
reducer); `RingWay._gather` runs the owner's step and ends the all-gather (the gatherer); `Engine.complete` takes the
turn again and `Engine.finish` completes the Future. Every step runs in `Engine.guarded`, which makes an exception the
end of all transfers. By a backend's own collectives (`NativeWay`) everything but the end is on the hook's thread.
"""

import functools
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import ClassVar, Final

import torch.distributed as dist

from crossover_ddp._ddp.checks import Bucket
from crossover_ddp._ddp.module_buffers import BufferCopy
from crossover_ddp._engine.buckets import after_backward
from crossover_ddp._engine.endings import on_destruction, stop_workers
from crossover_ddp._engine.exchange import Exchange as Journeys
from crossover_ddp._engine.links import Channels
from crossover_ddp._engine.places import GradientFuture
from crossover_ddp._engine.spans import timeline_of
from crossover_ddp._engine.turns import Turn
from crossover_ddp._system.worker import Worker
from crossover_ddp._timeline.record import Timeline

from .collectives import Ring
from .engine import Engine
from .gathers import GatherOrder
from .layout import Layout
from .routes import Routes
from .spans import ExchangeSpans
from .step import Step
from .transfer import Deferred, MakeMessages, OwnerStep, Payload, Sharded, Transfer

_JOIN_TIMEOUT_S: Final = 5.0
_END_TIMEOUT_S: Final = 0.5
_LAST_GATHERS_TIMEOUT_S: Final = 30.0


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
        self.spans = ExchangeSpans(timeline)
        self.journeys = Journeys.of(process_group)
        self.buffers = self.journeys.buffers
        self._ring = ring = Ring.over(
            process_group, channel=Channels.take(process_group), chunk_bytes=chunk_bytes
        )
        reducer, gatherer = Worker("crossover-reduce"), Worker("crossover-gather")
        stepper = Worker("crossover-step")
        self._workers = reducer, stepper, gatherer
        self._order = GatherOrder(ring)
        self.routes = Routes(
            process_group, ring, self._order, reducer, gatherer, stepper, records=timeline is not None
        )
        self.engine = Engine(
            self.rank, self.world_size, self.spans, self._order.abandon, self.journeys.records
        )
        self._step = Step()
        on_destruction(process_group, self.spans.flush)  # what is registered first comes last
        # Also at interpreter exit, and when the group goes and with it the engine, which transfers under way hold.
        end = functools.partial(_end, self._workers, ring, self._order)
        weakref.finalize(self.engine, end)
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
        payload: Callable[[], Payload] | None = None,
        messages: MakeMessages | None = None,
        state: object = None,
    ) -> GradientFuture:
        """Begin to average ``bucket``; the Future holds the bucket's own buffer with the mean over the ranks.

        Args:
            bucket: what DDP gave to the hook.
            turn: given away after the last bucket, taken again before the last Future completes.
            owner_step: changes the averaged own part in place, between the halves; None changes nothing.
            layout: who owns which part; None cuts equally.
            payload: returns what travels instead of the buffer, which its ``unload`` fills; the Futures of all such
                buckets of a step complete together, also if ``payload`` raises.
            messages: returns, given the payload if there is one, what travels straight to owners instead of the buffer
                or payload, which its ``unload`` fills; None: these. Called with two ranks or more.
            state: that the hook was registered with; see `ModuleBuffers`.
        """
        step = self._enter(bucket)
        try:
            carried = None if payload is None else payload()
            direct = messages(carried) if messages is not None and self.world_size > 1 else None
            transfer = self.routes.of_bucket(bucket, step, turn)
            transfer.messages = direct
            transfer.owner_step, transfer.layout = owner_step, layout or transfer.layout
            if carried is not None:
                transfer.carry(carried)
        except Exception as error:  # whatever it is, it must not leave the hook
            future = step.refuse(bucket, error)
            for held in step.let_go(refused=True) if _is_last(bucket) else ():
                self.engine.finish(held, None)
        else:
            future = transfer.future
            buffers = self._launch(transfer, bucket, state)
            if buffers is not None:
                after_backward(buffers.claim_and_unpack)
        if _is_last(bucket):
            self._leave(step, turn)
        return future

    def reduce(self, payload: Payload, *, behind: bool = False) -> GradientFuture:
        """Begin to sum ``payload`` into its owners, ahead of the next backward's buckets; a failure is theirs too.

        The Future completes when the owner's step is done.

        Args:
            payload: nothing of it comes back.
            behind: only when all buckets so far are gathered, where ranks exchange messages on a ring.
        """
        transfer = self.routes.of_tensor(payload.scatter, self._step)
        transfer.carry(payload)
        self._begin(transfer, behind=behind)
        return transfer.future

    def defer(
        self,
        bucket: dist.GradBucket,
        *,
        turn: Turn | None = None,
        urgency: int = 0,
        payload: Callable[[], Payload],
        state: object = None,
    ) -> tuple[GradientFuture, Deferred]:
        """Begin to average ``bucket`` in the background; backward does not wait for it.

        Args:
            bucket: what DDP gave to the hook; its gradients must be views of its buffer.
            turn: given away after the last bucket; the caller takes it again.
            urgency: the gather comes before those of the same step with a greater one. Only rank 0's counts.
            payload: see `submit`; each completes by itself, the last one after all steps of this rank.
            state: that the hook was registered with; see `ModuleBuffers`.

        Returns:
            The Future for DDP, complete already, and where to wait. Raises what refuses the bucket.
        """
        step = self._enter(bucket)
        try:
            transfer = self.routes.of_bucket(bucket, step, turn)
            # Its own version counter: the user's changes show in the gradients', ours do not.
            transfer.tensor, transfer.urgency = transfer.tensor.data, urgency
            transfer.carry(payload())
            deferred = Deferred(transfer, self.spans.timeline)
            future = transfer.side.future()
            deferred.buffers = self._launch(transfer, bucket, state)
            if deferred.buffers is not None:
                after_backward(deferred.buffers.claim)
            future.set_result(bucket.buffer())
        finally:
            if _is_last(bucket):
                self._leave(step, turn)
        return future, deferred

    def begin_compute(self) -> None:
        """Note that forward begins, for the timeline."""
        self.engine.begin_compute()

    def waited(self, since_s: float) -> None:
        """Note that forward waited for its turn until now, for the timeline."""
        self.spans.wait(self._step.number, since_s, time.monotonic())

    def close(self) -> None:
        """End the threads, after the buckets in flight. Later buckets fail. May be called again."""
        with Exchange._registry_lock:
            for group, engine in list(Exchange._engines.items()):
                if engine is self:
                    del Exchange._engines[group]
        stop_workers(self._workers, _JOIN_TIMEOUT_S)
        Channels.give_back(self._ring.group(), self._ring.channel)

    # On the hook's thread.

    def _enter(self, bucket: dist.GradBucket) -> Step:
        step = self._step
        step.watch(is_last=_is_last(bucket))
        return step

    def _leave(self, step: Step, turn: Turn | None) -> None:
        self._step = Step(step.number + 1)
        self.engine.give_turn_away(step, turn)
        self.routes.trim()

    def _launch(self, transfer: Transfer, bucket: dist.GradBucket, state: object) -> BufferCopy | None:
        """Launch a bucket, and with the step's last one the model's buffers; return these."""
        device, buffers = transfer.tensor.device, None
        if transfer.last and self.world_size > 1 and isinstance(bucket, dist.GradBucket):
            buffers = self.buffers.copy(bucket, state, functools.partial(self.journeys.have_all, device))
        if buffers is None:
            self._begin(transfer)
            return None
        layout = Layout.of_lengths([buffers.flat.numel()] + [0] * (self.world_size - 1))  # rank 0 owns it
        sharded = Sharded(buffers.flat, layout)
        if self.routes.is_on_ring(device):
            self._begin(transfer)
            buffers.arrived = self.spread(sharded)
        else:  # the last bucket is followed by the deferred gathers
            buffers.arrived = self.spread(sharded)
            self._begin(transfer)
        return buffers

    def _begin(self, transfer: Transfer, *, behind: bool = False) -> None:
        device = transfer.tensor.device
        if transfer.messages is not None and self.routes.is_on_ring(device):
            begin = functools.partial(self.routes.direct.begin, self.engine, transfer)
        else:
            way = self.routes.way(device)
            begin = functools.partial(way.trail if behind else way.begin, self.engine, transfer)
        self.engine.guarded(transfer, "start", begin)

    def spread(self, sharded: Sharded) -> GradientFuture:
        """Begin to copy each owner's part to all ranks, behind the buckets so far. **Collective**."""
        transfer = self.routes.of_tensor(sharded, self._step)
        transfer.side.follow_compute()
        way = self.routes.way(transfer.tensor.device)
        spread = functools.partial(way.spread, self.engine, transfer)
        self.engine.guarded(transfer, "start", spread)
        return transfer.future


def _is_last(bucket: Bucket) -> bool:
    return isinstance(bucket, tuple) or bucket.is_last()


def _end(workers: Sequence[Worker], ring: Ring, order: GatherOrder) -> None:
    """End all threads although a bucket may be in flight that no peer will ever answer.

    Deferred buckets get more time: this rank may leave right after the last step, while another one still reads
    its parameters and needs our parts of the gradients. A peer that is gone ends that wait at once.

    A thread that gloo lets go while the interpreter is being torn down would take the process with it
    ("terminate called without an active exception"), so the threads must be gone before.
    """
    if not stop_workers(workers, _LAST_GATHERS_TIMEOUT_S if order.busy else _END_TIMEOUT_S):
        order.abandon()
        ring.interrupt()
        stop_workers(workers, _END_TIMEOUT_S)

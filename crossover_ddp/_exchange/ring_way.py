"""Buckets over point-to-point messages on a ring: gloo.

[Note: two workers] Somebody must add what arrives and pass it on. Two threads do that, the *reducer*
and the *gatherer*, so that the reduce-scatter of the next bucket is under way while the parts of this one
are gathered. Both block in gloo or on an empty queue and never poll; each wakes up once per chunk (the
gatherer of two ranks once per bucket). They are daemons, are started by the first bucket that needs them,
and end with the engine. Both work strictly in the order of the buckets, which is the same on all ranks, so
that no rank waits for a bucket that a peer will not come to.

[Note: long steps] An owner's step that takes long, such as Muon's, would hold up the gathers of the buckets before
its own on the gatherer of this rank, and so of all ranks. It runs on a third thread, the *stepper*. The gather of the
bucket takes its place in the gatherer's order all the same, and waits there for the step: the order of gathers must
not depend on how long steps take.

[Note: deferred steps] The step of a deferred bucket runs on the stepper, too, as soon as the bucket is reduced. The
bucket may be chosen for its gather when that is done. All of a backward's steps are done before its last bucket is
gathered, so that it can carry what they have found.
"""

import contextlib
import functools
import threading
import time
from typing import Final

from crossover_ddp._system.worker import Worker

from .collectives import HostBuffer, Ring
from .engine import Engine
from .gathers import GatherOrder
from .staging import StagedBuffer
from .transfer import RingHalves, Sharded, Transfer
from .ways import arrive_half_way, gather_next

_AS_IT_IS: Final = contextlib.nullcontext()


class RingWay:
    """See the module.

    Args:
        ring: whose ranks exchange.
        order: of deferred gathers.
        reducer, gatherer: see [Note: two workers].
        stepper: see [Note: long steps].
    """

    def __init__(
        self, ring: Ring, order: GatherOrder, reducer: Worker, gatherer: Worker, stepper: Worker
    ) -> None:
        self._ring = ring
        self._order = order
        self._reducer = reducer
        self._gatherer = gatherer
        self._stepper = stepper

    def begin(self, engine: Engine, transfer: Transfer) -> None:
        """See `Way`."""
        # Divided before the sum, as torch's allreduce_hook does: half precision must not overflow.
        transfer.tensor.div_(engine.world_size)
        buffer = self._buffer(transfer, Sharded(transfer.tensor, transfer.layout))
        gather = (
            self._ring.all_gather(buffer, transfer.layout, transfer.sequence) if transfer.goes_back else None
        )
        # Nothing to do in between: a chunk of the own part goes out again as soon as it is summed.
        at_once = gather is not None and transfer.owner_step is None and not transfer.deferred
        on_owned = gather.offer if gather is not None and at_once else None
        scatter = self._ring.reduce_scatter(buffer, transfer.layout, transfer.sequence, on_owned)
        transfer.halves = halves = RingHalves(buffer, scatter, gather)
        engine.end_compute(transfer)
        if transfer.is_gathered_later:
            self._order.scatter_begins(transfer)
        engine.put(
            self._reducer,
            transfer,
            "reduce-scatter",
            functools.partial(self._reduce, engine, transfer, halves),
        )

    def trail(self, engine: Engine, transfer: Transfer) -> None:
        """See `Way`. On the gatherer: on the reducer it would be under way beside the last gathers."""
        transfer.tensor.div_(engine.world_size)
        buffer = self._buffer(transfer, Sharded(transfer.tensor, transfer.layout))
        scatter = self._ring.reduce_scatter(buffer, transfer.layout, transfer.sequence, None)
        transfer.halves = halves = RingHalves(buffer, scatter, None)
        # By way of the reducer, which hands out the gathers: only its order is that of all ranks.
        trail = functools.partial(self._trail, engine, transfer, halves)
        hand_on = functools.partial(engine.put, self._gatherer, transfer, "reduce-scatter", trail)
        engine.put(self._reducer, transfer, "reduce-scatter", hand_on)

    def spread(self, engine: Engine, transfer: Transfer) -> None:
        """See `Way`."""
        engine.put(
            self._reducer,
            transfer,
            "broadcast of buffers",
            functools.partial(self._gather_and_finish, engine, transfer),
        )

    def _buffer(self, transfer: Transfer, sharded: Sharded, *, own_only: bool = False) -> HostBuffer:
        copier = transfer.side.copier
        if copier is None:
            return HostBuffer(sharded.tensor)
        with transfer.side.current() if own_only else _AS_IT_IS:
            return StagedBuffer(sharded.tensor, sharded.layout, self._ring.rank, copier, own_only=own_only)

    # On the reducer.

    def _reduce(self, engine: Engine, transfer: Transfer, halves: RingHalves) -> None:
        begin_s = time.monotonic()
        if halves.gather is not None and not transfer.deferred:
            halves.gather.start()
        halves.scatter.start()
        halves.scatter.wait()
        engine.spans.half("reduce_scatter", begin_s, transfer)
        if transfer.last_turn is not None and not transfer.keeps_turn:
            transfer.last_turn.request()
        if transfer.deferred:
            part = transfer.layout.part(self._ring.rank)
            halves.buffer.landed(part)
            arrive_half_way(transfer, transfer.tensor[part.start : part.stop])
        if transfer.is_gathered_later:
            stepped = None if transfer.owner_step is None else threading.Event()
            transfer.gather = functools.partial(self._gather, engine, transfer, halves, stepped)
            self._order.scatter_ends(transfer, ready=stepped is None)
            if stepped is not None:
                self._step_apart(engine, transfer, halves, stepped)
            following = functools.partial(gather_next, engine, self._order)
            engine.put(self._gatherer, transfer, "choice of the next gather", following)
        else:
            stepped = self._long_step(engine, transfer, halves)
            gather = functools.partial(self._gather, engine, transfer, halves, stepped)
            engine.put(self._gatherer, transfer, "all-gather", gather)

    def _long_step(self, engine: Engine, transfer: Transfer, halves: RingHalves) -> threading.Event | None:
        """Have a step that takes long run on the stepper; return what is set at its end, None for other steps."""
        if not transfer.has_long_step:
            return None
        over = threading.Event()
        self._step_apart(engine, transfer, halves, over)
        return over

    def _step_apart(
        self, engine: Engine, transfer: Transfer, halves: RingHalves, over: threading.Event
    ) -> None:
        """Have the owner's step run on the stepper; ``over`` is set when it is over, failed or not."""

        def run() -> None:
            try:
                step = functools.partial(self._step, transfer, halves)
                engine.guarded(transfer, "owner's step", step, on_worker=True)
            finally:
                over.set()
                if transfer.is_gathered_later:  # see [Note: deferred steps]
                    self._order.step_ends(transfer)

        self._stepper.put(run)

    def _gather_and_finish(self, engine: Engine, transfer: Transfer) -> None:
        self._gather_alone(transfer, Sharded(transfer.tensor, transfer.layout))
        engine.finish(transfer, None)

    # On the gatherer.

    def _trail(self, engine: Engine, transfer: Transfer, halves: RingHalves) -> None:
        begin_s = time.monotonic()
        halves.scatter.start()
        halves.scatter.wait()
        engine.spans.half("reduce_scatter", begin_s, transfer)
        stepped = self._long_step(engine, transfer, halves)
        self._gather(engine, transfer, halves, stepped)

    def _gather(
        self,
        engine: Engine,
        transfer: Transfer,
        halves: RingHalves,
        stepped: threading.Event | None = None,
    ) -> None:
        begin_s = time.monotonic()
        if halves.gather is not None and transfer.deferred:
            # Not before: gloo's thread pays dearly for every receive that waits long.
            halves.gather.start()
        if stepped is not None:
            stepped.wait()  # the stepper ends what it has begun, and does not begin after a failure
            if transfer.finished:
                return
        else:
            self._step(transfer, halves)
        engine.end_kept_compute(transfer)
        if transfer.keeps_turn and transfer.last_turn is not None:
            transfer.last_turn.request()
        if halves.gather is not None and (transfer.owner_step is not None or transfer.deferred):
            halves.gather.offer_all()
        self._gather_buffer(transfer, halves)
        engine.spans.half("all_gather", begin_s, transfer)
        engine.complete(transfer)
        if transfer.is_gathered_later:
            self._order.gathered()

    def _step(self, transfer: Transfer, halves: RingHalves) -> None:
        if transfer.owner_step is not None:
            halves.buffer.step(transfer.layout.part(self._ring.rank), transfer.owner_step)

    def _gather_buffer(self, transfer: Transfer, halves: RingHalves) -> None:
        buffer, scatter, gather = halves
        if gather is not None:
            gather.wait()
        scatter.drain()
        back = transfer.payload.gather if transfer.payload is not None and gather is None else None
        if gather is not None:
            gather.drain()
        buffer.release()
        if back is not None:
            self._gather_alone(transfer, back)

    def _gather_alone(self, transfer: Transfer, sharded: Sharded) -> None:
        """Gather what was not reduced before."""
        buffer = self._buffer(transfer, sharded, own_only=True)
        gather = self._ring.all_gather(buffer, sharded.layout, transfer.sequence)
        gather.start()
        buffer.ready(sharded.layout.part(self._ring.rank))
        gather.offer_all()
        gather.wait()
        gather.drain()
        buffer.release()

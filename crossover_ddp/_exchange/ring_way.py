"""Buckets over point-to-point messages on a ring: gloo.

[Note: two workers] Somebody must add what arrives and pass it on. Two threads do that, the *reducer*
and the *gatherer*, so that the reduce-scatter of the next bucket is under way while the parts of this one
are gathered. Both block in gloo or on an empty queue and never poll; each wakes up once per chunk (the
gatherer of two ranks once per bucket). They are daemons, are started by the first bucket that needs them,
and end with the engine. Both work strictly in the order of the buckets, which is the same on all ranks, so
that no rank waits for a bucket that a peer will not come to.
"""

import contextlib
import functools
import time
from collections.abc import Callable
from typing import Final

from crossover_ddp._system.worker import Worker

from .collectives import HostBuffer, Ring
from .gathers import GatherOrder
from .layout import Span
from .staging import StagedBuffer
from .transfer import Freight, Journey, RingTrip
from .ways import Engine, arrive_half_way

_AS_IT_IS: Final = contextlib.nullcontext()


class RingWay:
    """See the module.

    Args:
        ring: whose ranks exchange.
        order: of deferred gathers.
        reducer, gatherer: see [Note: two workers].
    """

    def __init__(self, ring: Ring, order: GatherOrder, reducer: Worker, gatherer: Worker) -> None:
        self._ring = ring
        self._order = order
        self._reducer = reducer
        self._gatherer = gatherer

    def begin(self, engine: Engine, journey: Journey) -> None:
        """See `Way`."""
        # Divided before the sum, as torch's allreduce_hook does: half precision must not overflow.
        journey.tensor.div_(engine.world_size)
        buffer = self._buffer(journey, Freight(journey.tensor, journey.layout))
        gather = (
            self._ring.all_gather(buffer, journey.layout, journey.sequence) if journey.goes_back else None
        )
        if gather is not None and journey.side.copier is None:
            journey.take_owner_step(gather.offer_first)
        # Nothing to do in between: a chunk of the own part goes out again as soon as it is summed.
        at_once = gather is not None and journey.owner_step is None and not journey.deferred
        on_owned = gather.offer if gather is not None and at_once else self._teller(engine, journey)
        scatter = self._ring.reduce_scatter(buffer, journey.layout, journey.sequence, on_owned)
        journey.trip = trip = RingTrip(buffer, scatter, gather)
        engine.end_compute(journey)
        if journey.deferred:
            self._order.scatter_begins(journey)
        engine.put(
            self._reducer, journey, "reduce-scatter", functools.partial(self._reduce, engine, journey, trip)
        )

    def trail(self, engine: Engine, journey: Journey) -> None:
        """See `Way`. On the gatherer: on the reducer it would be under way beside the last gathers."""
        journey.tensor.div_(engine.world_size)
        buffer = self._buffer(journey, Freight(journey.tensor, journey.layout))
        scatter = self._ring.reduce_scatter(buffer, journey.layout, journey.sequence, None)
        journey.trip = trip = RingTrip(buffer, scatter, None)
        # By way of the reducer, which hands out the gathers: only its order is that of all ranks.
        trail = functools.partial(self._trail, engine, journey, trip)
        hand_on = functools.partial(engine.put, self._gatherer, journey, "reduce-scatter", trail)
        engine.put(self._reducer, journey, "reduce-scatter", hand_on)

    def spread(self, engine: Engine, journey: Journey) -> None:
        """See `Way`."""
        engine.put(
            self._reducer,
            journey,
            "broadcast of buffers",
            functools.partial(self._gather_and_finish, engine, journey),
        )

    def _teller(self, engine: Engine, journey: Journey) -> Callable[[Span], None] | None:
        """Return what tells the owner how much of its part has arrived, on the gatherer; None if it need not know."""
        arriving = journey.cargo.arriving if journey.cargo is not None else None
        if arriving is None or journey.side.copier is not None:
            return None
        start = journey.layout.part(self._ring.rank).start

        def tell(span: Span) -> None:
            told = functools.partial(arriving, span.stop - start)
            engine.put(self._gatherer, journey, "owner's step", told)

        return tell

    def _buffer(self, journey: Journey, freight: Freight, *, own_only: bool = False) -> HostBuffer:
        copier = journey.side.copier
        if copier is None:
            return HostBuffer(freight.tensor)
        with journey.side.current() if own_only else _AS_IT_IS:
            return StagedBuffer(freight.tensor, freight.layout, self._ring.rank, copier, own_only=own_only)

    # On the reducer.

    def _reduce(self, engine: Engine, journey: Journey, trip: RingTrip) -> None:
        begin_s = time.monotonic()
        if trip.gather is not None and not journey.deferred:
            trip.gather.start()
        trip.scatter.start()
        trip.scatter.wait()
        engine.spans.half("reduce_scatter", begin_s, journey)
        if journey.last_turn is not None and not journey.keeps_turn:
            journey.last_turn.request()
        if journey.deferred:
            part = journey.layout.part(self._ring.rank)
            trip.buffer.landed(part)
            arrive_half_way(journey, journey.tensor[part.start : part.stop])
            self._order.scatter_ends(journey)
            following = functools.partial(self._gather_next, engine)
            engine.put(self._gatherer, journey, "choice of the next gather", following)
        else:
            gather = functools.partial(self._gather, engine, journey, trip)
            engine.put(self._gatherer, journey, "all-gather", gather)

    def _gather_and_finish(self, engine: Engine, journey: Journey) -> None:
        self._gather_alone(journey, Freight(journey.tensor, journey.layout))
        engine.finish(journey, None)

    # On the gatherer.

    def _trail(self, engine: Engine, journey: Journey, trip: RingTrip) -> None:
        begin_s = time.monotonic()
        trip.scatter.start()
        trip.scatter.wait()
        engine.spans.half("reduce_scatter", begin_s, journey)
        self._gather(engine, journey, trip)

    def _gather(self, engine: Engine, journey: Journey, trip: RingTrip) -> None:
        begin_s = time.monotonic()
        if trip.gather is not None and journey.deferred:
            # Not before: gloo's thread pays dearly for every receive that waits long.
            trip.gather.start()
        if journey.owner_step is not None:
            trip.buffer.step(journey.layout.part(self._ring.rank), journey.owner_step)
        engine.end_kept_compute(journey)
        if journey.keeps_turn and journey.last_turn is not None:
            journey.last_turn.request()
        if trip.gather is not None and (journey.owner_step is not None or journey.deferred):
            trip.gather.offer_all()
        self._gather_buffer(journey, trip)
        engine.spans.half("all_gather", begin_s, journey)
        engine.complete(journey)
        if journey.deferred:
            self._order.gathered()

    def _gather_buffer(self, journey: Journey, trip: RingTrip) -> None:
        buffer, scatter, gather = trip
        if gather is not None:
            gather.wait()
        scatter.drain()
        back = journey.cargo.gather if journey.cargo is not None and gather is None else None
        if gather is not None:
            gather.drain()
        buffer.release()
        if back is not None:
            self._gather_alone(journey, back)

    def _gather_alone(self, journey: Journey, freight: Freight) -> None:
        """Gather what was not reduced before."""
        buffer = self._buffer(journey, freight, own_only=True)
        gather = self._ring.all_gather(buffer, freight.layout, journey.sequence)
        gather.start()
        buffer.ready(freight.layout.part(self._ring.rank))
        gather.offer_all()
        gather.wait()
        gather.drain()
        buffer.release()

    def _gather_next(self, engine: Engine) -> None:
        """Gather one deferred bucket, see [Note: order of gathers]."""
        chosen = self._order.next()
        assert chosen.trip is not None
        engine.guarded(chosen, "all-gather", functools.partial(self._gather, engine, chosen, chosen.trip))

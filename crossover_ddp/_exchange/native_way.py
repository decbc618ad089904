"""Buckets by the backend's own collectives: NCCL and its like.

[Note: native order] Every collective is issued by the thread that runs the hook: the model's own collectives
(SyncBatchNorm, buffer broadcasts) share the communicator, and only the program's order is the same on all ranks.
Deferred gathers follow the step's last reduce-scatter, last bucket first.
"""

import functools
from collections.abc import Callable

from crossover_ddp._system.worker import Worker

from .collectives import NativeHalves
from .transfer import Freight, Journey
from .ways import Engine, arrive_half_way


class NativeWay:
    """See the module.

    Args:
        halves: the collectives.
        gatherer: where the end of a step is waited for.
    """

    def __init__(self, halves: NativeHalves, gatherer: Worker) -> None:
        self._halves = halves
        self._gatherer = gatherer

    def begin(self, engine: Engine, journey: Journey) -> None:
        """See `Way`."""
        journey.tensor.div_(engine.world_size)
        side = journey.side
        side.follow_compute()
        engine.end_compute(journey)
        with side.current():
            for work in self._halves.reduce_scatter(journey.tensor, journey.layout):
                work.wait()
            half_way = side.mark()
            part = journey.layout.part(engine.rank)
            own_part = journey.tensor[part.start : part.stop]
            if journey.owner_step is not None:
                journey.owner_step(own_part)
            engine.end_kept_compute(journey)
            if journey.deferred:
                arrive_half_way(journey, own_part)
                self._gather_at_the_end(engine, journey)
                return
            back = (
                journey.cargo.gather if journey.cargo is not None else Freight(journey.tensor, journey.layout)
            )
            for work in self._halves.all_gather(*back) if back is not None else ():
                work.wait()
            whole_way = side.mark()
        if journey.last_turn is None:
            engine.complete(journey, meets=False)  # on the host; the device is still at it
        else:
            end = functools.partial(self._end, engine, journey, half_way, whole_way)
            engine.put(self._gatherer, journey, "exchange", end)

    trail = begin

    def spread(self, engine: Engine, journey: Journey) -> None:
        """See `Way`."""
        with journey.side.current():
            for work in self._halves.all_gather(journey.tensor, journey.layout):
                work.wait()
        engine.finish(journey, None)

    def _gather_at_the_end(self, engine: Engine, journey: Journey) -> None:
        """Gather the step's deferred buckets behind its last reduce-scatter, see [Note: native order]."""
        journey.step.deferred.append(journey)
        if not journey.last:
            return
        for each in reversed(journey.step.deferred):
            for work in self._halves.all_gather(each.tensor, each.layout):
                work.wait()
            each.whole_way = each.side.mark()
            engine.complete(each)

    @staticmethod
    def _end(
        engine: Engine, journey: Journey, half_way: Callable[[], None], whole_way: Callable[[], None]
    ) -> None:
        # Alone the host runs ahead of the device as it would without a mutex.
        shared = journey.turn is not None and journey.turn.shared
        if journey.turn is not None and shared:
            half_way()
            journey.turn.request()
            whole_way()
        engine.complete(journey, ahead=not shared)

"""Buckets by the backend's own collectives: NCCL and its like.

[Note: native order] Every collective is issued by the thread that runs the hook: the model's own collectives
(SyncBatchNorm, buffer broadcasts) share the communicator, and only the program's order is the same on all ranks.
Deferred gathers follow the step's last reduce-scatter, last bucket first.

[Note: messages by collectives] Where messages travel in a bucket's place, which nobody can add on their way, an
all-to-all brings them to their owners, and what owners make of them is gathered. Both need no answer of the host.
"""

import functools
from collections.abc import Callable

from crossover_ddp._system.worker import Worker

from .collectives import NativeHalves
from .engine import Engine
from .transfer import Sharded, Transfer
from .ways import arrive_half_way


class NativeWay:
    """See the module.

    Args:
        halves: the collectives.
        gatherer: where the end of a step is waited for.
    """

    def __init__(self, halves: NativeHalves, gatherer: Worker) -> None:
        self._halves = halves
        self._gatherer = gatherer

    def begin(self, engine: Engine, transfer: Transfer) -> None:
        """See `Way`."""
        if transfer.messages is None:
            transfer.tensor.div_(engine.world_size)
        side = transfer.side
        side.follow_compute()
        engine.end_compute(transfer)
        with side.current():
            self._bring_to_owners(transfer)
            half_way = side.mark()
            part = transfer.layout.part(engine.rank)
            own_part = transfer.tensor[part.start : part.stop]
            if transfer.owner_step is not None:
                transfer.owner_step(own_part)
            engine.end_kept_compute(transfer)
            if transfer.deferred:
                arrive_half_way(transfer, own_part)
                self._gather_at_the_end(engine, transfer)
                return
            self._bring_back(transfer)
            whole_way = side.mark()
        if transfer.last_turn is None:
            engine.complete(transfer)  # on the host; the device is still at it
        else:
            end = functools.partial(self._end, engine, transfer, half_way, whole_way)
            engine.put(self._gatherer, transfer, "exchange", end)

    trail = begin

    def spread(self, engine: Engine, transfer: Transfer) -> None:
        """See `Way`."""
        with transfer.side.current():
            for work in self._halves.all_gather(transfer.tensor, transfer.layout):
                work.wait()
        engine.finish(transfer, None)

    def _bring_to_owners(self, transfer: Transfer) -> None:
        messages = transfer.messages
        if messages is None:
            for work in self._halves.reduce_scatter(transfer.tensor, transfer.layout):
                work.wait()
            return
        self._halves.all_to_all(*messages.incoming, *messages.outgoing).wait()
        messages.step()

    def _bring_back(self, transfer: Transfer) -> None:
        back: Sharded | None = Sharded(transfer.tensor, transfer.layout)
        if transfer.messages is not None:
            back = transfer.messages.gather
        elif transfer.payload is not None:
            back = transfer.payload.gather
        for work in self._halves.all_gather(*back) if back is not None else ():
            work.wait()
        if transfer.messages is not None:
            transfer.messages.unload()

    def _gather_at_the_end(self, engine: Engine, transfer: Transfer) -> None:
        """Gather the step's deferred buckets behind its last reduce-scatter, see [Note: native order]."""
        transfer.step.deferred.append(transfer)
        if not transfer.last:
            return
        for each in reversed(transfer.step.deferred):
            self._bring_back(each)
            each.whole_way = each.side.mark()
            engine.complete(each)

    @staticmethod
    def _end(
        engine: Engine, transfer: Transfer, half_way: Callable[[], None], whole_way: Callable[[], None]
    ) -> None:
        # Alone the host runs ahead of the device as it would without a mutex.
        shared = transfer.turn is not None and transfer.turn.shared
        if transfer.turn is not None and shared:
            half_way()
            transfer.turn.request()
            whole_way()
        engine.complete(transfer, ahead=not shared)

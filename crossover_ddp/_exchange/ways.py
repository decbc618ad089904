"""How a bucket travels: what is asked of a way, and the way of a rank alone.

The engine hands a transfer to its way on the hook's thread. The way launches it there, and completes it on any thread.
"""

import functools
from typing import Protocol

import torch

from crossover_ddp._system.worker import Worker

from .engine import Engine
from .gathers import GatherOrder
from .transfer import Transfer


class Way(Protocol):
    """How buckets travel between ranks."""

    def begin(self, engine: Engine, transfer: Transfer) -> None:
        """Launch a bucket. On the hook's thread."""

    def trail(self, engine: Engine, transfer: Transfer) -> None:
        """Launch a transfer of which nothing comes back, behind the buckets so far; the step does not wait for it."""

    def spread(self, engine: Engine, transfer: Transfer) -> None:
        """Begin to copy each owner's part to all ranks, behind the buckets so far. On the hook's thread."""


class AloneWay:
    """One rank: its gradients are the mean.

    Args:
        worker: where the turn is waited for.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def begin(self, engine: Engine, transfer: Transfer) -> None:
        """See `Way`."""
        if transfer.owner_step is not None:
            transfer.owner_step(transfer.tensor)
        transfer.side.follow_compute()
        engine.end_compute(transfer)
        engine.end_kept_compute(transfer)
        if transfer.last_turn is None:
            arrive_half_way(transfer, transfer.tensor)
            engine.complete(transfer)
        else:
            engine.put(self._worker, transfer, "turn", functools.partial(self._end, engine, transfer))

    trail = begin

    def spread(self, engine: Engine, transfer: Transfer) -> None:
        """See `Way`."""
        engine.finish(transfer, None)

    @staticmethod
    def _end(engine: Engine, transfer: Transfer) -> None:
        if transfer.turn is not None:
            transfer.turn.request()
        engine.complete(transfer)


def arrive_half_way(transfer: Transfer, own_part: torch.Tensor) -> None:
    """Note that the own part of a deferred bucket holds the mean."""
    if transfer.deferred:
        with transfer.side.current():
            transfer.reduced.set_result(own_part)


def gather_next(engine: Engine, order: GatherOrder) -> None:
    """Gather one deferred bucket, see [Note: order of gathers]. On the gatherer."""
    chosen = order.next()
    gather, chosen.gather = chosen.gather, None  # which holds its transfer
    assert gather is not None
    engine.guarded(chosen, "all-gather", gather)

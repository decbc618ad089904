"""How a bucket travels: what the engine asks of a way, what a way asks of the engine, and the way of a rank alone.

A way is told of a journey on the hook's thread, launches it there, and completes it from whichever thread it likes.
"""

import functools
from collections.abc import Callable
from typing import Protocol

import torch

from crossover_ddp._system.worker import Worker
from crossover_ddp.errors import CrossoverError

from .spans import ExchangeSpans
from .transfer import Journey


class Engine(Protocol):
    """What a way may ask of the engine that it works for."""

    rank: int
    world_size: int
    spans: ExchangeSpans

    def end_compute(self, journey: Journey) -> None:
        """Give the turn away if ``journey`` is the step's last: its compute is launched. On the hook's thread."""

    def end_kept_compute(self, journey: Journey) -> None:
        """Give away a turn that was kept for the owners' steps, which are done."""

    def put(self, worker: Worker, journey: Journey, doing: str, drive: Callable[[], None]) -> None:
        """Have ``drive`` run on ``worker``; an exception is the failure of all journeys."""

    def guarded(self, journey: Journey, doing: str, drive: Callable[[], None]) -> None:
        """Run ``drive`` now; an exception is the failure of all journeys."""

    def complete(self, journey: Journey, *, ahead: bool = False, meets: bool = True) -> None:
        """End a journey that succeeded; the step's last one takes the turn first.

        ``ahead``: the device may still be busy with it. ``meets``: it could not end before all ranks had begun.
        """

    def finish(self, journey: Journey, error: CrossoverError | None) -> None:
        """Complete the journey's Future, and nothing else."""


class Way(Protocol):
    """How buckets travel between ranks."""

    def begin(self, engine: Engine, journey: Journey) -> None:
        """Launch a bucket. On the hook's thread."""

    def trail(self, engine: Engine, journey: Journey) -> None:
        """Launch what nobody waits for, of which nothing comes back, behind the buckets so far."""

    def spread(self, engine: Engine, journey: Journey) -> None:
        """Begin to copy each owner's part to all ranks, behind the buckets so far. On the hook's thread."""


class AloneWay:
    """One rank: its gradients are the mean.

    Args:
        worker: where the turn is waited for.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def begin(self, engine: Engine, journey: Journey) -> None:
        """See `Way`."""
        if journey.owner_step is not None:
            journey.owner_step(journey.tensor)
        journey.side.follow_compute()
        engine.end_compute(journey)
        engine.end_kept_compute(journey)
        if journey.last_turn is None:
            arrive_half_way(journey, journey.tensor)
            engine.complete(journey)
        else:
            engine.put(self._worker, journey, "turn", functools.partial(self._end, engine, journey))

    trail = begin

    def spread(self, engine: Engine, journey: Journey) -> None:
        """See `Way`."""
        engine.finish(journey, None)

    @staticmethod
    def _end(engine: Engine, journey: Journey) -> None:
        if journey.turn is not None:
            journey.turn.request()
        engine.complete(journey)


def arrive_half_way(journey: Journey, own_part: torch.Tensor) -> None:
    """Note that the own part of a deferred bucket holds the mean."""
    if journey.deferred:
        with journey.side.current():
            journey.reduced.set_result(own_part)

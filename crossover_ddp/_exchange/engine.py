"""What all ways of a bucket have in common: threads, failures, the job's turn, and when a Future completes."""

import contextlib
import functools
import threading
import time
from collections.abc import Callable
from typing import Final

import torch

from crossover_ddp._engine.step_records import StepRecords
from crossover_ddp._engine.turns import Turn
from crossover_ddp._system.worker import Worker
from crossover_ddp.errors import CrossoverError

from .spans import ExchangeSpans
from .step import Step
from .transfer import Failure, Transfer

_AS_IT_IS: Final = contextlib.nullcontext()


class Engine:
    """Runs the transfers of one process group, on the hook's thread and on the engine's own.

    Args:
        rank, world_size: of this process.
        spans: where times are noted.
        abandon: ends the waits of other threads after a failure.
        records: of the last steps.

    On failure: the first failure of any transfer is final. All that are under way, and all later ones, complete with
    the same cause.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        spans: ExchangeSpans,
        abandon: Callable[[], None],
        records: StepRecords,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.spans = spans
        self._abandon = abandon
        self._lock = threading.Lock()
        self._in_flight: set[Transfer] = set()
        self._failure: Failure | None = None
        self._turn_taken_s: float | None = None
        self.records = records

    # --- threads and failures --------------------------------------------------------------------------------

    def put(self, worker: Worker, transfer: Transfer, doing: str, drive: Callable[[], None]) -> None:
        """Have ``drive`` run on ``worker``; an exception is the failure of all transfers."""
        worker.put(functools.partial(self.guarded, transfer, doing, drive, on_worker=True))

    def guarded(
        self, transfer: Transfer, doing: str, drive: Callable[[], None], *, on_worker: bool = False
    ) -> None:
        """Run ``drive`` now; an exception is the failure of all transfers, after which nothing runs any more."""
        with self._lock:
            failure = self._failure
            if failure is None and not transfer.finished:
                self._in_flight.add(transfer)
        if failure is not None:
            self.finish(transfer, failure.error())
            return
        try:
            if on_worker:
                transfer.side.adopt_thread()
                if torch.is_grad_enabled():
                    torch.set_grad_enabled(False)  # for the thread's whole life
            # Nearly every backward pass records nothing anyway.
            with torch.no_grad() if torch.is_grad_enabled() else _AS_IT_IS:
                drive()
        except Exception as error:
            self._fail(transfer, doing, error)

    def _fail(self, transfer: Transfer, doing: str, cause: Exception) -> None:
        text = (
            f"rank {self.rank} of {self.world_size}: the {doing} {transfer.whose} failed: {cause}; "
            "no later exchange on this process group can succeed, restart the job"
        )
        with self._lock:
            failure = self._failure = self._failure or Failure(text, cause)
            doomed = list(self._in_flight)
        self._abandon()
        for other in doomed:
            self.finish(other, failure.error())

    # --- the job's turn --------------------------------------------------------------------------------------

    def begin_compute(self) -> None:
        """Note that forward begins, for the timeline."""
        self._turn_taken_s = time.monotonic()

    def give_turn_away(self, step: Step, turn: Turn | None) -> None:
        """Give the turn away, once a step.

        Always before a worker hears of the last bucket: it may take the next turn at any moment from then on.
        """
        if step.compute_ended or step.keeps_turn:
            return
        step.compute_ended = True
        self.spans.compute(step, self._turn_taken_s)
        if turn is not None:
            turn.release()

    def end_compute(self, transfer: Transfer) -> None:
        """Give the turn away if ``transfer`` is the step's last: its compute is launched. On the hook's thread."""
        if transfer.last:
            self.give_turn_away(transfer.step, transfer.turn)

    def end_kept_compute(self, transfer: Transfer) -> None:
        """Give away a turn that was kept for the owners' steps, which are done, or will not be done."""
        if transfer.last and transfer.keeps_turn:
            transfer.step.keeps_turn = False
            with transfer.side.current():
                self.give_turn_away(transfer.step, transfer.turn)

    # --- the end of a transfer -------------------------------------------------------------------------------

    def complete(self, transfer: Transfer, *, ahead: bool = False) -> None:
        """End a transfer that succeeded; the step's last one takes the turn first.

        ``ahead``: the device may still be busy with it.
        """
        if transfer.payload is not None:
            with transfer.side.current():
                transfer.payload.unload()
            waited_for = transfer.index >= 0 and not transfer.deferred
            if waited_for and not transfer.last and transfer.step.hold(transfer):
                return
        if transfer.last and not transfer.deferred:
            done_s = time.monotonic()
            if transfer.turn is not None:
                with transfer.side.current():
                    transfer.turn.acquire()
            self.records.add(transfer.step.ready, self._turn_taken_s)
            self._turn_taken_s = time.monotonic()
            self.spans.exchange(transfer, done_s)
            self.spans.wait(transfer.step.number + 1, done_s, self._turn_taken_s)
        for other in transfer.step.let_go() if transfer.last else ():
            self.finish(other, None)
        self.finish(transfer, None)

    def finish(self, transfer: Transfer, error: CrossoverError | None) -> None:
        """Complete the transfer's Future, and nothing else."""
        with self._lock:
            if transfer.finished:
                return
            transfer.finished = True
            self._in_flight.discard(transfer)
        if error is not None:
            self.end_kept_compute(transfer)
        with transfer.side.current():
            if error is None or (not transfer.deferred and transfer.step.leave(error)):
                transfer.future.set_result(transfer.tensor if transfer.result is None else transfer.result)
                return
            for future in (transfer.future, transfer.reduced):
                if not future.done():
                    future.set_exception(error)  # type: ignore[arg-type]

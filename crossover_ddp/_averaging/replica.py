"""One rank's model between two exchanges: it counts backward passes, and acts before the next training forward.

[Note: the way around the reducer] The hook hands each bucket back at once with this rank's own gradients. So DDP never
waits, and neither does ``optimizer.step()``. What is exchanged are parameters and buffers, from a hook before the
model's forward: there the training thread is between two steps, whatever the optimizer did or skipped.
"""

# No ``from __future__ import annotations`` here: DDP compares the annotation objects of a hook.

import contextlib
import logging
import statistics
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp._ddp.checks import (
    OnlyModel,
    check_forward,
    check_not_joined,
    flat_gradients,
)
from crossover_ddp._ddp.layout import Span
from crossover_ddp._ddp.own_hook import OwnHook
from crossover_ddp._engine.agreement import Agreement, compare
from crossover_ddp._engine.exchange import Exchange
from crossover_ddp._engine.places import GradientFuture
from crossover_ddp._engine.split import split
from crossover_ddp._engine.trips import Trip
from crossover_ddp._engine.turns import Turn, check_turn
from crossover_ddp._system import environment
from crossover_ddp.errors import UnsupportedConfigurationError

from .checks import check_waits_for_nobody, digest_of, model_behind
from .flat import FlatBlock, blocks_of
from .means import Means

logger = logging.getLogger(__name__)

_TIMES_KEPT: Final = 64
_WITHOUT_DATA: Final = "a rank without data has no forward in which it could average"


class Rule(Protocol):
    """What happens to the parameters between two steps. All methods run on the training thread."""

    @property
    def settings(self) -> Mapping[str, object]:
        """Arguments that must be the same on all ranks."""

    @property
    def steps_together(self) -> bool:
        """Whether all ranks call for a mean after as many steps."""

    @property
    def has_local_steps(self) -> bool:
        """Whether any step, however late, uses this rank's gradients alone."""

    def is_local(self, steps: int) -> bool:
        """Whether the step after ``steps`` of them uses this rank's gradients alone."""

    def begin(self, replica: "Replica") -> None:
        """The first local step begins; the parameters are the same on all ranks. **Collective**."""

    def act(self, steps: int) -> None:
        """``steps`` backward passes are done, and their updates."""

    def at_rest(self, *, leave: bool) -> contextlib.AbstractContextManager[None]:
        """Apply what is in flight, and let nothing more be exchanged during the block. **Collective**.

        Args:
            leave: apply it once more when it is due: the caller puts the parameters back.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return what is kept beside the parameters, by name. **Collective**."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it over when the first local step begins."""

    def stats(self) -> dict[str, Any]:
        """Return counters."""

    def close(self) -> None:
        """End threads, let memory go."""


class Replica:
    """The model of one rank, and the clock; see [Note: the clock] in ``schedule.py``.

    Args:
        rule: what is done between steps.
        turn: given away while gradients of warm-up steps are averaged.
    """

    def __init__(self, rule: Rule, turn: Turn | None) -> None:
        self.rule = rule
        self.turn = turn
        self.steps = 0
        self.blocks: list[FlatBlock] = []
        self.group: dist.ProcessGroup | None = None
        self.exchange: Exchange | None = None
        self.means: Means | None = None
        self.waited_s = 0.0
        self._acted = 0
        self._mean_of: int | None = None
        self._told = False
        self._began = False
        self.agreement = Agreement()
        self._only = OnlyModel()
        self._closed = False
        self._failure: Exception | None = None
        self._model: Callable[[], DistributedDataParallel | None] = _no_model
        self._hook = contextlib.ExitStack()
        self._begin_s: float | None = None
        self._step_s: deque[float] = deque(maxlen=_TIMES_KEPT)

    # --- the hook --------------------------------------------------------------------------------------------

    def take(self, state: object, group: dist.ProcessGroup, bucket: dist.GradBucket) -> GradientFuture:
        """Answer ``bucket``; raises what makes local steps impossible."""
        exchange = Exchange.of(group) if self.exchange is None else self.exchange
        if self._closed:
            return exchange.carry(bucket, split, state=state).future
        if self._failure is not None:
            raise self._failure
        gradients = flat_gradients(bucket)
        self._only.enter(bucket, state)
        if self.exchange is None:
            check_turn(self.turn, group)
            self.group = group
            self._adopt(model_behind(bucket, state, group), exchange)
        self.agreement.make(group, self._said)
        if self.rule.is_local(self.steps):
            self._begin_local_steps()
            future = exchange.network(gradients.device).place.future()
            future.set_result(gradients)
        else:
            future = exchange.carry(bucket, split, turn=self.turn, state=state).future
        if bucket.is_last():
            self.steps += 1
        return future

    def _adopt(self, model: DistributedDataParallel, exchange: Exchange) -> None:
        check_forward(model, "parameters are averaged before it")
        if self.rule.has_local_steps:
            check_waits_for_nobody(model)
        check_not_joined(model, _WITHOUT_DATA)
        self.blocks = blocks_of(model)
        self.exchange, self.means = exchange, Means(exchange, self.blocks)
        self._model = weakref.ref(model)
        before = torch.compiler.disable(self._before_forward)
        handle = model.register_forward_pre_hook(OwnHook(before), prepend=True)
        self._hook.callback(handle.remove)
        self._hook.callback(model.module.register_state_dict_pre_hook(OwnHook(self._tell_apart)).remove)
        logger.info("averaging: %s with %s", type(model.module).__name__, self.rule)

    def _said(self) -> Mapping[str, object]:
        return {"steps": self.steps, **self.rule.settings, "model": digest_of(self.blocks)}

    def _begin_local_steps(self) -> None:
        if not self._began:
            self._began = True
            with torch.no_grad():
                self.rule.begin(self)
            self._acted = self.steps

    # --- between two steps -----------------------------------------------------------------------------------

    def _before_forward(self, *_: Any) -> None:
        if not torch.is_grad_enabled() or self._closed:
            return
        if self._failure is not None:
            raise self._failure
        if self._acted == self.steps and self._begin_s is not None:
            return
        if self._began and self._begin_s is not None:
            self._step_s.append((time.monotonic() - self._begin_s) / (self.steps - self._acted))
        self._catch_up()
        self._begin_s = time.monotonic()

    def _catch_up(self) -> None:
        """Do what is due after the steps so far."""
        if self._began:
            model = self._model()
            if model is not None:
                check_not_joined(model, _WITHOUT_DATA)
            with self._guarded(), torch.no_grad():
                for steps in range(self._acted + 1, self.steps + 1):
                    self._acted = steps
                    self.rule.act(steps)
        self._acted = self.steps

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Note a failure: no later step may go on as if nothing had happened."""
        try:
            yield
        except Exception as error:
            self._failure = error
            raise

    def wait(self, trip: Trip) -> None:
        """Wait for an exchange, and note for how long."""
        begin_s = time.monotonic()
        try:
            trip.wait()
        finally:
            self.waited_s += time.monotonic() - begin_s

    def wait_without_turn(self, trip: Trip) -> None:
        """The same, and let a sibling compute meanwhile."""
        if self.turn is None:
            self.wait(trip)
            return
        self.turn.release()
        try:
            self.wait(trip)
        finally:
            self.turn.request()
            self.turn.acquire()

    # --- the state's methods ---------------------------------------------------------------------------------

    @property
    def compute_s(self) -> float | None:
        """Median time of a local step between two acts, or what other steps compute, in seconds; None before one."""
        if self._step_s or self.exchange is None:
            return statistics.median(self._step_s) if self._step_s else None
        return self.exchange.records.compute_s()

    def average(self) -> None:
        """Replace every rank's parameters and buffers by their mean. **Collective**."""
        means = self._known()
        if means is None:
            return
        with self._guarded(), torch.no_grad():
            self._meet("average()")
            with self._at_rest(leave=False):
                means.take_over(self.steps)
        self._mean_of = self.steps

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """The same for the time of a block. **Collective**."""
        means = self._known()
        if means is None:
            yield
            return
        with torch.no_grad():
            kept = [torch.empty(block.numel, dtype=block.dtype, device=block.device) for block in self.blocks]
            for block, values in zip(self.blocks, kept, strict=True):
                block.pack(Span(0, block.numel), values)
        try:
            with self._guarded(), torch.no_grad():
                self._meet("averaged()")
                with self._at_rest(leave=True):
                    means.take_over(self.steps)
            former, self._mean_of = self._mean_of, self.steps
            yield
            self._mean_of = former
        finally:
            with torch.no_grad():
                for block, values in zip(self.blocks, kept, strict=True):
                    block.unpack(Span(0, block.numel), values)

    def _meet(self, call: str) -> None:
        """Refuse a call that another rank does not make; its exchange would be taken for that rank's next one."""
        assert self.group is not None
        if self.group.size() > 1:
            steps = {"steps": self.steps} if self.rule.steps_together else {}
            compare(self.group, {"call": call, **steps})

    def _tell_apart(self, *_: Any) -> None:
        """Warn of the first state dict of one rank's own replica, which is what a saver on rank 0 writes."""
        if self._began and self._mean_of != self.steps and not self._told and self.group is not None:
            self._told = self.group.size() > 1
            if self._told:
                logger.warning(
                    "this state_dict() is of one rank's replica, which differs from the others' after step %d: enter "
                    "state.averaged(), or call state.average(), on all ranks before a checkpoint",
                    self.steps,
                )

    def _at_rest(self, *, leave: bool) -> contextlib.AbstractContextManager[None]:
        return self.rule.at_rest(leave=leave) if self._began else contextlib.nullcontext()

    def _known(self) -> Means | None:
        """Return what averages the model; None if nothing differs, since every step was a plain all-reduce."""
        if self._failure is not None:
            raise self._failure
        self._catch_up()
        if self.means is None and not environment.is_set(environment.DISABLE):
            raise UnsupportedConfigurationError(
                "expected a model, got a state whose hook was never called; register it, and call backward() before"
            )
        return self.means

    def state_dict(self) -> dict[str, Any]:
        """Return the clock and what the rule keeps. **Collective**."""
        if self._failure is not None:
            raise self._failure
        self._catch_up()
        if self._mean_of != self.steps and self.rule.stats().get("in_flight"):
            logger.warning(
                "exchanges in flight after step %d are lost to who loads this state_dict(): call it inside of "
                "state.averaged(), or after state.average()",
                self.steps,
            )
        with torch.no_grad():
            return {"steps": self.steps, "kept": self.rule.state_dict() if self._began else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the clock and the values of `state_dict`."""
        if set(state) != {"steps", "kept"} or not isinstance(state["steps"], int):
            raise ValueError(
                f"expected a state dict with 'steps' and 'kept', got keys {sorted(state)}; pass what state_dict() "
                "returned"
            )
        if self._began:
            raise ValueError(
                f"expected a state that has not trained yet, got one after {self.steps} steps; make a new state and "
                "register it with a new DistributedDataParallel, then load"
            )
        if state["kept"] is not None:
            self.rule.load_state_dict(state["kept"])
        self.steps = self._acted = state["steps"]
        self.agreement.forget()

    def close(self) -> None:
        """Let the model go; later backward passes are those of the split hook."""
        if not self._closed:
            self._closed = True
            self._hook.close()
            self.rule.close()

    def stats(self) -> dict[str, Any]:
        """Return the clock, the time spent waiting, and the rule's counters."""
        return {"steps": self.steps, "waited_s": self.waited_s, **self.rule.stats()}


def _no_model() -> None:
    return None

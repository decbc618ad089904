"""Updates that are still to come, and who makes them come: forward, somebody who reads a parameter, or `flush`."""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Final

import torch
from torch._C._functorch import peek_interpreter_stack
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from crossover_ddp._owners.partial_optimizer import PartialOptimizer, StepPlan
from crossover_ddp.errors import UnsupportedConfigurationError

from .guards import Guards, Watch, named_entries
from .round import Round
from .seals import Checks
from .shares import UNSTEPPED, Share
from .step_times import StepTimes

logger = logging.getLogger(__name__)

_EARLY_STEPS_TO_WARN: Final = 3
_STEPS_CLOSE_TOGETHER: Final = 10


class Updates:
    """The round in custody and the updates pending, and the guards that are up as long as there are any.

    One lock: a thread that saves a checkpoint may read parameters while another trains.
    """

    def __init__(self, partial: PartialOptimizer) -> None:
        self.lock = threading.RLock()
        self.round = Round()
        self.checks = Checks()
        self.times = StepTimes()
        self.watch = Watch(self._bring_up_to_date, self.look, self.update_unseen)
        self.stale = self.watch.stale
        self.guards: Guards | None = None
        self.in_forward = False
        self.recorded = False
        self._warned_of_unseen = False
        self.steps = 0
        self._partial = partial
        self._early_reads = _Often(
            "parameters are read between optimizer.step() and the next forward (a moving average, "
            "model.zero_grad() instead of optimizer.zero_grad(), ...): correct, but updates wait for the network"
        )
        self._early_looks = _Often(
            "parameters or gradients are looked at between backward() and optimizer.step() (clipping, GradScaler, logs "
            "of norms, ...): correct, but such steps are those of plain DDP; to clip, use state.clip_grad_norm_"
        )

    # --- what sets it off ------------------------------------------------------------------------------------

    @property
    def pending(self) -> int:
        """Number of buckets whose updates are still to come."""
        return len({id(share) for share in list(self.stale.values())})

    def look(self) -> None:
        """Make gradients whole: somebody who asks for parameters before ``step()`` may want to read or change them."""
        if self.round.is_whole:
            with self.lock:
                if self.round.is_whole:
                    self.check_stepped()
                    self._early_looks.note(self.round.number)
                    self.make_round_whole()

    def check_stepped(self) -> None:
        """Refuse parameters that were written in the place of ``step()``: what wrote them saw gradients in parts."""
        with self.lock:
            if self.round.is_written:
                self.make_round_whole()
                raise UnsupportedConfigurationError(UNSTEPPED)

    def update_unseen(self) -> None:
        """Update what forward may read past the guards, see [Note: reads that nobody sees]."""
        if self.stale:
            self._update_those(unseen=True)

    def update_all(self) -> None:
        """Update everything that is pending."""
        if self.stale:
            self._update_those(unseen=False)

    def _update_those(self, *, unseen: bool) -> None:
        with self.lock:
            pending = {id(share): share for share in self.stale.values() if share.unseen or not unseen}
            for share in sorted(pending.values(), key=lambda each: -each.place):
                if share.pending:
                    self._update(share)

    def _bring_up_to_date(self, share: Share) -> None:
        with self.lock:
            if not share.pending:
                return  # another thread was first
            if not self.in_forward:
                self._early_reads.note(self.steps)
            self._update(share)

    # --- what is done ----------------------------------------------------------------------------------------

    def defer(self, plan: StepPlan) -> None:
        """Have the round's gradients applied later, as ``plan`` says."""
        with self.lock:
            self._defer(plan)

    def _defer(self, plan: StepPlan) -> None:
        self.steps += 1
        for share in self.round.shares:
            share.take_step(plan, checked=self.checks.on)
            share.pending, share.unseen = (
                True,
                any([id(update.parameter) not in self.watch.order for update in share.updates]),
            )
            for parameter in share.parameters:
                self.stale[id(parameter)] = share
        if self.recorded and not self._warned_of_unseen:
            self._tell_of_unseen()
        self.checks.deferred()
        self.round.shares = []
        self.raise_guards()

    def _tell_of_unseen(self) -> None:
        """Say what reads past the guards cost, once."""
        shares = [share for share in self.round.shares if share.unseen]
        if not shares or self.guards is None:
            return
        self._warned_of_unseen = True
        unseen = {id(update.parameter) for share in shares for update in share.updates} - {*self.watch.order}
        names = [name for name, entry in named_entries(self.guards.network) if id(entry) in unseen]
        logger.warning(
            "forward does not read %d parameters (%s) through the module that has them (references kept elsewhere, a "
            "CUDA graph, a module not called in every step): correct, but their buckets arrive before forward, not "
            "during it",
            len(names),
            ", ".join(names[:3]) + (", ..." if len(names) > 3 else ""),
        )

    def _update(self, share: Share) -> None:
        """Wait for one bucket and apply the optimizer to its parameters."""
        begin_s = time.monotonic()
        share.wait()
        waited_s = time.monotonic()
        share.check_gradients()
        share.check_parameters()
        share.pending = (
            False  # a signal's handler may read in the middle of it, and gets what is there by then
        )
        with as_in_step(share.buffer.device.type):
            share.apply(self._partial)
        for parameter in share.parameters:
            self.stale.pop(id(parameter), None)
        self.times.updated(share.place, begin_s, waited_s)
        self.lower_guards()

    def make_round_whole(self) -> None:
        """Wait until ``p.grad`` holds the mean, everywhere."""
        with self.lock:
            shares = self.round.shares
            for share in shares:
                share.await_mean()
            # Not before all are: code that catches the error may let the next backward write into any of the buckets.
            for share in shares:
                share.check_gradients()
                with as_in_step(share.buffer.device.type):
                    share.scale()
                    share.land()
            if (
                not self.round.is_open and self.round.shares is shares
            ):  # no other backward has begun meanwhile
                self.round.shares = []
                self.lower_guards()

    def note_gradients(self) -> None:
        """Wait for the round and note its gradients, so that changes show; see `seals`."""
        for share in self.round.shares:
            share.await_mean()
            share.note_gradients()

    # --- guards ----------------------------------------------------------------------------------------------

    def raise_guards(self) -> None:
        """See every read from now on."""
        with self.lock:
            if self.guards is not None:
                self.guards.up()

    def lower_guards(self) -> None:
        """Guard nothing if nothing is pending."""
        with self.lock:
            if (
                self.guards is not None
                and not self.stale
                and not self.round.shares
                and not self.watch.recording
            ):
                self.guards.down()


class _Often:
    """A warning, given once, for what happens in several steps close together; in one of them it counts once."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._steps: deque[int] = deque(maxlen=_EARLY_STEPS_TO_WARN)
        self._has_warned = False

    def note(self, step: int) -> None:
        if self._has_warned or step in self._steps:
            return
        self._steps.append(step)
        if len(self._steps) == _EARLY_STEPS_TO_WARN and step - self._steps[0] < _STEPS_CLOSE_TOGETHER:
            self._has_warned = True
            logger.warning(self._text)


@contextlib.contextmanager
def as_in_step(device_type: str) -> Iterator[None]:
    """Compute as in ``optimizer.step()``, whatever forward has set: autocast, inference mode, gradients, torch.func."""
    with contextlib.ExitStack() as stack:
        if peek_interpreter_stack() is not None:
            stack.enter_context(temporarily_clear_interpreter_stack())
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        for each in {device_type, "cpu"}:
            if torch.is_autocast_enabled(each):
                stack.enter_context(torch.autocast(each, enabled=False))
        yield

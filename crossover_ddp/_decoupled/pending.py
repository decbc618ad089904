"""What is in custody between backward and forward: buckets that wait for ``step()``, and updates for whoever reads.

Forward, somebody who reads a parameter, or `flush` makes updates come.

[Note: versions] A tensor counts its in-place changes. What we do to a bucket goes through an alias with a counter of
its own, so a change of the counter that gradients carry is somebody else's, made while they were averaged in parts.

[Note: changes that no counter sees] A change through ``.data`` counts no version. So in a few steps the exchange is
awaited at the end of backward, when this package writes no more, and sums of what is pending are compared whenever
it is used. Code that changes gradients or parameters mostly does so in every step. ``CROSSOVER_CHECK=1`` checks always.
"""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
import torch.distributed as dist
from torch._C._functorch import peek_interpreter_stack
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.optim import Optimizer

from crossover_ddp._engine.buckets import Bucket
from crossover_ddp._engine.digest import fingerprint
from crossover_ddp._engine.links import parts
from crossover_ddp._owners.optimizer import PartialOptimizer, StepPlan, Update
from crossover_ddp._system import environment
from crossover_ddp.errors import UnsupportedConfigurationError

from .guards import Guards, Watch, named_entries
from .planning import StepTimes

logger = logging.getLogger(__name__)

_CHECKED_STEPS: Final = 3
_EARLY_STEPS_TO_WARN: Final = 3
_STEPS_CLOSE_TOGETHER: Final = 10
CHANGED: Final = (
    "expected the gradients that backward() left, got gradients that were changed in place (by "
    "torch.nn.utils.clip_grad_norm_ on a list of parameters made earlier, p.grad.mul_, p.grad.data.mul_) while only "
    "a part of them had been averaged; use state.clip_grad_norm_, or call state.flush() before that line"
)
WRITTEN: Final = (
    "expected parameters that nobody writes between optimizer.step() and their update, got some changed in place (by "
    "p.add_, p.data.clamp_, ... on parameters taken earlier); call state.flush() after step(), or go through "
    "model.parameters() in that line"
)
UNSTEPPED: Final = (
    "expected step() of the optimizer that DecoupledState was made with, got parameters that were written without it "
    "while only a part of their gradients had been averaged (by another optimizer, or p -= lr * p.grad on parameters "
    "taken earlier); call state.flush() before that line, or wrap the model again, with a DecoupledState of the "
    "optimizer that steps"
)


class Seal:
    """Tensors as they are now.

    Args:
        tensors: that nobody else is to change.
        bits: look at their bits, too.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], *, bits: bool = False) -> None:
        self._tensors = [*tensors]
        self._versions = [tensor._version for tensor in self._tensors]
        self._bits = [fingerprint(tensor) for tensor in self._tensors] if bits else []

    @property
    def is_broken(self) -> bool:
        """Whether somebody has changed one of them since."""
        if any([t._version != version for t, version in zip(self._tensors, self._versions, strict=True)]):
            return True
        return any(
            [
                not torch.equal(fingerprint(t), bits)
                for t, bits in zip(self._tensors, self._bits, strict=False)
            ]
        )


class Checks:
    """Says whether this step is checked: all until three have been deferred, or all for good."""

    def __init__(self) -> None:
        self._always = environment.is_set(environment.CHECK)
        self._deferred = 0

    @property
    def on(self) -> bool:
        """Whether the step under way is checked."""
        return self._always or self._deferred < _CHECKED_STEPS

    def deferred(self) -> None:
        """Count a deferred step, which is applied now."""
        self._deferred += 1


def views_of(buffer: torch.Tensor, parameters: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return the gradients of ``parameters``, by their ids, in a bucket, laid out as DDP lays them out."""
    begin, views = 0, {}
    for parameter in parameters:
        views[id(parameter)] = view_of(buffer, parameter, begin)
        begin += parameter.numel()
    return views


def view_of(buffer: torch.Tensor, parameter: torch.Tensor, begin: int) -> torch.Tensor:
    """Return what begins there in a flat buffer, laid out as DDP lays out the gradient of ``parameter``."""
    begin += int(buffer.storage_offset())
    return buffer.as_strided(parameter.shape, strides_in_bucket(parameter), begin)


def strides_in_bucket(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the strides that DDP gives a gradient in its bucket."""
    expected = 1
    for stride, size in sorted(zip(parameter.stride(), parameter.shape, strict=True)):
        if size != 1 and stride != expected:  # with gaps, or overlapping
            return torch.empty(parameter.shape, device="meta").stride()
        expected *= size
    return parameter.stride()


@dataclass(eq=False, slots=True)
class Share:
    """A bucket of one step: on its way, then waiting for ``step()``, then for somebody who needs its parameters.

    Args:
        bucket: on its way.
        parameters: those whose gradients it holds.
        buffer: DDP's buffer, of which the gradients are views.
        place: its number in backward; forward needs the last one first.
        views: of ``bucket.flat``, by the parameter's id, if gradients are not views of the buffer themselves. The
            mean is copied into them then; DDP allows nothing else.

    ``pending``: its update is still to come.
    ``unseen``: it is not known that forward reads all of it through guards.
    """

    bucket: Bucket
    parameters: list[torch.Tensor]
    buffer: torch.Tensor
    place: int
    views: Mapping[int, torch.Tensor] | None = None
    updates: list[Update] = field(default_factory=list)
    plan: StepPlan | None = None
    factor: torch.Tensor | None = None
    pending: bool = False
    unseen: bool = False
    _gradient_seal: Seal = field(init=False)
    _parameter_seal: Seal | None = None
    _separate: dict[int, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._gradient_seal = Seal([self.buffer])

    def collect(self) -> None:
        """Note which gradients are to be applied; one that the user has dropped is not."""
        self.check_gradients()
        self.updates = []
        for parameter in self.parameters:
            gradient = parameter.grad
            if gradient is None:
                continue
            if not self._is_ours(parameter, gradient):
                raise UnsupportedConfigurationError(
                    "expected the gradients that backward() left, got others in their place; "
                    "call flush() before you replace p.grad"
                )
            self.updates.append(Update(parameter, gradient))

    def note_separate(self) -> None:
        """Note the gradients that DDP has just written, where they are not views; call it when backward has ended."""
        self._separate = {id(p): p.grad for p in self.parameters if p.grad is not None}
        self._gradient_seal = Seal(self._separate.values())

    def land(self) -> None:
        """Put the mean, which is whole and scaled, where gradients are."""
        if self.views is None or not self._separate:
            return
        gradients = [gradient.data for gradient in self._separate.values()]  # counts no version
        torch._foreach_copy_(gradients, [self.views[key] for key in self._separate])

    def _is_ours(self, parameter: torch.Tensor, gradient: torch.Tensor) -> bool:
        if self.views is None:
            return gradient.untyped_storage().data_ptr() == self.buffer.untyped_storage().data_ptr()
        return self._separate.get(id(parameter)) is gradient

    def _sealed(self) -> list[torch.Tensor]:
        return [self.buffer] if self.views is None else [*self._separate.values()]

    def note_gradients(self) -> None:
        """Note the gradients, which are whole, and the parameters, so that changes show that count no version."""
        self.land()
        self._gradient_seal = Seal(self._sealed(), bits=True)
        self._parameter_seal = Seal(self.parameters, bits=True)

    def note_parameters(self) -> None:
        """Note the parameters at the end of backward: code that writes them before ``step()`` may read gradients."""
        self._parameter_seal = Seal(self.parameters)

    @property
    def is_written(self) -> bool:
        """Whether somebody has written the parameters since they were noted."""
        return self._parameter_seal is not None and self._parameter_seal.is_broken

    def take_step(self, plan: StepPlan, *, checked: bool) -> None:
        """Note that the collected gradients are to be applied as ``plan`` says; ``checked``: note the parameters."""
        self.plan = plan
        self._parameter_seal = Seal([update.parameter for update in self.updates], bits=checked)

    def check_gradients(self) -> None:
        """Refuse gradients that somebody has changed, see [Note: versions]."""
        if self._gradient_seal.is_broken:
            raise UnsupportedConfigurationError(CHANGED)

    def check_parameters(self) -> None:
        """Refuse parameters that somebody has written since ``step()``."""
        if self.is_written:
            raise UnsupportedConfigurationError(WRITTEN)

    def wait(self) -> None:
        """Wait for what the update needs of other ranks."""
        self.await_mean()

    def await_mean(self) -> None:
        """Wait until its gradients are whole."""
        self.bucket.wait()

    def apply(self, partial: PartialOptimizer) -> None:
        """Update the parameters, after `wait`."""
        assert self.plan is not None
        self.scale()
        self.land()
        partial.apply(self.plan, self.updates)

    def clip(self, factor: torch.Tensor) -> None:
        """Have the gradients scaled when they are whole."""
        self.factor = factor if self.factor is None else self.factor * factor

    def scale(self) -> None:
        """Scale the gradients, which are whole."""
        if self.factor is not None:
            self.bucket.flat.mul_(self.factor)
            self.factor, self._gradient_seal = None, Seal(self._sealed())

    def own_pieces(self, rank: int) -> Iterator[torch.Tensor]:
        """Yield the part of the mean that ``rank``, this one, owns, without gradients that are not applied."""
        self.bucket.wait_for_sum()
        layout, own = self.bucket.layout, parts(self.bucket.flat, self.bucket.layout)[rank]
        start = sum(layout[:rank])
        for update in self.updates:
            place = update.gradient if self.views is None else self.views[id(update.parameter)]
            reals = place.element_size() // self.buffer.element_size()  # DDP shows complex as real
            begin = place.storage_offset() * reals - self.buffer.storage_offset()
            first = max(begin, start)
            stop = min(begin + update.gradient.numel() * reals, start + own.numel())
            if first < stop:
                yield own[first - start : stop - start]


class Round:
    """What backward has left, and whether DDP's buckets stay as they are from now on."""

    def __init__(self) -> None:
        self.shares: list[Share] = []
        self.is_open = False
        self.is_broken = False
        self.is_settled = False
        self.shape: tuple[object, ...] = ()
        self.number = 0
        self._last_index = -1

    @property
    def is_whole(self) -> bool:
        """Whether backward has ended, and nothing was refused."""
        return bool(self.shares) and not self.is_open and not self.is_broken

    @property
    def is_written(self) -> bool:
        """Whether somebody has written parameters since backward, whose gradients ``step()`` has not taken."""
        return self.is_whole and any([share.is_written for share in self.shares])

    def begins_with(self, bucket: dist.GradBucket) -> bool:
        """Note the next bucket; return whether a new backward begins with it."""
        # DDP goes through its buckets in order; the backward before may have ended at any of them.
        begins = not self.is_open or bucket.index() <= self._last_index
        self._last_index, self.is_open = bucket.index(), not bucket.is_last()
        return begins

    def begin(self) -> None:
        """Forget the backward before."""
        self.shares, self.is_broken = [], False

    def end(self, rebuilt_after: int) -> bool:
        """Note the end of backward; return whether the buckets are those of the one before.

        Args:
            rebuilt_after: the backward after which DDP rebuilds its buckets; gathers may wait for forward only then.
        """
        shape = tuple([(share.bucket.flat.numel(), *map(id, share.parameters)) for share in self.shares])
        for share in self.shares:
            share.note_parameters()
        self.number += 1
        same, self.shape = shape == self.shape, shape
        self.is_settled = same and self.number > rebuilt_after
        return same

    def collect(self, optimizers: Sequence[Optimizer], known: set[int]) -> None:
        """Collect the step's gradients; refuse what would not give the result of plain DDP.

        Args:
            optimizers: whose step it is.
            known: ids of the model's parameters.
        """
        if self.is_open or self.is_broken:
            raise UnsupportedConfigurationError(
                "expected a whole backward() before step() and clip_grad_norm_(), got one that ended with an "
                "exception; call them after the next backward()"
            )
        if not self.shares:
            return
        for share in self.shares:
            share.collect()
        strangers = [p for p in parameters_of(optimizers) if p.grad is not None and id(p) not in known]
        if strangers:
            raise UnsupportedConfigurationError(
                f"expected an optimizer of one DDP model, got gradients of {len(strangers)} other parameters in it; "
                "give them an optimizer of their own"
            )


def parameters_of(optimizers: Sequence[Optimizer]) -> list[torch.Tensor]:
    """Return all parameters of ``optimizers``, past the guards of their groups."""
    return [p for each in optimizers for group in each.param_groups for p in list.__iter__(group["params"])]


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
        """Wait for the round and note its gradients, so that changes show; see [Note: changes that no counter sees]."""
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

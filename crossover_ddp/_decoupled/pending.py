"""Buckets that await `step()`, and deferred updates that wait until a parameter is first read.

An update is applied by forward, by a read of a parameter, or by `flush`. `Phase` lists the phases
of one cycle.

[Note: versions] A tensor counts its in-place changes. The package writes to a bucket through an
alias that has a counter of its own. So if `grad._version` changes, user code has modified a
partially reduced gradient.

[Note: checked steps] The version counter does not record a change through ``.data``; see [Note:
changes that no counter sees] in ``_owners/optimizer.py``. In the first steps, the end of backward
waits for the exchange, after which the package writes nothing more. Checksums of pending gradients
and parameters are then compared whenever they are used. In every step, a few elements of each
parameter are compared when its update is applied. With ``CROSSOVER_CHECK=1``, checksums are
compared in every step.
"""

import contextlib
import enum
import logging
import threading
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch._C._functorch import peek_interpreter_stack
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from crossover_ddp._ddp.checks import named_parameters_of, names_of
from crossover_ddp._ddp.refit import BucketSizes, Refitter
from crossover_ddp._engine.buckets import Bucket, after_backward, contents_of
from crossover_ddp._engine.exchange import Exchange
from crossover_ddp._engine.journeys import Journey, JourneyCoroutine
from crossover_ddp._engine.links import Link
from crossover_ddp._engine.observe import step_begins
from crossover_ddp._owners.optimizer import (
    PartialOptimizer,
    Sample,
    Seal,
    StepPlan,
    Update,
    guard_groups,
    guard_state,
    is_watched,
)
from crossover_ddp._system import environment
from crossover_ddp.errors import UnsupportedConfigurationError

from .forward_turn import ForwardTurn
from .guards import Guards, called_by_compiled_code, compiled_modules, drops_gradients
from .lazy_gradients import Cut, LazyGradients, Scaling, SquareSums, plain_of

logger = logging.getLogger(__name__)

States = dict[torch.Tensor, dict[str, Any]]
"""Maps each parameter to its optimizer state."""

_CHECKED_STEPS: Final = 3
_EARLY_STEPS_TO_WARN: Final = 3
_STEPS_CLOSE_TOGETHER: Final = 10
BEGINS: Final = "the first steps are not, until DDP's buckets stay as they are"
_LOOKED_AT: Final = "gradients are read, or a forward runs, between backward() and step()"
_REPLACED: Final = "gradients are assigned between backward() and step()"
_WATCHED: Final = "a hook of the optimizer's step, or a function around it, sees parameters"
CHANGED: Final = (
    "gradients were changed in place between backward() and step(), through tensors that were taken "
    "from p.grad before backward(), while only a part of them had been averaged; take them from "
    "p.grad after backward(), or call state.flush() before that line"
)
WRITTEN: Final = (
    "parameters were written between optimizer.step() and their update, through references that "
    "were taken earlier (an average that is swapped in for an evaluation, p.add_, p.data.clamp_, "
    "p.data = ...); call state.flush() after step(), or take the parameters from "
    "model.parameters() in that line"
)
STATE_WRITTEN: Final = (
    "the optimizer's state was written between optimizer.step() and the update that it belongs "
    "to, through a reference that was taken earlier (momentum = optimizer.state[p][...]); call "
    "state.flush() after step(), or take it from optimizer.state in that line"
)
STRANGERS: Final = (
    "expected an optimizer of one DDP model, got gradients of %d other parameters in it; give "
    "them an optimizer of their own"
)
UNFROZEN: Final = (
    "expected gradients that DDP averages, got %d of parameters that DDP does not know (%s): their "
    "requires_grad was set after the model was wrapped, so each rank would keep its own gradients "
    "and replicas would drift apart; wrap the model in DistributedDataParallel again, with a new "
    "state"
)


class Phase(enum.Enum):
    """The phases of one step. Only `Pending._enter` changes the phase."""

    # Nothing is pending. This is the first phase. It is also entered when gradients have been
    # completed or dropped, after a backward pass that was not deferred, and when the last update
    # has been applied.
    IDLE = enum.auto()
    # Entered with the first bucket of a backward pass.
    BACKWARD = enum.auto()
    # Entered when a bucket of the backward pass is refused. DDP still hands over the other buckets.
    REFUSED = enum.auto()
    # Entered when such a pass ends, when a bucket is refused before the pass has been noted, and
    # when an owner's step raises. `step()` is refused until the next backward pass.
    BROKEN = enum.auto()
    # Entered when DDP has finished backward. Buckets await `step()`.
    REDUCED = enum.auto()
    # Entered with owners when an optimizer has stepped. The buckets await the other optimizers.
    STEPPING = enum.auto()
    # Entered by the `step()` of the last or only optimizer. Updates await a reader.
    DEFERRED = enum.auto()
    # Entered when DDP's forward begins. Updates are applied as forward reads. If forward raises,
    # the phase lasts until the next forward or backward pass.
    FORWARD = enum.auto()
    # Entered by `close()`, and never left.
    CLOSED = enum.auto()


_IN_BACKWARD: Final = (Phase.BACKWARD, Phase.REFUSED)
_WITHOUT_STEP: Final = (*_IN_BACKWARD, Phase.BROKEN)


# --- journeys that several threads run ---------------------------------------------------------

_STAGE_ENDS: Final = object()


@types.coroutine
def next_stage() -> Generator[object, Any, Any]:
    """End a stage of a journey; return the value that the next stage is run with."""
    return (yield _STAGE_ENDS)


class Stages:
    """A journey that runs in stages, which are separated by `next_stage`.

    The engine runs the stages that await collectives. The thread that steps or reads a parameter
    runs the others, because an optimizer belongs to that thread and its errors are raised there.
    """

    def __init__(self, make: Callable[[], JourneyCoroutine]) -> None:
        # The coroutine is created when its first stage begins: Python warns if one never runs.
        self._make: Callable[[], JourneyCoroutine] | None = make
        self._journey: JourneyCoroutine | None = None
        # Whether the journey is between stages, so that no thread is running it.
        self._is_between = True

    async def travel(self) -> None:
        """Run a stage that awaits collectives. This is a journey that the engine runs."""
        await self._travel()

    @types.coroutine
    def _travel(self) -> Generator[object, None, None]:
        journey = self._begun()
        self._is_between = False
        try:
            stop = journey.send(None)
            while stop is not _STAGE_ENDS:
                try:
                    yield stop
                except BaseException as error:
                    stop = journey.throw(error)
                else:
                    stop = journey.send(None)
        except StopIteration:
            return
        self._is_between = True

    def run(self, value: object = None) -> None:
        """Run a stage on this thread, with ``value`` as the result of the previous `next_stage`.

        The stage must not await anything except `next_stage`.
        """
        assert self._is_between, "the engine still runs the stage before"
        journey = self._begun()
        with contextlib.suppress(StopIteration):
            journey.send(value)

    def _begun(self) -> JourneyCoroutine:
        if self._make is not None:
            self._journey = self._make()
            # Break a reference cycle through the bucket, which would delay the release of memory.
            self._make = None
        assert self._journey is not None
        return self._journey

    def close(self) -> None:
        """End the journey if no stage is running, since its next stage is not needed."""
        if self._journey is not None and self._is_between:
            self._journey.close()


# --- one bucket --------------------------------------------------------------------------------


class DeferredStep(NamedTuple):
    """A call of `step()`, with the hyper-parameters at that moment."""

    optimizer: PartialOptimizer
    plan: StepPlan

    def apply(self, updates: Iterable[Update]) -> None:
        """Apply ``updates`` with the optimizer."""
        self.optimizer.apply(self.plan, updates)


@dataclass(eq=False, slots=True)
class DeferredBucket:
    """One step's bucket. It is exchanged, then awaits `step()`, then a reader of its parameters.

    Args:
        bucket: the engine's bucket, which exchanges the gradients.
        cuts: the parameters whose gradients it holds, with their places.
        sums: the sums of squares of the backward pass.
        gradients: all lazy gradients of the model.
        views: views of ``bucket.flat`` by the parameter's id, if gradients are not themselves views
            of DDP's buffer. The mean is then copied to the gradients, the only way DDP allows.
    """

    # The error message, which differs if owners keep the mean.
    changed: ClassVar[str] = CHANGED

    bucket: Bucket
    cuts: list[Cut]
    sums: SquareSums
    gradients: LazyGradients
    views: Mapping[int, torch.Tensor] | None = None
    parameters: list[torch.Tensor] = field(init=False)
    # The stages of the bucket's journey.
    stages: Stages = field(init=False)
    # The gradients to apply. Set by `step()`.
    updates: list[Update] = field(default_factory=list)
    # Operations on the gradients that user code has asked for since backward, by the parameter's
    # id. They are applied before the update.
    scalings: dict[int, list[Scaling]] = field(default_factory=dict)
    # Passed to the journey's last stage.
    step: object = None
    # Whether the bucket's update has not been applied yet.
    is_due: bool = False
    # The update waits for the end of this journey.
    arriving: Journey = field(init=False)
    # The parameters that listeners receive when the bucket is updated.
    updated: list[torch.Tensor] = field(init=False)
    # These detect writes by user code.
    gradient_seal: Seal = field(init=False)
    parameter_seal: Seal | None = None
    parameter_sample: Sample | None = None
    state_seal: "StateSeal | None" = None
    # The gradients, by the parameter's id, if they are not views of DDP's buffer.
    _separate: dict[int, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.parameters = [cut.parameter for cut in self.cuts]
        self.arriving = self.bucket
        self.updated = self.parameters
        self.gradient_seal = Seal([self.bucket.result])

    def travel(self, make: Callable[[], JourneyCoroutine]) -> JourneyCoroutine:
        """Return the first stage of the journey that ``make`` creates, for the engine to run."""
        self.stages = Stages(make)
        return self.stages.travel()

    def begin(self, journey: JourneyCoroutine) -> None:
        """Run a journey to its first `next_stage`."""
        self.stages = Stages(lambda: journey)
        self.stages.run()

    def is_replaced(self) -> bool:
        """Return whether user code has assigned another gradient to any of the parameters."""
        return not all(
            [
                gradient is None or self._is_own(parameter, gradient)
                for parameter in self.parameters
                for gradient in [plain_of(parameter.grad)]
            ]
        )

    def _is_own(self, parameter: torch.Tensor, gradient: torch.Tensor) -> bool:
        if self.views is not None:
            return self._separate.get(id(parameter)) is gradient
        begin = self.bucket.result.data_ptr()
        end = begin + self.bucket.result.nbytes
        return begin <= gradient.data_ptr() < end or not gradient.numel()

    def collect(self) -> None:
        """Record which gradients to apply: all but those that the user has dropped."""
        self.check_gradients()
        gradients = [(parameter, plain_of(parameter.grad)) for parameter in self.parameters]
        self.updates = [Update(p, gradient) for p, gradient in gradients if gradient is not None]

    def note_separate(self) -> None:
        """Record gradients that are not views. DDP has finished writing them after backward."""
        self._separate = {id(p): p.grad for p in self.parameters if p.grad is not None}
        self.gradient_seal = Seal(self._separate.values())

    async def share_norms(self, own: torch.Tensor, link: Link) -> None:
        """Add up the squares of this rank's shard. With the last bucket, all ranks' sums travel.

        See [Note: sums ahead of gathers].
        """
        if self.sums.travel:
            begin = sum(self.bucket.layout[: link.rank])
            stop = begin + own.numel()
            own_of = []
            for parameter, span, _ in self.cuts:
                first = min(max(span.start, begin), stop)
                own_of.append(
                    (parameter, own[first - begin : min(max(span.stop, first), stop) - begin])
                )
            self.sums.add(own_of)
            if self.bucket.last:
                await self.sums.gather(self.bucket, link)

    def complete(self) -> None:
        """Scale the mean, which has arrived, and copy it to the gradients that still exist."""
        self._scale()
        if self.views:
            self._copy_mean(self.views)

    def _scale(self) -> None:
        scalings = self.scalings
        self.scalings = {}
        if not scalings:
            return
        flat = self.bucket.flat
        first = next(iter(scalings.values()))
        is_alike = [
            len(each) == len(first) and all([a is b for a, b in zip(each, first, strict=True)])
            for each in scalings.values()
        ]
        if len(scalings) == len(self.cuts) and all(is_alike):
            for scaling in first:
                scaling.apply(flat)
            return
        for cut in self.cuts:
            for scaling in scalings.get(id(cut.parameter), ()):
                scaling.apply(flat[cut.span.start : cut.span.stop])

    def _copy_mean(self, views: Mapping[int, torch.Tensor]) -> None:
        kept = [
            (gradient.data, views[id(p)])  # writing to ``data`` counts no version
            for p in self.parameters
            if (gradient := self.gradients.separate(p)) is not None
            and self._separate.get(id(p)) is gradient
        ]
        if kept:  # usually `zero_grad()` has dropped them
            torch._foreach_copy_([to for to, _ in kept], [mean for _, mean in kept])
        self.updates = [Update(parameter, views[id(parameter)]) for parameter, _ in self.updates]

    def sealed(self) -> list[torch.Tensor]:
        """Return the gradients as the user sees them."""
        return [self.bucket.result] if self.views is None else [*self._separate.values()]

    def note_parameters(
        self, parameters: Sequence[torch.Tensor], *, bits: bool, views: dict[int, torch.Tensor]
    ) -> None:
        """Start to detect writes to ``parameters`` by user code; see `Seal` and `Sample`."""
        self.parameter_seal = Seal(parameters, bits=bits)
        self.parameter_sample = Sample(parameters, views)

    def is_written(self, *, compares_values: bool = True) -> bool:
        """Return whether user code has written the parameters since they were noted.

        Args:
            compares_values: compare the sample as well, which makes the host wait for a device.
        """
        if self.parameter_seal is None or self.parameter_sample is None:
            return False
        return self.parameter_seal.is_broken or (
            compares_values and self.parameter_sample.differs()
        )

    def check_pending(self, *, evaluates: bool) -> None:
        """Refuse the update if user code has written its parameters or their optimizer state.

        Args:
            evaluates: True if gradients are not being recorded. The host may then wait for a device
                to compare values on it.
        """
        if self.is_written(compares_values=evaluates or not self.bucket.flat.is_cuda):
            raise UnsupportedConfigurationError(WRITTEN)
        if self.state_seal is not None and self.state_seal.is_broken:
            raise UnsupportedConfigurationError(STATE_WRITTEN)

    def check_gradients(self) -> None:
        """Refuse gradients that user code has changed; see [Note: versions]."""
        if self.gradient_seal.is_broken:
            raise UnsupportedConfigurationError(self.changed)


class StateSeal:
    """Detects writes to the tensors in an optimizer's state for some parameters.

    Args:
        states: the optimizer's ``state``.
        parameters: the parameters whose state is watched.
        shared: the ids of tensors that several parameters share. They are left out, because the
            update of one parameter may write to them.
        bits: see `Seal`.
    """

    def __init__(
        self, states: States, parameters: Sequence[torch.Tensor], shared: set[int], *, bits: bool
    ) -> None:
        self._states = states
        self._parameters = parameters
        self._shared = shared
        self._tensors = self._now()
        self._seal = Seal(self._tensors, bits=bits)

    @property
    def is_broken(self) -> bool:
        """Whether a tensor has been written, replaced or removed since then."""
        now = self._now()
        same = len(now) == len(self._tensors) and all(
            [a is b for a, b in zip(now, self._tensors, strict=True)]
        )
        return not same or self._seal.is_broken

    def _now(self) -> list[torch.Tensor]:
        tensors: list[torch.Tensor] = []
        for parameter in self._parameters:
            tensors += tensors_of(self._states, parameter)
        return [each for each in tensors if id(each) not in self._shared]


def tensors_of(states: States, parameter: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors in a parameter's optimizer state, bypassing the guard of ``state``."""
    kept = dict.get(states, parameter)
    if kept is None:
        return []
    return [each for each in kept.values() if isinstance(each, torch.Tensor)]


# --- all buckets -------------------------------------------------------------------------------


class Pending:
    """One model's buckets and updates between `backward()` and their use.

    A lock protects them, because one thread may read parameters to save a checkpoint while another
    thread trains.

    Attributes:
        _completes: whether this rank completes gradients that user code reads.

    Args:
        optimizers: the optimizers whose steps are deferred.
        check: a function to call with each bucket that has a new parameter; it may refuse the
            bucket.
        turn: the job's turn, or None if the job takes no turns.
    """

    _completes: ClassVar[bool] = True

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        check: Callable[[dist.GradBucket], None],
        turn: ForwardTurn | None,
    ) -> None:
        self.optimizers = optimizers
        self.phase = Phase.IDLE
        self.lock = threading.RLock()
        self.turn = turn
        # The exchange of the latest backward pass.
        self.exchange: Exchange | None = None
        # Returns the model. The model and its guards are None before the first backward pass.
        self.model: Callable[[], DistributedDataParallel | None] = lambda: None
        self.guards: Guards | None = None
        self._check = check
        # The ids of the model's parameters.
        self.known: set[int] = set()

        # The gradients that user code sees from `backward()` until its updates are applied.
        self.gradients = LazyGradients(
            self._complete_gradients if self._completes else None, self.lock
        )
        # The sums of squares of the backward pass.
        self.sums: SquareSums
        # The cuts of the buckets of a backward pass that is not deferred.
        self._whole: list[list[Cut]] = []
        # The buckets of the latest backward pass, until `step()` takes them.
        self.awaiting_step: list[DeferredBucket] = []
        # The buckets whose updates have not been applied yet, by the id of each parameter.
        self.awaiting_read: dict[int, DeferredBucket] = {}
        # The buckets among them whose parameters forward may read past the guards.
        self._unguarded: list[DeferredBucket] = []
        self.forward_reads = ForwardReads()

        # Whether DDP's buckets no longer change. The same on all ranks.
        self.is_settled = False
        # The sizes and parameters of the buckets of the latest whole backward pass, and of the
        # current one; the number of passes, and how many of them a former reducer has made.
        self._shape: list[object] = []
        self._current: list[object] = []
        self._backwards = 0
        self._former_backwards = 0
        # The buckets for the model from the next training forward on, and whether it is to have its
        # hook. None if both stay. See `refit`.
        self._wanted: tuple[BucketSizes | None, bool] | None = None
        self.refitter: Refitter | None = None
        self._is_compiled = False  # whether compiled code has called DDP's forward
        # The number of steps that were deferred.
        self.steps = 0
        # Why the latest step was not deferred; None if it was.
        self.why_whole: str | None = BEGINS

        # The error that an update raised. Parameters are undefined after it.
        self._failure: BaseException | None = None
        # The threads whose reads do not read values; see `unwatched`.
        self._blind: set[int] = set()
        # The thread that is applying an update, which may read the optimizer's state; 0 if none.
        self._applying = 0
        self._always_checked = environment.is_set(environment.CHECK)
        # Views of parameters; see `Sample`.
        self._sampled: dict[int, torch.Tensor] = {}
        # Functions to call with updated parameters; see `DeferredState.on_update`.
        self.listeners: OrderedDict[int, Callable[[Sequence[torch.Tensor]], object]] = OrderedDict()
        self._early_reads = _Often(
            "parameters or the optimizer's state are read between optimizer.step() and the next "
            "forward (a moving average, model.zero_grad(set_to_none=False), ...): "
            "correct, but updates wait for the network; for an average call state.follow(average)"
        )
        self._early_looks = _Often(
            "gradients are read between backward() and optimizer.step() (other than by norms, "
            "clipping and GradScaler; with VirtualRanks other than by GradScaler): correct, but such "
            "steps are those of plain DDP"
        )

    def _enter(self, phase: Phase) -> None:
        """Enter a phase, and raise the guards only if a read may require some work."""
        if self.phase is not Phase.CLOSED:
            self.phase = phase
        self._guard()

    def _guard(self) -> None:
        with self.lock:
            if self.guards is None:
                return
            if self.awaiting_read or self.awaiting_step or self.forward_reads.thread:
                self.guards.up()
            else:
                self.guards.down()

    @property
    def is_checked(self) -> bool:
        """Whether the current step is checked; see [Note: checked steps]."""
        return self._always_checked or self.steps < _CHECKED_STEPS

    @property
    def unread(self) -> set[DeferredBucket]:
        """The buckets whose updates have not been applied yet."""
        return {*self.awaiting_read.values()}

    def parameters(self, number: int | None = None) -> list[torch.Tensor]:
        """Return the parameters of one or all optimizers, bypassing the guards of their groups."""
        chosen = self.optimizers if number is None else self.optimizers[number : number + 1]
        groups = [group for each in chosen for group in each.param_groups]
        return [parameter for group in groups for parameter in list.__iter__(group["params"])]

    def close(self) -> None:
        """Drop the buckets, and leave every later step to the optimizer itself."""
        self._forget_buckets()
        self.awaiting_read = {}  # the rest cannot be applied
        self.gradients.withdraw_all()
        self._enter(Phase.CLOSED)
        self.guards = None

    # --- backward ------------------------------------------------------------------------------

    def begin_with(self, exchange: Exchange, bucket: dist.GradBucket) -> None:
        """Record the next bucket. If it begins a backward pass, finish the previous one's work."""
        self.exchange = exchange
        if bucket.index() == 0:  # DDP goes through its buckets in order
            self._begin_backward()
        elif self.phase not in _IN_BACKWARD:  # earlier buckets were refused before this call
            self._enter(Phase.REFUSED if self.phase is Phase.BROKEN else Phase.BACKWARD)
        parameters = [*map(id, bucket.parameters())]
        if not self.known.issuperset(parameters):
            self._check(bucket)
        self._current.append((bucket.buffer().numel(), *parameters))
        if bucket.is_last():
            self._note_shape()
        if bucket.is_last() and self.turn is not None:
            self.turn.is_held = False  # the exchange releases it

    def _begin_backward(self) -> None:
        self._enter(Phase.BACKWARD)
        self._current = []
        for each in self.awaiting_step:
            each.bucket.drop()
        self._forget_buckets()
        # Needed only if there was no forward, as when Join stands in for a rank without inputs.
        self.update_all()
        self.gradients.withdraw_all()
        self._whole = []

    def begin_sums(self, *, has_norms: bool = True) -> SquareSums:
        """Return the sums of squares of the deferred backward pass that is under way."""
        if not self.awaiting_step:
            always = not self._completes
            self.sums = self.gradients.begin_sums(always=always, has_norms=has_norms)
        return self.sums

    def deferred(self, grad_bucket: dist.GradBucket, bucket: Bucket) -> DeferredBucket:
        """Create the deferred bucket for DDP's ``grad_bucket``, which ``bucket`` exchanges."""
        views = None
        model = self.model()
        if model is not None and not model.gradient_as_bucket_view:
            # DDP copies gradients out of its bucket.
            views = {id(p): view for p, view, _ in contents_of(grad_bucket, bucket.flat)}
        sums = self.begin_sums(has_norms=not bucket.is_folded)
        return DeferredBucket(bucket, self._cuts(grad_bucket, bucket), sums, self.gradients, views)

    def note_whole(self, grad_bucket: dist.GradBucket, bucket: Bucket) -> None:
        """Record a bucket for which backward waits."""
        self._whole.append(self._cuts(grad_bucket, bucket))
        if bucket.last:
            after_backward(self._whole_backward_ends)
            self.end_backward(Phase.IDLE)

    def _cuts(self, grad_bucket: dist.GradBucket, bucket: Bucket) -> list[Cut]:
        """Return the cuts of a bucket; see [Note: one norm]."""
        layout = [bucket.flat.numel()] if bucket.is_folded else bucket.layout
        return self.gradients.cuts(grad_bucket.parameters(), bucket.flat, layout)

    def _whole_backward_ends(self) -> None:
        """Let gradients answer for their norms as in a deferred step; see [Note: one norm]."""
        self.gradients.end_sums()
        self.gradients.install(self._whole, are_complete=True)

    def hand_back(self, deferred: DeferredBucket) -> None:
        """Record a bucket whose exchange is running without backward waiting for it."""
        self.awaiting_step.append(deferred)
        if deferred.bucket.last:
            self.sums.expect(deferred.bucket)
            self._guard()
            if not after_backward(self._backward_ends):  # in Join's shadow pass
                self.end_backward(Phase.REDUCED)

    # --- other buckets ---------------------------------------------------------------------------

    def refit(self, sizes: BucketSizes | None, *, hooked: bool = True) -> bool:
        """Give the model other buckets in its next training forward outside of ``no_sync()``.

        See [Note: refit].

        All ranks must make the call between the same two backward passes. It may be made in the
        hook of a step's last bucket, as soon as `begin_with` has recorded that bucket. A later call
        replaces an earlier one.

        Args:
            sizes: the sizes of the buckets; None for the user's own.
            hooked: whether the model has its hook; otherwise it is plain DDP, and no hook runs
                until another refit.

        Returns:
            False if the model keeps its buckets and its hook. The reason is logged. It is the same
            on all ranks.
        """
        model = self.model()
        if model is None or self.phase is Phase.CLOSED:
            return False
        if self.refitter is None:
            self.refitter = Refitter(model, self.known)
        with self.unwatched():
            reason = self.refitter.why_not()
        if self._is_compiled or any(True for _ in compiled_modules(model)):
            reason = "compiled code was cut at the borders of the present buckets"
        if self.turn is not None and not hooked:
            reason = "the hook takes turns"
        if reason is not None:
            logger.info("the model keeps its buckets: %s", reason)
            return False
        self._wanted = sizes, hooked
        return True

    @property
    def is_plain(self) -> bool:
        """Whether a refit has made the model plain DDP, so that no hook runs."""
        return self.refitter is not None and not self.refitter.is_hooked

    def _refit(self, sizes: BucketSizes | None, hooked: bool) -> None:
        """Give the model other buckets, unless it must wait. Nothing is pending."""
        refitter = self.refitter
        assert refitter is not None
        former = refitter.sizes, refitter.is_hooked
        self.gradients.forget_buckets()
        with self.unwatched():
            if refitter.refit(sizes, hooked=hooked) or refitter.why_not() is not None:
                self._wanted = None
        if former != (refitter.sizes, refitter.is_hooked):
            self.is_settled = False
            self._shape = []
            self._former_backwards = self._backwards

    def refuse(self) -> None:
        """Record that a bucket was refused."""
        self._enter(Phase.REFUSED if self.phase in _IN_BACKWARD else Phase.BROKEN)

    def end_backward(self, phase: Phase) -> None:
        """End a backward pass: enter ``phase``, or BROKEN if one of its buckets was refused."""
        self._enter(Phase.BROKEN if self.phase is Phase.REFUSED else phase)

    def _note_shape(self) -> None:
        """Record the buckets of a whole backward pass, whether it is deferred or not."""
        self._backwards += 1
        same = self._current == self._shape
        self._shape = self._current
        self._current = []
        # After this many backward passes, DDP no longer rebuilds its buckets.
        model = self.model()
        rebuilt_after = 2 if model is not None and model.static_graph else 1
        self.is_settled = same and self._backwards - self._former_backwards > rebuilt_after

    def _backward_ends(self) -> None:
        """Record the gradients that DDP has finished writing; see [Note: checked steps]."""
        for each in self.awaiting_step:
            if each.views is not None:  # DDP has copied gradients out of the bucket
                each.note_separate()
            if self.is_checked:
                each.bucket.wait()
                each.complete()
                each.gradient_seal = Seal(each.sealed(), bits=True)
        self.gradients.install([each.cuts for each in self.awaiting_step], are_complete=False)
        self.end_backward(Phase.REDUCED)

    def _forget_buckets(self) -> None:
        """Drop the buckets that await `step()`, which no longer needs them."""
        for each in self.awaiting_step:
            each.stages.close()
        # Use a new list, because another thread may be iterating over the old one.
        self.awaiting_step = []
        self._enter(Phase.IDLE if self.phase in (Phase.REDUCED, Phase.STEPPING) else self.phase)

    # --- before step() -------------------------------------------------------------------------

    def check_all_stepped(self) -> None:
        """Refuse a read or a forward if only some of the optimizers have stepped."""
        if self.phase is Phase.STEPPING:
            raise UnsupportedConfigurationError(
                "parameters are read while some optimizers have stepped and others have not; call "
                "all of them after each backward(), one after the other"
            )

    def make_whole(self) -> None:
        """Wait until ``p.grad`` holds the mean in all buckets that await `step()`."""
        with self.lock:
            buckets = self.awaiting_step
            for each in buckets:
                each.bucket.wait()
            # Check only after all have arrived: if user code catches the error, the next backward
            # pass may write to any of the buckets.
            for each in buckets:
                each.check_gradients()
                self.gradients.note_norms(each.cuts, each.bucket.flat)
                each.scalings.update(self.gradients.take_scalings(each.parameters))
                with as_in_step(each.bucket.flat.device.type):
                    each.complete()
            self.gradients.completed()
            if self.phase not in _IN_BACKWARD and self.awaiting_step is buckets:
                self._forget_buckets()

    def _complete_gradients(self) -> None:
        """Complete gradients because user code reads them."""
        with self.lock:
            if self.phase is Phase.REDUCED:
                self._early_looks.note(self._backwards)
            self.update_all()
            self.make_whole()

    def check_can_step(self) -> None:
        """Refuse a step if the last backward pass or step has failed."""
        if self.phase in _WITHOUT_STEP:
            raise UnsupportedConfigurationError(
                "the last backward() or step() raised; run another backward() before step() or "
                "clip_grad_norm_()"
            )

    def collect(self) -> None:
        """Collect the step's gradients; refuse them if the result would differ from plain DDP's."""
        self.check_can_step()
        self.gradients.stepped()
        if not self.awaiting_step:
            return
        for each in self.awaiting_step:
            each.collect()
            each.scalings.update(self.gradients.take_scalings(each.parameters))
        strangers = [p for p in self.parameters() if p.grad is not None and id(p) not in self.known]
        if not strangers:
            return
        network = None if self.guards is None else self.guards.network
        in_model = set() if network is None else {id(p) for _, p in named_parameters_of(network)}
        unfrozen = [p for p in strangers if id(p) in in_model]
        if unfrozen and network is not None:
            raise UnsupportedConfigurationError(
                UNFROZEN % (len(unfrozen), names_of(unfrozen, network))
            )
        raise UnsupportedConfigurationError(STRANGERS % len(strangers))

    def drop(self, number: int) -> None:
        """Do nothing after ``zero_grad`` of optimizer ``number``: buckets still await `step()`."""

    # --- step() --------------------------------------------------------------------------------

    def stepped(
        self,
        take: Callable[[int, Callable[[], Any]], Any],
        number: int,
        original: Callable[[], Any],
    ) -> Any:
        """Take a step of optimizer ``number``. This is called instead of its own `step()`.

        Args:
            take: a function that takes or defers the step. It receives ``number`` and a function
                that takes the whole step at once.
            number: the optimizer's index in ``optimizers``.
            original: the optimizer's own step.
        """
        with self.lock:  # another thread may be saving, and completing gradients
            if self.phase is Phase.CLOSED:  # a scheduler may still call this
                return original()
            self.update_all()
            for each in self.optimizers:
                guard_groups(each, self.look)

            def whole() -> Any:
                updated = [p for p in self.parameters(number) if p.requires_grad]
                result = original()
                self.report(updated)
                return result

            step_begins(self.optimizers[number])
            return take(number, whole)

    def break_step(self) -> None:
        """Record that a step raised an error after it had changed parameters."""
        self._enter(Phase.BROKEN)

    def defer(self, step: object, states: States | None = None) -> None:
        """Defer the last stage of all buckets that await a step until their parameters are needed.

        Args:
            step: the value to pass to that stage.
            states: the optimizer state that ``step`` will update; None if it updates none.
        """
        with self.lock:
            checked = self.is_checked
            shared = set() if states is None else self._shared_in(states)
            self.steps += 1
            self.why_whole = None
            network = None if self.guards is None else self.guards.network
            self._unguarded = self.forward_reads.unguarded(self.awaiting_step, network)
            for each in self.awaiting_step:
                each.step = step
                each.is_due = True
                updated = [update.parameter for update in each.updates]
                each.note_parameters(updated, bits=checked, views=self._sampled)
                if states is not None:
                    each.state_seal = StateSeal(states, updated, shared, bits=checked)
                for parameter in each.parameters:
                    self.awaiting_read[id(parameter)] = each
            self.awaiting_step = []
            self._enter(Phase.DEFERRED)

    def _shared_in(self, states: States) -> set[int]:
        """Return the ids of tensors in an optimizer's state that several parameters share."""
        seen = set[int]()
        shared = set[int]()
        for update in [update for each in self.awaiting_step for update in each.updates]:
            for tensor in tensors_of(states, update.parameter):
                if id(tensor) in seen:
                    shared.add(id(tensor))
                seen.add(id(tensor))
        return shared

    # --- forward -------------------------------------------------------------------------------

    def before_forward(self, *_: Any) -> None:
        """Prepare for DDP's forward by applying the updates that it may read past the guards."""
        is_compiled = called_by_compiled_code()
        self._is_compiled |= is_compiled
        is_recorded = torch.is_grad_enabled()
        self.check_all_stepped()
        if is_compiled or not self.is_settled or self._wanted is not None:
            self.update_all()
        else:
            self.update_unguarded()
        # If there was no step, complete gradients now, since backward will write to the buckets.
        self.make_whole()
        if is_recorded and not self.awaiting_read:
            self.gradients.withdraw_all()  # DDP reads their addresses to rebuild its buckets
        model = self.model()
        # With a static graph, the first backward pass of a reducer must be exchanged.
        is_exchanged = model is not None and model.require_backward_grad_sync
        if is_recorded and is_exchanged and self._wanted is not None:
            self._refit(*self._wanted)
        if self.phase in (Phase.IDLE, Phase.DEFERRED):
            self._enter(Phase.FORWARD)
        if self.forward_reads.begin(is_recorded and not is_compiled):
            self._guard()
        if is_recorded:
            self.take_turn(self._wait_for_first)
        if self.exchange is not None:
            self.exchange.steps.compute_begins()

    def after_forward(self, *_: Any) -> None:
        """Finish DDP's forward, and complete everything that backward would overwrite."""
        self.forward_reads.end()
        self.update_all()
        self.make_whole()
        if torch.is_grad_enabled():
            self.gradients.withdraw_all()  # autograd adds to them
        self._enter(Phase.IDLE if self.phase is Phase.FORWARD else self.phase)

    def take_turn(self, until_needed: Callable[[], None]) -> None:
        """Take the turn if there is one; see `ForwardTurn.take`."""
        if self.turn is not None and self.exchange is not None:
            self.turn.take(self.exchange, until_needed)

    def _wait_for_first(self) -> None:
        """Wait for the gradients that forward needs first."""
        buckets = [each.bucket for each in self.awaiting_read.values()]
        if buckets and self.turn is not None:
            first = max(buckets, key=lambda each: each.index)
            # Without a sibling job, the host runs ahead of the device, as it would without a mutex.
            first.wait(on_host=self.turn.turn.awaits_device)

    # --- reads ---------------------------------------------------------------------------------

    def is_fresh(self, parameter: torch.Tensor | None) -> bool:
        """Return whether ``parameter`` may be read without calling `reads`."""
        return not (
            self.forward_reads.thread or self.awaiting_step or id(parameter) in self.awaiting_read
        )

    def reads(self, parameters: Iterable[torch.Tensor | None]) -> None:
        """Apply the updates of ``parameters``, which are about to be read."""
        if threading.get_ident() in self._blind:
            return
        self.check_all_stepped()
        for parameter in parameters:
            if parameter is not None:
                self.forward_reads.note(parameter)
                if (found := self.awaiting_read.get(id(parameter))) is not None:
                    if found.is_due and drops_gradients():
                        return
                    with self.lock:
                        if found.is_due and self.phase is not Phase.FORWARD:
                            self._early_reads.note(self.steps)
                        self._update_these([found])

    def look(self) -> None:
        """Apply pending updates before user code iterates over the optimizers' parameters."""
        self.reads(self.parameters() if self.awaiting_read else ())

    def state_is_read(self) -> None:
        """Apply pending updates before user code uses the optimizer's state."""
        thread = threading.get_ident()
        if not self.awaiting_read or thread in self._blind or thread == self._applying:
            return
        with self.lock:
            if any([each.is_due for each in self.awaiting_read.values()]):
                self._early_reads.note(self.steps)
                self.update_all()

    @contextlib.contextmanager
    def unwatched(self) -> Iterator[None]:
        """Suspend the guards on this thread while it lists parameters without reading values."""
        thread = threading.get_ident()
        was_blind = thread in self._blind
        self._blind.add(thread)
        try:
            yield
        finally:
            if not was_blind:
                self._blind.discard(thread)

    # --- updates -------------------------------------------------------------------------------

    def update_unguarded(self) -> None:
        """Update parameters that may be read past the guards; see [Note: unseen reads]."""
        self._update_these(self._unguarded)

    def update_all(self) -> None:
        """Apply all pending updates."""
        self._update_these(self.awaiting_read.values())

    def _update_these(self, buckets: Collection[DeferredBucket]) -> None:
        if buckets:
            with self.lock:
                for each in sorted({*buckets}, key=lambda each: -each.bucket.index):
                    if each.is_due:  # otherwise another thread has applied it
                        self._update(each)

    def _update(self, deferred: DeferredBucket) -> None:
        """Wait for one bucket, and run the last stage of its journey, which is the update."""
        if self._failure is not None:
            raise UnsupportedConfigurationError(
                f"an earlier update raised {type(self._failure).__name__}, and an unknown part of "
                "it is done; continue from a checkpoint, with a new model, optimizer and state"
            ) from self._failure
        evaluates = not torch.is_grad_enabled()
        deferred.arriving.wait()
        deferred.check_gradients()
        with as_in_step(deferred.bucket.flat.device.type):
            deferred.check_pending(evaluates=evaluates)
        # A signal handler may read in the middle of the update. It gets the values at that moment.
        deferred.is_due = False
        try:
            with as_in_step(deferred.bucket.flat.device.type):
                self._applying = threading.get_ident()
                deferred.stages.run(deferred.step)
        except BaseException as error:  # Ctrl-C as well: a notebook continues after it
            self._failure = error
            deferred.is_due = True
            raise
        finally:
            self._applying = 0
        self.gradients.withdraw(deferred.parameters)
        for parameter in deferred.parameters:
            self.awaiting_read.pop(id(parameter), None)
        if deferred in self._unguarded:
            self._unguarded.remove(deferred)
        is_done = self.phase is Phase.DEFERRED and not self.awaiting_read
        self._enter(Phase.IDLE if is_done else self.phase)
        self.report(deferred.updated)

    def report(self, parameters: Sequence[torch.Tensor]) -> None:
        """Call the listeners with ``parameters``, which a step has updated."""
        if self.listeners and parameters:
            with torch.no_grad():
                for listener in [*self.listeners.values()]:
                    listener(parameters)


class ForwardReads:
    """Records which parameters forward reads through guards; see [Note: unseen reads]."""

    def __init__(self) -> None:
        # The thread whose forward is being recorded; 0 if none.
        self.thread = 0
        # The ids of the parameters that any forward, or only this one, has read through guards.
        self._seen: set[int] = set()
        self._read: set[int] = set()
        # Whether forwards have read all parameters of the latest deferred step through guards.
        self._all_seen = False
        self._has_recorded = False
        self._has_warned = False

    def begin(self, may_record: bool) -> bool:
        """Begin a forward. The reads of an earlier forward that raised do not count.

        Returns:
            True if this is the first forward that is recorded, so that guards must go up for it.
        """
        self.thread = threading.get_ident() if may_record and not self._all_seen else 0
        self._read = set()
        return self.thread > 0 and not self._has_recorded

    def note(self, parameter: torch.Tensor) -> None:
        """Record a read through a guard, unless it comes from a thread other than forward's."""
        if self.thread == threading.get_ident():
            self._read.add(id(parameter))

    def end(self) -> None:
        """End a forward."""
        self._has_recorded |= self.thread > 0
        self._seen |= self._read
        self.thread = 0

    def unguarded(
        self, buckets: Sequence[DeferredBucket], network: nn.Module | None
    ) -> list[DeferredBucket]:
        """Return the buckets that forward may read past the guards; warn once if there are any."""
        found = [
            each for each in buckets if not self._seen.issuperset(id(p) for p, _ in each.updates)
        ]
        self._all_seen = not found
        unseen = [p for each in found for p, _ in each.updates if id(p) not in self._seen]
        if unseen and self._has_recorded and not self._has_warned and network is not None:
            self._has_warned = True
            logger.warning(
                "forward does not read %d parameters (%s) through the module that has them "
                "(references kept elsewhere, a CUDA graph, a module not called in every step): "
                "correct, but their buckets arrive before forward, not during it",
                len(unseen),
                names_of(unseen, network),
            )
        return found


class _Often:
    """Warns once, as soon as an event has occurred in three steps that are close together."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._steps: deque[int] = deque(maxlen=_EARLY_STEPS_TO_WARN)
        self._has_warned = False

    def note(self, step: int) -> None:
        """Record the event in ``step``. Each step counts only once."""
        if self._has_warned or step in self._steps:
            return
        self._steps.append(step)
        if (
            len(self._steps) == _EARLY_STEPS_TO_WARN
            and step - self._steps[0] < _STEPS_CLOSE_TOGETHER
        ):
            self._has_warned = True
            logger.warning(self._text)


# --- steps -------------------------------------------------------------------------------------


def defer_step(pending: Pending, optimizer: PartialOptimizer, original: Callable[[], Any]) -> Any:
    """Defer a step of the only optimizer, or call ``original`` if the step cannot be deferred."""
    guard_state(optimizer.optimizer, pending.state_is_read)
    pending.check_can_step()
    if not pending.awaiting_step:
        pending.why_whole = _LOOKED_AT
    elif not pending.is_settled:
        pending.why_whole = BEGINS
    elif any([each.is_replaced() for each in pending.awaiting_step]):
        pending.why_whole = _REPLACED
    elif is_watched(optimizer.optimizer) or not optimizer.is_own:
        pending.why_whole = _WATCHED
    else:
        pending.why_whole = None
    pending.collect()
    if pending.why_whole is not None:
        pending.make_whole()
        pending.gradients.withdraw_all()
        return original()
    with pending.unwatched():
        plan = optimizer.plan()
        pending.defer(DeferredStep(optimizer, plan), plan.attributes["state"])
    return None


@contextlib.contextmanager
def as_in_step(device_type: str) -> Iterator[None]:
    """Compute as in `step()`: turn off forward's autocast, inference mode and torch.func."""
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

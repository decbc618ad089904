"""What is in custody between backward and forward: buckets that wait for ``step()``, and updates for whoever reads.

Forward, somebody who reads a parameter, or `flush` makes updates come.

[Note: versions] A tensor counts its in-place changes. What we do to a bucket goes through an alias with a counter of
its own, so a change of the counter that gradients carry is somebody else's, made while they were averaged in parts.

[Note: checked steps] A change through ``.data`` counts no version, see [Note: changes that no counter sees] in
``_owners/optimizer.py``. In the first steps the exchange is awaited at the end of backward, when this package writes
no more, and checksums of pending gradients and parameters are compared whenever they are used. In every step a few
elements of each parameter are compared when its update comes. ``CROSSOVER_CHECK=1`` compares checksums in every step.
"""

import contextlib
import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import torch
import torch.distributed as dist
from torch._C._functorch import peek_interpreter_stack
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.optim import Optimizer

from crossover_ddp._ddp.checks import named_parameters_of, names_of
from crossover_ddp._engine.buckets import Bucket
from crossover_ddp._engine.journeys import Trip
from crossover_ddp._engine.links import parts
from crossover_ddp._owners.optimizer import Sample, Seal, StepPlan, Update
from crossover_ddp._system import environment
from crossover_ddp.errors import UnsupportedConfigurationError

from .guards import Guards

logger = logging.getLogger(__name__)

States = dict[torch.Tensor, dict[str, Any]]
"""What an optimizer keeps, by parameter."""

_CHECKED_STEPS: Final = 3
_EARLY_STEPS_TO_WARN: Final = 3
_STEPS_CLOSE_TOGETHER: Final = 10
BEGINS: Final = "the first steps are not, until DDP's buckets stay as they are"
CHANGED: Final = (
    "expected the gradients that backward() left, got gradients that were changed in place (by "
    "torch.nn.utils.clip_grad_norm_ on a list of parameters made earlier, p.grad.mul_, p.grad.data.mul_) while only "
    "a part of them had been averaged; use state.clip_grad_norm_, or call state.flush() before that line"
)
WRITTEN: Final = (
    "parameters were written between optimizer.step() and their update, through references that were taken earlier (an "
    "average that is swapped in for an evaluation, p.add_, p.data.clamp_, p.data = ...); call state.flush() after "
    "step(), or take the parameters from model.parameters() in that line"
)
STATE_WRITTEN: Final = (
    "the optimizer's state was written between optimizer.step() and the update that it belongs to, through a reference "
    "that was taken earlier (momentum = optimizer.state[p][...]); call state.flush() after step(), or take it from "
    "optimizer.state in that line"
)
UNSTEPPED: Final = (
    "expected step() of the optimizer that DecoupledState was made with, got parameters that were written without it "
    "while only a part of their gradients had been averaged (by another optimizer, a SAM step on exchanged gradients, "
    "or p -= lr * p.grad on parameters taken earlier); call state.flush() before that line, or wrap the model again, "
    "with a DecoupledState of the optimizer that steps"
)
REPLACED: Final = (
    "expected the gradients that backward() left, got others in their place: either p.grad was replaced, or "
    "model.require_backward_grad_sync was changed between forward and backward, so that this backward() was not "
    "exchanged; set it before forward (or use model.no_sync()), and call flush() before you replace p.grad"
)
STRANGERS: Final = (
    "expected an optimizer of one DDP model, got gradients of %d other parameters in it; give them an optimizer of "
    "their own"
)
UNFROZEN: Final = (
    "expected gradients that DDP averages, got %d of parameters that DDP does not know (%s): their requires_grad was "
    "set after the model was wrapped, so each rank would keep its own gradients and replicas would drift apart; wrap "
    "the model in DistributedDataParallel again, with a new state"
)


@dataclass(eq=False, slots=True)
class Share:
    """A bucket of one step: on its way, then waiting for ``step()``, then for somebody who needs its parameters.

    Args:
        bucket: on its way; forward needs the last one first.
        parameters: those whose gradients it holds.
        views: of ``bucket.flat``, by the parameter's id, if gradients are not views of DDP's buffer themselves. The
            mean is copied into them then; DDP allows nothing else.

    ``step``: what ``optimizer.step()`` has left to do for it. ``arriving``: what that waits for.
    ``pending``: its update is still to come; listeners are called with ``told``. The seals, and the sample of the
    parameters, show what user code has written since.
    """

    changed: ClassVar[str] = CHANGED
    replaced: ClassVar[str] = REPLACED
    bucket: Bucket
    parameters: list[torch.Tensor]
    views: Mapping[int, torch.Tensor] | None = None
    updates: list[Update] = field(default_factory=list)
    factor: torch.Tensor | None = None
    step: Callable[["Share"], None] = lambda _: None
    pending: bool = False
    told: list[torch.Tensor] = field(init=False)
    arriving: Trip = field(init=False)
    gradient_seal: Seal = field(init=False)
    parameter_seal: Seal | None = None
    parameter_sample: Sample | None = None
    state_seal: "StateSeal | None" = None
    _separate: dict[int, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.arriving, self.told = self.bucket, self.parameters
        self.gradient_seal = Seal([self.bucket.result])

    def collect(self) -> None:
        """Note which gradients are to be applied; one that the user has dropped is not."""
        self.check_gradients()
        self.updates = []
        begin = self.bucket.result.data_ptr()
        end = begin + self.bucket.result.nbytes
        for parameter in self.parameters:
            gradient = parameter.grad
            if gradient is None:
                continue
            if self.views is not None:
                is_ours = self._separate.get(id(parameter)) is gradient
            else:
                is_ours = begin <= gradient.data_ptr() < end or not gradient.numel()
            if not is_ours:
                raise UnsupportedConfigurationError(self.replaced)
            self.updates.append(Update(parameter, gradient))

    def note_separate(self) -> None:
        """Note the gradients that DDP has just written, where they are not views; call it when backward has ended."""
        self._separate = {id(p): p.grad for p in self.parameters if p.grad is not None}
        self.gradient_seal = Seal(self._separate.values())

    def land(self) -> None:
        """Put the mean, which is whole and scaled, where gradients still are; the bucket's is applied."""
        if not self.views:  # those of `owners` are none
            return
        kept = [
            p for p in self.parameters if p.grad is not None and self._separate.get(id(p)) is p.grad
        ]
        if kept:  # mostly `zero_grad()` has let them go
            gradients = [p.grad.data for p in kept if p.grad is not None]  # counts no version
            torch._foreach_copy_(gradients, [self.views[id(p)] for p in kept])
        self.updates = [
            Update(parameter, self.views[id(parameter)]) for parameter, _ in self.updates
        ]

    def sealed(self) -> list[torch.Tensor]:
        """Return the gradients as the user has them."""
        return [self.bucket.result] if self.views is None else [*self._separate.values()]

    def note_parameters(
        self, parameters: Sequence[torch.Tensor], *, bits: bool, views: dict[int, torch.Tensor]
    ) -> None:
        """Note parameters that user code is not to write from now on; see `Seal` and `Sample`."""
        self.parameter_seal = Seal(parameters, bits=bits)
        self.parameter_sample = Sample(parameters, views)

    def is_written(self, *, compares_values: bool = True) -> bool:
        """Tell whether user code has written the parameters since they were noted.

        ``compares_values``: look at the sample as well, for which the host waits for a device.
        """
        if self.parameter_seal is None or self.parameter_sample is None:
            return False
        return self.parameter_seal.is_broken or (
            compares_values and self.parameter_sample.differs()
        )

    def check_pending(self, *, evaluates: bool) -> None:
        """Refuse an update whose parameters, or whose part of the optimizer's state, user code has written.

        ``evaluates``: gradients are not recorded, so the host may wait for a device to compare values on it.
        """
        if self.is_written(compares_values=evaluates or not self.bucket.flat.is_cuda):
            raise UnsupportedConfigurationError(WRITTEN)
        if self.state_seal is not None and self.state_seal.is_broken:
            raise UnsupportedConfigurationError(STATE_WRITTEN)

    def check_gradients(self) -> None:
        """Refuse gradients that somebody has changed, see [Note: versions]."""
        if self.gradient_seal.is_broken:
            raise UnsupportedConfigurationError(self.changed)

    def scale(self) -> None:
        """Scale the gradients, which are whole."""
        if self.factor is not None:
            self.bucket.flat.mul_(self.factor)
            self.factor, self.gradient_seal = None, Seal(self.sealed())

    def own_pieces(self) -> Iterator[torch.Tensor]:
        """Yield the part of the mean that this rank owns, without gradients that are not applied."""
        self.bucket.own_sum.wait()
        flat, layout, rank = self.bucket.flat, self.bucket.layout, self.bucket.link.rank
        own, start = parts(flat, layout)[rank], sum(layout[:rank])
        for update in self.updates:
            place = update.gradient if self.views is None else self.views[id(update.parameter)]
            reals = place.itemsize // flat.itemsize  # DDP shows complex as real
            begin = place.storage_offset() * reals - flat.storage_offset()
            first = max(begin, start)
            stop = min(begin + place.numel() * reals, start + own.numel())
            if first < stop:
                yield own[first - start : stop - start]


class StateSeal:
    """The tensors that an optimizer keeps for some parameters, as they are now.

    Args:
        states: by parameter, the optimizer's ``state``.
        parameters: whose entries are noted.
        shared: ids of tensors that several parameters share, which the update of one of them may write.
        bits: see `Seal`.
    """

    def __init__(
        self, states: States, parameters: Sequence[torch.Tensor], shared: set[int], *, bits: bool
    ) -> None:
        self._states, self._parameters, self._shared = states, parameters, shared
        self._tensors = self._now()
        self._seal = Seal(self._tensors, bits=bits)

    @property
    def is_broken(self) -> bool:
        """Whether one of them was written, replaced or taken away since."""
        now = self._now()
        same = len(now) == len(self._tensors) and all(
            [a is b for a, b in zip(now, self._tensors, strict=True)]
        )
        return not same or self._seal.is_broken

    def _now(self) -> list[torch.Tensor]:
        return [
            t
            for p in self._parameters
            for t in tensors_of(self._states, p)
            if id(t) not in self._shared
        ]


def tensors_of(states: States, parameter: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that an optimizer keeps for a parameter, past the guard of its ``state``."""
    kept = dict.get(states, parameter)
    return (
        [] if kept is None else [each for each in kept.values() if isinstance(each, torch.Tensor)]
    )


class Pending:
    """What the last backward pass has left, and updates that are still to come; guards are up as long as there is any.

    One lock: a thread that saves a checkpoint may read parameters while another trains.

    Args:
        optimizers: whose steps are deferred.
        withheld: whether gradients are nobody's before ``step()``, so that they cannot be made whole.

    ``shares``: the buckets that ``step()`` has not taken. ``stale``: by the parameter's id, those whose updates are
    still to come. ``known``: ids of the model's parameters. ``plans``: by number, of the optimizers that have stepped,
    until all have. ``is_settled``: DDP's buckets stay as they are from now on. ``steps``: how many were deferred.
    ``seen``: ids of parameters that forward has read through guards. ``recording``: the thread of a forward whose reads
    extend it, when that ends; 0: none.
    """

    def __init__(self, optimizers: Sequence[Optimizer], *, withheld: bool = False) -> None:
        self.optimizers = optimizers
        self.lock = threading.RLock()
        self.stale: dict[int, Share] = {}
        self.seen: set[int] = set()
        self.guards: Guards | None = None
        self.known: set[int] = set()
        self.shares: list[Share] = []
        self.plans: dict[int, StepPlan] = {}
        self.is_open = self.is_broken = self.is_settled = self.in_forward = False
        self.recording, self._read = 0, set[int]()
        self.why_whole: str | None = BEGINS  # the last step's gradients, if they were
        self.steps = self._backwards = 0
        self._failure: BaseException | None = None  # of an update
        self._shape: tuple[object, ...] = ()
        self._sampled: dict[int, torch.Tensor] = {}  # views of parameters, see `Sample`
        self._withheld, self._always_checked = withheld, environment.is_set(environment.CHECK)
        # Told of parameters that are new, see `DecoupledState.on_update`.
        self.listeners: OrderedDict[int, Callable[[Sequence[torch.Tensor]], object]] = OrderedDict()
        self._blind: set[int] = set()  # threads
        self._applying = 0  # the thread whose optimizer reads its own state; 0: none
        self._unseen: list[
            Share
        ] = []  # of which it is not known that forward reads all through guards
        self._all_seen = self._has_recorded = self._warned_of_unseen = (
            False  # the first: in the last step
        )
        self._early_reads = _Often(
            "parameters or the optimizer's state are read between optimizer.step() and the next forward (a moving "
            "average, model.zero_grad() instead of optimizer.zero_grad(), ...): correct, but updates wait for the "
            "network"
        )
        self._early_looks = _Often(
            "parameters or gradients are looked at between backward() and optimizer.step() (clipping, GradScaler, logs "
            "of norms, ...): correct, but such steps are those of plain DDP; to clip, use state.clip_grad_norm_"
        )

    @property
    def is_checked(self) -> bool:
        """Whether the step under way is, see [Note: checked steps]."""
        return self._always_checked or self.steps < _CHECKED_STEPS

    # --- backward --------------------------------------------------------------------------------------------

    def begin_with(self, bucket: dist.GradBucket) -> None:
        """Note the next bucket; a new backward pass, which may begin with it, ends what the one before has left."""
        self.is_open = True
        if bucket.index() == 0:  # DDP goes through its buckets in order
            for share in self.shares:
                share.bucket.drop()
            self.shares, self.is_broken = [], False
            # Only where no forward came between, as when Join answers for a rank that is through with its inputs.
            self.update_all()

    def end(self, rebuilt_after: int) -> None:
        """Note the end of backward; DDP rebuilds its buckets after that of number ``rebuilt_after``, the latest."""
        shape = tuple(
            [(share.bucket.flat.numel(), *map(id, share.parameters)) for share in self.shares]
        )
        for share in self.shares:
            # Code that writes parameters before ``step()`` may read gradients.
            share.note_parameters(share.parameters, bits=False, views=self._sampled)
        self._backwards += 1
        same, self._shape = shape == self._shape, shape
        self.is_settled = same and self._backwards > rebuilt_after
        self.guard()

    def note_gradients(self) -> None:
        """Note what DDP has written, which is through; see [Note: checked steps]."""
        for share in self.shares:
            if share.views is not None:
                share.note_separate()
            if self.is_checked:
                share.bucket.wait()
                share.land()
                share.gradient_seal = Seal(share.sealed(), bits=True)
                share.note_parameters(share.parameters, bits=True, views=self._sampled)
        self.is_open = False

    # --- before step() ---------------------------------------------------------------------------------------

    @property
    def _is_whole(self) -> bool:
        """Whether a backward pass has ended, of which nothing was refused."""
        return bool(self.shares) and not self.is_open and not self.is_broken

    def check_all_stepped(self) -> None:
        """Refuse a read or a forward while some optimizers have stepped, and others not."""
        if self.plans:
            raise UnsupportedConfigurationError(
                "expected step() of all optimizers before parameters are read, got a read while some have not stepped; "
                "call all of them after each backward(), one after the other"
            )

    def check_stepped(self) -> None:
        """Refuse parameters that were written in the place of ``step()``: what wrote them saw gradients in parts."""
        with self.lock:
            if self._is_whole and any([share.is_written() for share in self.shares]):
                self.make_whole()
                raise UnsupportedConfigurationError(UNSTEPPED)

    def make_whole(self) -> None:
        """Wait until ``p.grad`` holds the mean, everywhere; not where owners keep it until ``step()``."""
        if self._withheld:
            return
        with self.lock:
            shares = self.shares
            for share in shares:
                share.bucket.wait()
            # Not before all are: code that catches the error may let the next backward write into any of the buckets.
            for share in shares:
                share.check_gradients()
                with as_in_step(share.bucket.flat.device.type):
                    share.scale()
                    share.land()
            if not self.is_open and self.shares is shares:  # no other backward has begun meanwhile
                self.shares = []
                self.guard()

    def collect(self) -> None:
        """Collect the step's gradients; refuse what would not give the result of plain DDP."""
        if self.is_open or self.is_broken:
            raise UnsupportedConfigurationError(
                "expected a whole backward() before step() and clip_grad_norm_(), got one, or a step(), that "
                "ended with an exception; call them after the next backward()"
            )
        if not self.shares:
            return
        for share in self.shares:
            share.collect()
        strangers = [p for p in self.parameters() if p.grad is not None and id(p) not in self.known]
        if not strangers:
            return
        in_model = (
            set()
            if self.guards is None
            else {id(p) for _, p in named_parameters_of(self.guards.network)}
        )
        unfrozen = [p for p in strangers if id(p) in in_model]
        if unfrozen and self.guards is not None:
            raise UnsupportedConfigurationError(
                UNFROZEN % (len(unfrozen), names_of(unfrozen, self.guards.network))
            )
        raise UnsupportedConfigurationError(STRANGERS % len(strangers))

    def parameters(self, number: int | None = None) -> list[torch.Tensor]:
        """Return all parameters of one optimizer, or of all of them, past the guards of their groups."""
        chosen = self.optimizers if number is None else self.optimizers[number : number + 1]
        return [
            p
            for each in chosen
            for group in each.param_groups
            for p in list.__iter__(group["params"])
        ]

    def defer(self, step: Callable[[Share], None], states: States | None = None) -> None:
        """Have ``step`` done for each bucket that has been collected, when its parameters are needed.

        ``states``: of the optimizer whose state ``step`` is going to update; None: it updates none.
        """
        with self.lock:
            checked = self.is_checked
            shared = set() if states is None else self._shared_in(states)
            self.steps, self.why_whole = self.steps + 1, None
            self._unseen = [
                s for s in self.shares if not self.seen.issuperset(id(p) for p, _ in s.updates)
            ]
            for share in self.shares:
                share.step, share.pending = step, True
                updated = [update.parameter for update in share.updates]
                share.note_parameters(updated, bits=checked, views=self._sampled)
                if states is not None:
                    share.state_seal = StateSeal(states, updated, shared, bits=checked)
                for parameter in share.parameters:
                    self.stale[id(parameter)] = share
            self._all_seen = not self._unseen
            unseen = [
                p for share in self._unseen for p, _ in share.updates if id(p) not in self.seen
            ]
            if (
                unseen
                and self._has_recorded
                and not self._warned_of_unseen
                and self.guards is not None
            ):
                self._warned_of_unseen = True
                logger.warning(
                    "forward does not read %d parameters (%s) through the module that has them (references kept "
                    "elsewhere, a CUDA graph, a module not called in every step): correct, but their buckets arrive "
                    "before forward, not during it",
                    len(unseen),
                    names_of(unseen, self.guards.network),
                )
            self.shares = []
            self.guard()

    def _shared_in(self, states: States) -> set[int]:
        """Return the ids of tensors that an optimizer keeps for several parameters together."""
        seen, shared = set[int](), set[int]()
        for share in self.shares:
            for parameter, _ in share.updates:
                for tensor in tensors_of(states, parameter):
                    (shared if id(tensor) in seen else seen).add(id(tensor))
        return shared

    # --- after step() ----------------------------------------------------------------------------------------

    def forward_begins(self, *, may_record: bool) -> None:
        """Note that forward begins to compute; of several per step the last one counts."""
        self.recording = threading.get_ident() if may_record and not self._all_seen else 0
        self._read = set()
        if self.recording and not self._has_recorded:
            self.guard()

    def forward_ends(self) -> None:
        """Note that forward has computed, and leave nothing open that backward would write into."""
        self._has_recorded |= self.recording > 0
        self.seen |= self._read
        self.recording = 0
        self.update_all()
        self.make_whole()
        self.guard()
        self.in_forward = False

    def is_fresh(self, parameter: torch.Tensor | None) -> bool:
        """Tell whether a read of it needs nothing of `reads`."""
        return not (self.recording or self.shares or self.plans or id(parameter) in self.stale)

    def reads(self, parameters: Iterable[torch.Tensor | None]) -> None:
        """Somebody is about to read these parameters.

        Before ``step()`` gradients are made whole: he may want to read or change them.
        """
        if threading.get_ident() in self._blind:
            return
        self.check_all_stepped()
        if self._is_whole and not self._withheld:
            with self.lock:
                if self._is_whole:
                    self.check_stepped()
                    self._early_looks.note(self._backwards)
                    self.make_whole()
        for parameter in parameters:
            if parameter is not None:
                if self.recording == threading.get_ident():
                    self._read.add(id(parameter))
                if (share := self.stale.get(id(parameter))) is not None:
                    with self.lock:
                        if share.pending and not self.in_forward:
                            self._early_reads.note(self.steps)
                        self._update_those([share])

    def state_is_read(self) -> None:
        """User code is about to read or write the optimizer's state, which pending updates are going to change."""
        thread = threading.get_ident()
        if not self.stale or thread in self._blind or thread == self._applying:
            return
        with self.lock:
            if any([share.pending for share in self.stale.values()]):
                self._early_reads.note(self.steps)
                self.update_all()

    @contextlib.contextmanager
    def unwatched(self) -> Iterator[None]:
        """Let this thread read what it likes: it does not look at values."""
        thread = threading.get_ident()
        was_blind = thread in self._blind
        self._blind.add(thread)
        try:
            yield
        finally:
            if not was_blind:
                self._blind.discard(thread)

    def update_unseen(self) -> None:
        """Update what forward may read past the guards, see [Note: reads that nobody sees]."""
        self._update_those(self._unseen)

    def update_all(self) -> None:
        """Update everything that is pending."""
        self._update_those(self.stale.values())

    def _update_those(self, shares: Collection[Share]) -> None:
        if shares:
            with self.lock:
                for share in sorted({*shares}, key=lambda each: -each.bucket.index):
                    if share.pending:  # else another thread was first
                        self._update(share)

    def _update(self, share: Share) -> None:
        """Wait for one bucket and apply the optimizer to its parameters."""
        if self._failure is not None:
            raise UnsupportedConfigurationError(
                f"expected updates that succeed, got {type(self._failure).__name__} in one, an unknown part of which "
                "is done; go on from a checkpoint, with a new model, optimizer and state"
            ) from self._failure
        evaluates = not torch.is_grad_enabled()
        share.arriving.wait()
        share.check_gradients()
        with as_in_step(share.bucket.flat.device.type):
            share.check_pending(evaluates=evaluates)
        # A signal's handler may read in the middle of it, and gets what is there by then.
        share.pending = False
        try:
            with as_in_step(share.bucket.flat.device.type):
                share.scale()
                share.land()
                self._applying = threading.get_ident()
                share.step(share)
        except BaseException as error:  # Ctrl-C, too, after which a notebook goes on
            self._failure, share.pending = error, True
            raise
        finally:
            self._applying = 0
        for parameter in share.parameters:
            self.stale.pop(id(parameter), None)
        if share in self._unseen:
            self._unseen.remove(share)
        self.guard()
        self.tell(share.told)

    def tell(self, parameters: Sequence[torch.Tensor]) -> None:
        """Say that a step has updated ``parameters``."""
        if self.listeners and parameters:
            with torch.no_grad():
                for listener in [*self.listeners.values()]:
                    listener(parameters)

    # --- guards ----------------------------------------------------------------------------------------------

    def guard(self) -> None:
        """See every read as long as something is pending."""
        with self.lock:
            if self.guards is None:
                return
            if self.stale or self.shares or self.recording:
                self.guards.up()
            else:
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
        if (
            len(self._steps) == _EARLY_STEPS_TO_WARN
            and step - self._steps[0] < _STEPS_CLOSE_TOGETHER
        ):
            self._has_warned = True
            logger.warning(self._text)


def check_not_scaled(optimizer: Optimizer, text: str) -> None:
    """Refuse, with ``text``, a step of which a GradScaler has told the optimizer its scale."""
    if any(getattr(optimizer, name, None) is not None for name in ("grad_scale", "found_inf")):
        raise UnsupportedConfigurationError(text)


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

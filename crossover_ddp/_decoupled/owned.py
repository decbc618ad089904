"""Buckets whose parameters have owners, and the steps that wait for all optimizers.

[Note: gradients that are withheld] Code that looks at such a gradient must not take it for the
mean. So it is NaN, a signalling one: arithmetic turns it into an ordinary NaN. A change therefore
shows in its bits, even a change that counts no version, such as those by GradScaler and through
``.data``. Copies keep the bits.
"""

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from crossover_ddp._ddp.checks import check_not_joined
from crossover_ddp._engine.journeys import JourneyCoroutine
from crossover_ddp._engine.links import Link
from crossover_ddp._owners.optimizer import PartialOptimizer, StepPlan, Update
from crossover_ddp.errors import ExchangeError, UnsupportedConfigurationError

from .forward_turn import ForwardTurn
from .pending import DeferredBucket, Pending, Phase

logger = logging.getLogger(__name__)

_SKIPPED_STEPS_TO_WARN: Final = 3
TOUCHED: Final = (
    "gradients were changed between backward() and step() (by torch.nn.utils.clip_grad_norm_, "
    "GradScaler, p.grad.mul_): where parameters have owners they are NaN, and only a parameter's "
    "owner has its mean; use state.clip_grad_norm_ to clip, and bfloat16 instead of a GradScaler"
)
UNOWNED: Final = (
    "expected step() of the optimizers that OwnerState was made with, got parameters that were "
    "written without it, and gradients that were dropped (by another optimizer, a SAM step on "
    "exchanged gradients, or p -= lr * p.grad): where parameters have owners gradients are NaN, "
    "and only a parameter's owner has its mean. Restore the parameters from a checkpoint; to train "
    "with another optimizer wrap the model again, with an OwnerState of it; for SAM keep the first "
    "pass in model.no_sync(), or use DecoupledState"
)
UNEXCHANGED: Final = (
    "the gradients that backward() left were replaced: either p.grad was assigned, which "
    "OwnerState does not allow, or model.require_backward_grad_sync was changed between forward "
    "and backward, so that this backward() was not exchanged; set it before forward, or use "
    "model.no_sync()"
)

# By the gradient's type: the type of its bits, and their value in a withheld gradient.
_MARKS: Final = {
    torch.float16: (torch.int16, 0x7D00),
    torch.bfloat16: (torch.int16, 0x7FA0),
    torch.float32: (torch.int32, 0x7FA00000),
    torch.float64: (torch.int64, 0x7FF4000000000000),
}


def withhold(gradient: torch.Tensor) -> None:
    """Mark a gradient whose mean only the owner has. Counts no version."""
    bits, value = _MARKS[gradient.dtype]
    gradient.data.view(bits).fill_(value)


def is_computed_with(gradient: torch.Tensor) -> bool:
    """Return whether arithmetic has changed a withheld gradient. To drop or zero it is none."""
    bits, value = _MARKS[gradient.dtype]
    return bool((gradient.isnan() & (gradient.view(bits) != value)).any())


class OwnedStep(NamedTuple):
    """The calls of `step()` of all optimizers after one backward pass, by the optimizer's place."""

    optimizers: Sequence[PartialOptimizer]
    plans: Mapping[int, StepPlan]

    def apply(self, updates: Iterable[Update]) -> None:
        """Update these parameters, each by its optimizer."""
        for number, plan in self.plans.items():
            of_this = [each for each in updates if id(each.parameter) in plan.group_of]
            self.optimizers[number].apply(plan, of_this)


@dataclass(eq=False, slots=True, kw_only=True)
class OwnedBucket(DeferredBucket):
    """A bucket of one step whose parameters have owners; see `DeferredBucket`.

    Args:
        packed: the buffer that travels, in parts by owner. It holds gradients, which are reduced,
            and after the step the parameters that owners have updated.
        layout: the length of each part.
        pieces: the place of each parameter in ``packed``, by the parameter's id.
        own: ids of the parameters that this rank owns.
    """

    changed: ClassVar[str] = TOUCHED  # see [Note: gradients that are withheld]
    replaced: ClassVar[str] = UNEXCHANGED
    packed: torch.Tensor
    layout: tuple[int, ...]
    pieces: Mapping[int, torch.Tensor]
    own: set[int]

    def take_step(self, step: OwnedStep) -> None:
        """Update the parameters that this rank owns, and pack them for the other ranks."""
        updates = self._own_updates()
        step.apply(updates)
        for parameter, _ in updates:
            self.pieces[id(parameter)].copy_(parameter)
        for _, gradient in updates:
            withhold(gradient)

    def _own_updates(self) -> list[Update]:
        """Scale the mean, and put it into the gradients of this rank's parameters.

        The mean goes where plain DDP would leave it: the bits of sums over a matrix may depend on
        where it begins in memory.
        """
        # Aliases: an optimizer may change them, which is no change by the user, see [Note:
        # versions].
        own = [Update(p, gradient.data) for p, gradient in self.updates if id(p) in self.own]
        means = [*self.own_pieces()]
        if self.factor is not None:
            for mean in means:
                mean.mul_(self.factor)
            self.factor = None
        if own:
            torch._foreach_copy_([gradient for _, gradient in own], means)
        return own

    def own_pieces(self) -> Iterator[torch.Tensor]:
        """Yield the mean gradients that this rank owns."""
        self.bucket.own_shard.wait()
        for parameter, _ in self.updates:
            if id(parameter) in self.own:
                yield self.pieces[id(parameter)]

    def gather(self, link: Link) -> JourneyCoroutine:
        """Return the stage of the journey that gathers updated parameters, for the engine."""
        return self.stages.travel()

    def take_over(self) -> None:
        """Overwrite the parameters of other owners by the values that these have sent."""
        others = [parameter for parameter, _ in self.updates if id(parameter) not in self.own]
        if others:
            torch._foreach_copy_(others, [self.pieces[id(parameter)] for parameter in others])


class OwnedPending(Pending):
    """The buckets and updates of a model whose parameters have owners; see `Pending`.

    Gradients are never completed on this rank. A step that the user skips is dropped.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        check: Callable[[dist.GradBucket], None],
        turn: ForwardTurn | None,
    ) -> None:
        super().__init__(optimizers, check, turn)
        # The place of the optimizer that has a parameter, by the parameter's id.
        self.number_of = {
            id(p): number for number in range(len(optimizers)) for p in self.parameters(number)
        }
        # The calls of `step()` since the latest backward pass, by the optimizer's place.
        self.plans: dict[int, StepPlan] = {}
        # Optimizers whose gradients were dropped since then.
        self._dropped: set[int] = set()
        # Number of steps in a row that were skipped.
        self._skipped = 0

    @property
    def owned(self) -> list[OwnedBucket]:
        """The buckets that await `step()`."""
        return cast(list[OwnedBucket], self.awaiting_step)

    @property
    def owned_unread(self) -> set[OwnedBucket]:
        """The buckets whose updates are still to be applied."""
        return cast(set[OwnedBucket], self.unread)

    def make_whole(self) -> None:
        """Leave the gradients: only owners have the mean."""

    def _gradients_are_read(self) -> None:
        """Leave the gradients: they show that they are withheld."""

    def check_backward(self) -> None:
        """Refuse a second backward pass without a step. Called before each bucket."""
        if self.phase in (Phase.BACKWARD, Phase.REFUSED):
            return
        self._dropped.clear()
        if self.awaiting_step:
            raise UnsupportedConfigurationError(
                "expected step() between two exchanges, got a second backward() without it; "
                "accumulate gradients in model.no_sync(), or drop them by zero_grad() of all "
                "optimizers if the step is to be skipped"
            )

    def before_forward(self, *_: Any) -> None:
        """Called before DDP's forward, see `Pending`; drop a step that is skipped."""
        self.check_all_stepped()
        self._forget_dropped()
        model = self.model()
        if model is not None:
            check_not_joined(
                model, "a rank without data takes no step, and so updates nothing that it owns"
            )
        super().before_forward()

    def add_plan(self, number: int, plan: StepPlan) -> None:
        """Note a call of `step()`."""
        self.plans[number] = plan
        self._enter(Phase.STEPPING)

    def take_plans(self) -> Mapping[int, StepPlan] | None:
        """Return the calls of `step()` if all optimizers with gradients have stepped, else None."""
        updates = [update for each in self.awaiting_step for update in each.updates]
        if not {self.number_of[id(update.parameter)] for update in updates} <= {*self.plans}:
            return None
        plans = self.plans
        self.plans = {}
        self._skipped = 0
        self._enter(Phase.REDUCED)
        return plans

    def drop(self, number: int) -> None:
        """Note that the gradients of an optimizer were dropped."""
        self._dropped.add(number)
        self._forget_dropped()

    def _forget_dropped(self) -> None:
        """Drop a step that cannot be taken, since its gradients were dropped."""
        if self.phase in (Phase.BACKWARD, Phase.REFUSED) or not self.awaiting_step:
            return
        parameters = [p for each in self.awaiting_step for p in each.parameters]
        numbers = {self.number_of[id(p)] for p in parameters}
        if not numbers <= self._dropped and any(p.grad is not None for p in parameters):
            return
        buckets = self.owned
        plans = self.plans
        self.plans = {}
        self._forget_buckets()
        for each in buckets:
            with contextlib.suppress(ExchangeError):  # final: the next backward pass raises it
                each.bucket.own_shard.wait()  # before its memory is freed
        if self.phase is not Phase.BROKEN:  # a refused backward has added to the gradients
            _check_dropped(buckets)
        if plans:
            names = [type(self.optimizers[number]).__name__ for number in sorted(plans)]
            raise UnsupportedConfigurationError(
                f"gradients were dropped after step() of {', '.join(names)} alone: owners update "
                "when all optimizers have stepped, so that step is lost; after each backward() "
                "call step() of all of them or of none, or use DecoupledState"
            )
        self._skipped += 1
        if self._skipped == _SKIPPED_STEPS_TO_WARN:
            logger.warning(
                "%d steps in a row were skipped: with OwnerState gradients are NaN until step(), "
                "finite or not; a loop that skips such steps never trains: let it look at the norm "
                "that state.clip_grad_norm_ returns",
                self._skipped,
            )


def _check_dropped(buckets: Sequence[OwnedBucket]) -> None:
    """Refuse to drop a step whose gradients, which are NaN, user code has used."""
    if any([each.is_written() for each in buckets]):
        raise UnsupportedConfigurationError(UNOWNED)
    # The user may be skipping steps because of the NaNs.
    if any([is_computed_with(gradient) for each in buckets for gradient in each.sealed()]):
        raise UnsupportedConfigurationError(TOUCHED)

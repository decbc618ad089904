"""Buckets whose parameters have owners, and steps that wait until all optimizers have stepped.

[Note: gradients that are withheld] If only the owner has the mean, other code must not mistake a
gradient for it. So the gradient is filled with a signalling NaN, which arithmetic turns into an
ordinary NaN. A change therefore shows in the bits, even if no version counter records it, as with
GradScaler or ``.data``. Copies keep the bits.

[Note: owners' updates] With a codec, an owner sends the change of each parameter, old to new, not
the parameter. It sets its own parameters back to the old values. All ranks then add the decoded
change, so they have the same bits. The owner keeps the rest of a change, in units of the parameter,
and adds it to the next one. A codec's error is small beside a change, but not beside a parameter.

[Note: old bits] With `Lossless`, an owner sends the difference between the bits of new and old
parameters. Other ranks need the old bits. They copy them in ``step()`` to where the new ones will
arrive, so that user code cannot change them before the message is decoded.
"""

import contextlib
import enum
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from crossover_ddp._ddp.checks import check_not_joined
from crossover_ddp._engine.buckets import Content, Run, bits_of, part_of, view_of
from crossover_ddp._engine.journeys import JourneyCoroutine
from crossover_ddp._engine.links import Link
from crossover_ddp._owners.optimizer import PartialOptimizer, StepPlan, Update
from crossover_ddp._owners.packing import Place
from crossover_ddp.errors import ExchangeError, UnsupportedConfigurationError

from .forward_turn import ForwardTurn
from .pending import DeferredBucket, Pending, Phase

logger = logging.getLogger(__name__)

_SKIPPED_STEPS_TO_WARN: Final = 3
TOUCHED: Final = (
    "gradients were changed between backward() and step(), or multiplied by a number computed from "
    "them (a norm of one's own, p.grad.add_): where parameters have owners they are NaN, and only "
    "a parameter's owner has its mean; clip by torch.nn.utils.clip_grad_norm_ or "
    "state.clip_grad_norm_"
)
UNOWNED: Final = (
    "expected step() of the optimizers that OwnerState was made with, got parameters that were "
    "written without it, and gradients that were dropped (by another optimizer, a SAM step on "
    "exchanged gradients, or p -= lr * p.grad): where parameters have owners gradients are NaN, "
    "and only a parameter's owner has its mean. Restore the parameters from a checkpoint; to train "
    "with another optimizer wrap the model again, with an OwnerState of it; for SAM keep the first "
    "pass in model.no_sync(), or use DecoupledState"
)
UNSTEPPED: Final = (
    "expected step() of the optimizers that OwnerState was made with, got parameters that were "
    "written without it (by another optimizer, a SAM step on exchanged gradients, or "
    "p -= lr * p.grad): where parameters have owners gradients are NaN, and only a parameter's "
    "owner has its mean; wrap the model again, with an OwnerState of the optimizer that steps"
)
UNEXCHANGED: Final = (
    "the gradients that backward() left were replaced: either p.grad was assigned, which "
    "OwnerState does not allow, or model.require_backward_grad_sync was changed between forward "
    "and backward, so that this backward() was not exchanged; set it before forward, or use "
    "model.no_sync()"
)

# For each gradient dtype: the bits of each element of a withheld gradient, as an integer.
_MARKS: Final = {
    torch.float16: 0x7D00,
    torch.bfloat16: 0x7FA0,
    torch.float32: 0x7FA00000,
    torch.float64: 0x7FF4000000000000,
}


def withhold(gradient: torch.Tensor) -> None:
    """Fill a gradient with the mark that only the owner has its mean.

    This does not change the gradient's version counter.
    """
    bits_of(gradient.data).fill_(_MARKS[gradient.dtype])


def is_computed_with(gradient: torch.Tensor) -> bool:
    """Return whether arithmetic has changed a withheld gradient. Zeroing it does not count."""
    is_changed = bits_of(gradient) != _MARKS[gradient.dtype]
    return bool((gradient.isnan() & is_changed).any())


class Returns(enum.Enum):
    """The contents of an owner's part on its way back to all ranks."""

    # New parameters.
    PARAMETERS = enum.auto()
    # With a codec: new minus old parameters, see [Note: owners' updates].
    CHANGES = enum.auto()
    # With `Lossless`: the bits of new parameters minus those of old ones, see [Note: old bits].
    BITS = enum.auto()


@dataclass(frozen=True, eq=False)
class PackedByOwner:
    """A bucket's gradients in a flat buffer, packed by owner, as `Compression.around` expects."""

    flat: torch.Tensor
    # The length of each owner's part.
    layout: tuple[int, ...]
    # Each parameter of the bucket, with its place in ``flat``.
    placed: Sequence[tuple[Content, Place]]

    def runs(self) -> list[Run]:
        """Return the place of each parameter."""
        return [Run(each.parameter, 0, place.there) for each, place in self.placed]

    def pieces(self) -> dict[int, torch.Tensor]:
        """Return a view of ``flat`` for each parameter, by its id."""
        return {
            id(each.parameter): view_of(part_of(self.flat, place.there), each.parameter)
            for each, place in self.placed
        }

    def owned_by(self, rank: int) -> set[int]:
        """Return the ids of the parameters that a rank owns."""
        return {id(each.parameter) for each, place in self.placed if place.owner == rank}


class OwnedStep(NamedTuple):
    """The optimizers' calls of `step()` after one backward pass, by the optimizer's number."""

    optimizers: Sequence[PartialOptimizer]
    plans: Mapping[int, StepPlan]

    def apply(self, updates: Iterable[Update]) -> None:
        """Update each parameter with its own optimizer."""
        for number, plan in self.plans.items():
            of_this = [each for each in updates if id(each.parameter) in plan.group_of]
            self.optimizers[number].apply(plan, of_this)


@dataclass(eq=False, slots=True, kw_only=True)
class OwnedBucket(DeferredBucket):
    """One step's bucket whose parameters have owners; see `DeferredBucket`.

    Args:
        packed: the buffer that travels, with one part per owner. It first holds the gradients to
            reduce, and after the step the parameters that the owners have updated.
        layout: the length of each owner's part.
        pieces: the view of ``packed`` that belongs to each parameter, by the parameter's id.
        own: the ids of the parameters that this rank owns.
        returns: the contents of each owner's part after the step.
    """

    changed: ClassVar[str] = TOUCHED  # see [Note: gradients that are withheld]
    packed: torch.Tensor
    layout: tuple[int, ...]
    pieces: Mapping[int, torch.Tensor]
    own: set[int]
    returns: Returns

    def collect(self) -> None:
        """Record which gradients to apply; refuse those that are not the bucket's own."""
        if self.is_replaced():
            raise UnsupportedConfigurationError(UNEXCHANGED)
        DeferredBucket.collect(self)

    def take_step(self, step: OwnedStep) -> None:
        """Update the parameters that this rank owns, and pack them for the other ranks."""
        updates = self._own_updates()
        former = []
        if self.returns is Returns.CHANGES:
            former = [parameter.clone() for parameter, _ in updates]
        elif self.returns is Returns.BITS:
            pieces = [self.pieces[id(parameter)] for parameter in self.parameters]
            torch._foreach_copy_(pieces, self.parameters)
        step.apply(updates)
        if self.returns is Returns.BITS:
            self._pack_bits()
        else:
            for parameter, _ in updates:
                self.pieces[id(parameter)].copy_(parameter)
        if self.returns is Returns.CHANGES:
            self._pack_changes([parameter for parameter, _ in updates], former)
        for _, gradient in updates:
            withhold(gradient)

    def _pack_changes(
        self, parameters: Sequence[torch.Tensor], former: Sequence[torch.Tensor]
    ) -> None:
        """Replace new parameters in `packed` by their changes; restore the parameters themselves.

        Args:
            parameters: the parameters that this rank has updated.
            former: their values before the update.
        """
        for parameter, old in zip(parameters, former, strict=True):
            self.pieces[id(parameter)].sub_(old)
            parameter.copy_(old)
        for unchanged in self.own - {*map(id, parameters)}:
            self.pieces[unchanged].zero_()

    def _pack_bits(self) -> None:
        """Replace this rank's old parameters in `packed` by differences of bits."""
        for parameter in self.parameters:
            if id(parameter) in self.own:
                piece = bits_of(self.pieces[id(parameter)])
                torch.sub(bits_of(parameter.detach()), piece, out=piece)

    def _own_updates(self) -> list[Update]:
        """Scale the mean, copy it into the gradients of this rank's parameters, and return those.

        The mean goes where plain DDP would leave it, because the bits of a sum over a matrix may
        depend on where the matrix begins in memory.
        """
        # These are aliases. If an optimizer changes them, it does not look like a change by the
        # user; see [Note: versions].
        own = [Update(p, gradient.data) for p, gradient in self.updates if id(p) in self.own]
        for parameter, gradient in own:
            mean = self.pieces[id(parameter)]
            for scaling in self.scalings.get(id(parameter), ()):
                scaling.apply(mean)
            gradient.copy_(mean)
        self.scalings = {}
        return own

    def own_means(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each parameter that this rank owns, with its mean gradient."""
        self.bucket.own_shard.wait()
        for parameter in self.parameters:
            if id(parameter) in self.own and parameter.grad is not None:
                yield parameter, self.pieces[id(parameter)]

    async def share_norms(self, own: torch.Tensor, link: Link) -> None:
        """Add up the squares of this rank's parameters; see `DeferredBucket.share_norms`."""
        nothing = own[:0]
        self.sums.add(
            [
                (p, self.pieces[id(p)].reshape(-1) if id(p) in self.own else nothing)
                for p in self.parameters
            ]
        )
        if self.bucket.last:
            await self.sums.gather(self.bucket, link)

    def gather(self, link: Link) -> JourneyCoroutine:
        """Return the journey stage that gathers updated parameters, for the engine to run."""
        return self.stages.travel()

    def take_over(self) -> None:
        """Overwrite other owners' parameters with the values that the owners have sent.

        With a codec, add the changes that all owners have sent, this rank included. A parameter
        without a gradient in this step may receive the rest of an earlier change.
        """
        if self.returns is Returns.CHANGES:
            changes = [self.pieces[id(parameter)] for parameter in self.parameters]
            torch._foreach_add_(self.parameters, changes)
            return
        others = [parameter for parameter, _ in self.updates if id(parameter) not in self.own]
        if others:
            torch._foreach_copy_(others, [self.pieces[id(parameter)] for parameter in others])


class OwnedPending(Pending):
    """The pending buckets and updates of a model whose parameters have owners; see `Pending`.

    No rank ever completes its gradients. If the user skips a step, it is dropped.
    """

    _completes: ClassVar[bool] = False

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        check: Callable[[dist.GradBucket], None],
        turn: ForwardTurn | None,
    ) -> None:
        super().__init__(optimizers, check, turn)
        # The number of the optimizer that has each parameter, by the parameter's id.
        self.number_of = {
            id(p): number for number in range(len(optimizers)) for p in self.parameters(number)
        }
        # The calls of `step()` since the latest backward pass, by the optimizer's number.
        self.plans: dict[int, StepPlan] = {}
        # The numbers of the optimizers whose gradients have been dropped since then.
        self._dropped: set[int] = set()
        # How many steps in a row were skipped.
        self._skipped = 0

    @property
    def owned(self) -> list[OwnedBucket]:
        """The buckets that await `step()`, with their own type."""
        return cast(list[OwnedBucket], self.awaiting_step)

    @property
    def owned_unread(self) -> set[OwnedBucket]:
        """The buckets whose updates have not been applied yet, with their own type."""
        return cast(set[OwnedBucket], self.unread)

    def make_whole(self) -> None:
        """Leave the gradients alone, because only owners have the mean."""

    def collect(self) -> None:
        """Collect the step's gradients; refuse factors that user code has computed from NaNs."""
        super().collect()
        scalings = {s for each in self.owned for taken in each.scalings.values() for s in taken}
        # A norm that is NaN because a gradient is makes a factor NaN as well, as in plain DDP.
        if any([each.is_nan() for each in scalings]) and self.sums.are_finite():
            raise UnsupportedConfigurationError(TOUCHED)

    def _backward_ends(self) -> None:
        # Code that writes to parameters before `step()` may have used gradients, which are NaN.
        for each in self.awaiting_step:
            each.note_parameters(each.parameters, bits=self.is_checked, views=self._sampled)
        super()._backward_ends()

    def check_backward(self) -> None:
        """Refuse a second backward pass without a step. This is called before each bucket."""
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
        """Drop a skipped step, then prepare for DDP's forward as in `Pending`."""
        self.check_all_stepped()
        self._forget_dropped()
        if self.phase is Phase.REDUCED and any([each.is_written() for each in self.awaiting_step]):
            raise UnsupportedConfigurationError(UNSTEPPED)
        model = self.model()
        if model is not None:
            check_not_joined(
                model, "a rank without data takes no step, and so updates nothing that it owns"
            )
        super().before_forward()

    def add_plan(self, number: int, plan: StepPlan) -> None:
        """Record that optimizer ``number`` has called `step()`."""
        self.plans[number] = plan
        self._enter(Phase.STEPPING)

    def take_plans(self) -> Mapping[int, StepPlan] | None:
        """Return all calls of `step()`; None until every optimizer with gradients has stepped."""
        updates = [update for each in self.awaiting_step for update in each.updates]
        if not {self.number_of[id(update.parameter)] for update in updates} <= {*self.plans}:
            return None
        plans = self.plans
        self.plans = {}
        self._skipped = 0
        self._enter(Phase.REDUCED)
        return plans

    def drop(self, number: int) -> None:
        """Record that the gradients of optimizer ``number`` were dropped."""
        self._dropped.add(number)
        self._forget_dropped()

    def _forget_dropped(self) -> None:
        """Drop the waiting step if its gradients were dropped."""
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
            with contextlib.suppress(ExchangeError):  # it is final: the next backward raises it
                each.bucket.own_shard.wait()  # before the bucket's memory is freed
        if self.phase is not Phase.BROKEN:  # a refused backward pass has added to the gradients
            _check_dropped(buckets)
        if plans:
            names = [type(self.optimizers[number]).__name__ for number in sorted(plans)]
            raise UnsupportedConfigurationError(
                f"gradients were dropped after step() of {', '.join(names)} alone: owners update "
                "when all optimizers have stepped, so that step is lost; after each backward() "
                "call step() of all of them or of none, or use DecoupledState"
            )
        if self.sums.are_finite():  # otherwise a GradScaler is right to skip the step
            self._skipped += 1
        if self._skipped == _SKIPPED_STEPS_TO_WARN:
            logger.warning(
                "%d steps in a row were skipped: with OwnerState gradients are NaN until step(), "
                "finite or not; a loop that skips such steps never trains: let it look at the norm "
                "that state.clip_grad_norm_ returns",
                self._skipped,
            )


def _check_dropped(buckets: Sequence[OwnedBucket]) -> None:
    """Refuse to drop a step if user code has used its gradients, which are NaN."""
    if any([each.is_written() for each in buckets]):
        raise UnsupportedConfigurationError(UNOWNED)
    # The user may be skipping steps because of these NaNs.
    if any([is_computed_with(gradient) for each in buckets for gradient in each.sealed()]):
        raise UnsupportedConfigurationError(TOUCHED)

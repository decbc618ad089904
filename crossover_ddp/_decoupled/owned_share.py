"""A bucket whose parameters have owners: they make new values or directions of its sums, and everybody takes them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import torch

from crossover_ddp._exchange.step import GradientFuture
from crossover_ddp._exchange.transfer import Sharded
from crossover_ddp.errors import UnsupportedConfigurationError

from .owned_optimizers import OwnedOptimizer, OwnedUpdate
from .partial_optimizer import PartialOptimizer, StepPlan, Update
from .shares import Share
from .withheld import is_computed_with, withhold

TOUCHED: Final = (
    "expected the gradients that backward() left, got gradients that were changed (by "
    "torch.nn.utils.clip_grad_norm_, GradScaler, p.grad.mul_): with owners='layers' they are NaN, and only a "
    "parameter's owner has its mean; use state.clip_grad_norm_ to clip, and bfloat16 instead of a GradScaler"
)


class Packed(NamedTuple):
    """A bucket's parameters by owner, see [Note: two buffers].

    Args:
        there: what is summed.
        back: what owners send; the same buffer where new values travel.
        gradients: by the parameter's id, in ``there``.
        pieces: what comes back of it, in ``back``.
    """

    there: Sharded
    back: Sharded
    gradients: Mapping[int, torch.Tensor]
    pieces: Mapping[int, torch.Tensor]


@dataclass(eq=False, slots=True)
class OwnedShare(Share):
    """A bucket of one step; see `Share`.

    Args:
        packed: where each parameter travels.
        owner_of: rank by the parameter's id.
        rank: this one.

    ``steps``: the optimizers that have stepped, and what ``step()`` has used.
    """

    packed: Packed | None = None
    owner_of: Mapping[int, int] = field(default_factory=dict)
    rank: int = 0
    steps: Sequence[tuple[OwnedOptimizer, StepPlan]] = ()
    gathered: GradientFuture | None = None

    @property
    def travelling_bytes(self) -> int:
        """Memory of what travels."""
        assert self.packed is not None
        buffers = {id(each.tensor): each.tensor for each in (self.packed.there, self.packed.back)}
        return sum(buffer.nbytes for buffer in buffers.values())

    def travelling(self) -> Sharded:
        """Return what owners have filled, for the gather."""
        assert self.packed is not None
        return self.packed.back

    def receive(self) -> None:
        """Wait for the mean, scale it, and put it where the optimizers of this rank, if it is the owner, see it.

        The mean goes where plain DDP would leave it: sums over matrices may depend on where these begin in memory.
        """
        own = self.deferred.own_part()
        if self.factor is not None:
            own.mul_(self.factor)
            self.factor = None
        for update, gradient in self._own_gradients():
            update.gradient.data.copy_(gradient)  # counts no version

    def owned_updates(self, plan: StepPlan) -> list[OwnedUpdate]:
        """Return what comes of the updates of one optimizer, that of ``plan``, which may reuse gradients' memory."""
        assert self.packed is not None
        return [
            OwnedUpdate(
                # An alias: what the optimizer does to it is not the user's doing, see [Note: versions].
                Update(update.parameter, update.gradient.data),
                self.packed.pieces[id(update.parameter)],
                self._is_own(update),
            )
            for update in self.updates
            if id(update.parameter) in plan.group_of
        ]

    def clear(self) -> None:
        """Withhold the mean of owned parameters again."""
        for update in self.updates:
            if self._is_own(update):
                withhold(update.gradient)

    def check_dropped(self) -> None:
        """Refuse to drop a step whose gradients somebody has computed with: he may skip all for what he saw."""
        if any([is_computed_with(gradient) for gradient in self._sealed()]):
            raise UnsupportedConfigurationError(TOUCHED)

    def _own_gradients(self) -> Iterator[tuple[Update, torch.Tensor]]:
        assert self.packed is not None
        for update in self.updates:
            if self._is_own(update):
                yield update, self.packed.gradients[id(update.parameter)]

    def _is_own(self, update: Update) -> bool:
        return self.owner_of[id(update.parameter)] == self.rank

    # --- as of `Share` ---------------------------------------------------------------------------------------

    def check_gradients(self) -> None:
        """Refuse gradients that somebody has changed, see [Note: gradients that are withheld]."""
        try:
            Share.check_gradients(self)
        except UnsupportedConfigurationError:
            raise UnsupportedConfigurationError(TOUCHED) from None

    def wait(self) -> None:
        """Wait for what owners have sent."""
        assert self.gathered is not None
        self.gathered.wait()

    def apply(self, partial: PartialOptimizer) -> None:
        """Take over what owners have sent."""
        for owned, plan in self.steps:
            owned.take_over(plan, self.owned_updates(plan))

    def land(self) -> None:
        """Leave gradients as they are: nobody but the owner has the mean."""

    def own_pieces(self, rank: int) -> Iterator[torch.Tensor]:
        """Yield the mean gradients that this rank owns."""
        self.deferred.own_part()
        for _, gradient in self._own_gradients():
            yield gradient
